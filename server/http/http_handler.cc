#include "server/http/http_handler.h"

namespace k3 {

void HttpWriter::Respond(HttpResponse response) {
  head_ = std::move(response);
  started_ = true;
  whole_ = true;
  finished_ = true;
}

void HttpWriter::StartStream(HttpResponse head) {
  head_ = std::move(head);
  started_ = true;
}

}  // namespace k3
