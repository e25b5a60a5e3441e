#pragma once

#include <optional>
#include <string_view>
#include <utility>

#include "server/http/http_handler.h"
#include "server/openai_gateway.h"

namespace k3 {

// The gateway's open routes only, for a listener without TLS that probes and scrapers use.
class ProbeHandler final : public HttpHandler {
 public:
  explicit ProbeHandler(OpenAiGateway* gateway) : gateway_(gateway) {}

  std::optional<HttpResponse> CheckHead(const HttpRequest& request) override {
    if (!OpenAiGateway::IsOpenRoute(request.path)) return gateway_->Error(404, "this port answers probes only");
    return gateway_->CheckHead(request);
  }
  HttpReply Handle(HttpRequest request, HttpWaker waker) override {
    return gateway_->Handle(std::move(request), std::move(waker));
  }
  HttpResponse Error(int status, std::string_view message) override { return gateway_->Error(status, message); }

 private:
  OpenAiGateway* const gateway_;
};

}  // namespace k3
