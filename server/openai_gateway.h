#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "server/api_keys.h"
#include "server/generation_service.h"
#include "server/health.h"
#include "server/http/http_handler.h"
#include "server/metrics.h"
#include "server/openai/openai_request.h"

namespace k3 {

// The HTTP routes: OpenAI's completions, text and prompt helpers, health, metrics. Translates JSON to the same
// GenerationRequest that gRPC makes, and events back to JSON; everything else is GenerationService's. Thread-safe.
class OpenAiGateway final : public HttpHandler {
 public:
  // All must outlive the gateway; `metrics` and `keys` may be null (no metrics; everybody may call).
  OpenAiGateway(OpenAiOptions options, GenerationService* service, const ServerHealth* health, Metrics* metrics,
                const ApiKeys* keys);

  std::optional<HttpResponse> CheckHead(const HttpRequest& request) override;
  HttpReply Handle(HttpRequest request, HttpWaker waker) override;
  // Whether the route answers without a key.
  static bool IsOpenRoute(std::string_view path);

  HttpResponse Error(int status, std::string_view message) override;

 private:
  using Route = HttpReply (OpenAiGateway::*)(const HttpRequest& request, HttpWaker waker);
  struct RouteEntry {
    std::string_view path;
    std::string_view method;  // GET includes HEAD
    bool needs_key;
    Route run;
  };
  static const RouteEntry kRoutes[];
  static const RouteEntry* FindRoute(std::string_view path);

  HttpReply ChatCompletions(const HttpRequest& request, HttpWaker waker);
  HttpReply Completions(const HttpRequest& request, HttpWaker waker);
  HttpReply Generate(absl::StatusOr<OpenAiRequest> parsed, OpenAiRoute route, const HttpRequest& request,
                     HttpWaker waker);
  HttpReply Tokenize(const HttpRequest& request, HttpWaker waker);
  HttpReply Detokenize(const HttpRequest& request, HttpWaker waker);
  HttpReply Render(const HttpRequest& request, HttpWaker waker);
  HttpReply TokenizerInfo(const HttpRequest& request, HttpWaker waker);
  HttpReply ListModels(const HttpRequest& request, HttpWaker waker);
  HttpReply GetModel(const HttpRequest& request, HttpWaker waker);
  HttpReply Live(const HttpRequest& request, HttpWaker waker);
  HttpReply Ready(const HttpRequest& request, HttpWaker waker);
  HttpReply RenderMetrics(const HttpRequest& request, HttpWaker waker);
  HttpReply Version(const HttpRequest& request, HttpWaker waker);
  HttpReply OpenApi(const HttpRequest& request, HttpWaker waker);

  // The model, or why there is none yet.
  absl::StatusOr<std::shared_ptr<const ServedModel>> Model() const;

  const OpenAiOptions options_;
  GenerationService* const service_;
  const ServerHealth* const health_;
  Metrics* const metrics_;
  const ApiKeys* const keys_;
};

}  // namespace k3
