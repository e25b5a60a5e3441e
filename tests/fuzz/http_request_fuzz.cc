// Any bytes as HTTP requests on one connection, cut at the place that the first two bytes tell: the same requests,
// bodies and errors as in one piece, and a budget that is given back.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/request_parser.h"

namespace {

void Require(bool condition, int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "line %d\n", line);
  std::abort();
}

// What a connection would see, written down.
std::string Read(std::string_view bytes, size_t cut, k3::BodyBudget& budget) {
  using State = k3::HttpRequestParser::State;
  std::string seen;
  std::string input;
  std::optional<k3::HttpRequestParser> parser;
  bool head_told = false;
  for (const std::string_view piece : {bytes.substr(0, cut), bytes.substr(cut)}) {
    input += piece;
    for (;;) {
      if (!parser) {
        while (!input.empty() && (input[0] == '\r' || input[0] == '\n')) input.erase(0, 1);
        if (input.empty()) break;
        parser.emplace(4096, 2048, budget);
        head_told = false;
      }
      const size_t used = parser->Consume(input);
      Require(used <= input.size());
      input.erase(0, used);
      const State state = parser->state();
      if (state == State::kFailed) {
        Require(parser->error_status() >= 400 && !parser->error_message().empty());
        return seen + "failed " + std::to_string(parser->error_status());
      }
      if (state != State::kHead && !head_told) {
        head_told = true;
        seen += parser->request().method + " " + parser->request().path + "?" + parser->request().query +
                (parser->keep_alive() ? " keep" : " close") + "\n";
        for (const auto& [name, value] : parser->request().headers) seen += name + "=" + value + "\n";
        continue;
      }
      if (state == State::kDone) {
        std::shared_ptr<void> lease;
        const k3::HttpRequest request = parser->TakeRequest(&lease);
        Require(request.body.size() <= 2048);
        seen += "body " + request.body + "\n";
        parser.reset();
        continue;
      }
      if (used == 0) break;
    }
  }
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t cut = (data[0] << 8 | data[1]) % (bytes.size() + 1);
  k3::BodyBudget budget(1 << 20);
  const std::string whole = Read(bytes, bytes.size(), budget);
  const std::string pieces = Read(bytes, cut, budget);
  // Beast refuses a bad first line at once when it comes in the first piece, else when the head is complete; a head
  // that is wrong twice, in a line's end or its size too, is refused for what is found first.
  const size_t failure = whole.rfind("failed ");
  const std::string before = failure == std::string::npos ? whole : whole.substr(0, failure);
  const bool later = failure != std::string::npos && (pieces == before || pieces.rfind(before + "failed ", 0) == 0);
  Require(whole == pieces || later);
  Require(budget.used() == 0);
  return 0;
}
