#include "server/openai_gateway.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/openai/batch_prompts.h"
#include "server/openai/generation_job.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openapi.h"
#include "server/openai/reply_json.h"
#include "server/version.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";
constexpr size_t kMaxRequestId = 128;

// The client's own id if it can stand in a header and a log line.
std::string RequestIdOf(const HttpRequest& request) {
  const std::string_view given = request.Header("x-request-id");
  const bool usable = !given.empty() && given.size() <= kMaxRequestId &&
                      std::all_of(given.begin(), given.end(), [](char c) { return c > ' ' && c < 0x7F; });
  return usable ? std::string(given) : MakeRequestId("req-");
}

HttpResponse JsonResponse(std::string body, int status = 200) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

std::string ModelJson(const ServedModel& model, const std::string& name) {
  return absl::StrCat("{\"id\":", JsonString(name), ",\"object\":\"model\",\"created\":", model.created,
                      ",\"owned_by\":\"k3serve\",\"root\":", JsonString(model.root),
                      ",\"parent\":null,\"max_model_len\":", model.engine->Limits().max_model_len, "}");
}

}  // namespace

const OpenAiGateway::RouteEntry OpenAiGateway::kRoutes[] = {
    {"/v1/chat/completions", "POST", true, &OpenAiGateway::ChatCompletions},
    {"/v1/completions", "POST", true, &OpenAiGateway::Completions},
    {"/v1/models", "GET", true, &OpenAiGateway::ListModels},
    {"/tokenize", "POST", true, &OpenAiGateway::Tokenize},
    {"/detokenize", "POST", true, &OpenAiGateway::Detokenize},
    {"/render", "POST", true, &OpenAiGateway::Render},
    {"/tokenizer_info", "GET", true, &OpenAiGateway::TokenizerInfo},
    {"/health", "GET", false, &OpenAiGateway::Ready},
    {"/health/live", "GET", false, &OpenAiGateway::Live},
    {"/health/ready", "GET", false, &OpenAiGateway::Ready},
    {"/metrics", "GET", false, &OpenAiGateway::RenderMetrics},
    {"/version", "GET", false, &OpenAiGateway::Version},
    {"/openapi.json", "GET", false, &OpenAiGateway::OpenApi},
    {kModelPrefix, "GET", true, &OpenAiGateway::GetModel},  // and what follows
};

OpenAiGateway::OpenAiGateway(OpenAiOptions options, GenerationService* service, const ServerHealth* health,
                             Metrics* metrics, const ApiKeys* keys)
    : options_(options), service_(service), health_(health), metrics_(metrics), keys_(keys) {}

const OpenAiGateway::RouteEntry* OpenAiGateway::FindRoute(std::string_view path) {
  for (const RouteEntry& route : kRoutes) {
    if (path == route.path || (route.path == kModelPrefix && path.starts_with(kModelPrefix))) return &route;
  }
  return nullptr;
}

bool OpenAiGateway::IsOpenRoute(std::string_view path) {
  const RouteEntry* route = FindRoute(path);
  return route != nullptr && !route->needs_key;
}

std::optional<HttpResponse> OpenAiGateway::CheckHead(const HttpRequest& request) {
  const RouteEntry* route = FindRoute(request.path);
  if (route == nullptr) {
    if (request.method == "OPTIONS" && request.path == "*") {
      return HttpResponse{.status = 204, .headers = {{"Allow", "GET, HEAD, POST, OPTIONS"}}};
    }
    if (request.path == "/v1/responses" || request.path == "/v1/messages") {
      return ErrorResponse(404, absl::StrCat(request.path, " is not part of this release; use /v1/chat/completions"),
                           "unsupported_route");
    }
    return ErrorResponse(404, absl::StrCat("there is no route ", Excerpt(request.path)), "unknown_route");
  }
  const bool get = route->method == "GET";
  const std::string allow = get ? "GET, HEAD, OPTIONS" : "POST, OPTIONS";
  if (request.method == "OPTIONS") return HttpResponse{.status = 204, .headers = {{"Allow", allow}}};
  if (request.method != route->method && !(get && request.method == "HEAD")) {
    HttpResponse response = ErrorResponse(405,
                                          absl::StrCat(Excerpt(request.path), " takes ", std::string(route->method),
                                                       ", not ", Excerpt(request.method, 20)),
                                          "method_not_allowed");
    response.headers.emplace_back("Allow", allow);
    return response;
  }
  if (const std::string_view coding = request.Header("content-encoding");
      !coding.empty() && !absl::EqualsIgnoreCase(std::string(coding), "identity")) {
    return ErrorResponse(
        415, absl::StrCat("a body is sent as it is, not with Content-Encoding ", Excerpt(std::string(coding), 40)),
        "unsupported_encoding");
  }
  if (route->needs_key && keys_ != nullptr && keys_->required()) {
    const absl::Status status = keys_->Check(request.Header("authorization"));
    if (!status.ok()) return ErrorResponse(ErrorOf(status));
  }
  return std::nullopt;
}

HttpReply OpenAiGateway::Handle(HttpRequest request, HttpWaker waker) {
  return (this->*FindRoute(request.path)->run)(request, std::move(waker));
}

HttpResponse OpenAiGateway::Error(int status, std::string_view message) { return ErrorResponse(status, message); }

absl::StatusOr<std::shared_ptr<const ServedModel>> OpenAiGateway::Model() const {
  std::shared_ptr<const ServedModel> model = service_->model();
  if (model != nullptr) return model;
  absl::Status status = health_->Admission();
  if (status.ok()) status = UnavailableFor("loading", "the model is loading", absl::Seconds(2));
  return status;
}

HttpReply OpenAiGateway::ChatCompletions(const HttpRequest& request, HttpWaker waker) {
  absl::StatusOr<JsonValue> body = ParseBody(request.body);
  if (!body.ok()) return Generate(body.status(), OpenAiRoute::kChat, request, std::move(waker));
  return Generate(ParseChatRequest(*body, options_), OpenAiRoute::kChat, request, std::move(waker));
}

HttpReply OpenAiGateway::Completions(const HttpRequest& request, HttpWaker waker) {
  absl::StatusOr<JsonValue> body = ParseBody(request.body);
  if (!body.ok()) return Generate(body.status(), OpenAiRoute::kCompletions, request, std::move(waker));
  return Generate(ParseCompletionRequest(*body, options_), OpenAiRoute::kCompletions, request, std::move(waker));
}

HttpReply OpenAiGateway::Generate(absl::StatusOr<OpenAiRequest> parsed, OpenAiRoute route, const HttpRequest& request,
                                  HttpWaker waker) {
  const std::string request_id = RequestIdOf(request);
  const TraceContext trace = service_->TraceOf(request.Header("traceparent"));
  const auto refuse = [&](const absl::Status& status, const std::string& prompt = "prompt") {
    service_->CountRefusal(status);
    const std::string field = parsed.ok() ? parsed->max_tokens_field : "max_tokens";
    HttpResponse response = ErrorResponse(ErrorOf(status, route, field, request_id, prompt));
    response.headers.emplace_back("x-request-id", request_id);
    if (trace.active()) response.headers.emplace_back("traceparent", trace.Header());
    return response;
  };
  if (!parsed.ok()) return refuse(parsed.status());
  if (keys_ != nullptr) {
    static_cast<void>(keys_->Check(request.Header("authorization"), &parsed->common.caller));  // CheckHead has asked
  }
  parsed->common.trace = trace;
  const absl::StatusOr<std::shared_ptr<const ServedModel>> model = Model();
  if (!model.ok()) return refuse(model.status());
  const std::string& name = parsed->common.model;
  const std::vector<std::string>& names = (*model)->names;
  const bool is_served = name.empty() || std::find(names.begin(), names.end(), name) != names.end();
  if (parsed->prompts.size() > 1 && is_served) {
    size_t bad = 0;
    const absl::Status status = PrepareBatch(**model, parsed->common, options_.vendor_strict, &parsed->prompts, &bad);
    if (!status.ok()) return refuse(status, absl::StrCat("prompt[", bad, "]"));
  }
  ReplyHeader header;
  header.id = MakeRequestId(route == OpenAiRoute::kChat ? "chatcmpl-" : "cmpl-");
  header.created = std::time(nullptr);
  header.model = name.empty() ? (*model)->names.front() : name;
  header.fingerprint = absl::StrCat("fp_", (*model)->weights_version);
  header.tokenizer = (*model)->tokenizer;
  return std::shared_ptr<HttpJob>(
      GenerationJob::Start(service_, *std::move(parsed), std::move(header), request_id, std::move(waker)));
}

HttpReply OpenAiGateway::ListModels(const HttpRequest&, HttpWaker) {
  const absl::StatusOr<std::shared_ptr<const ServedModel>> model = Model();
  if (!model.ok()) return ErrorResponse(ErrorOf(model.status()));
  std::string body = "{\"object\":\"list\",\"data\":[";
  for (const std::string& name : (*model)->names) {
    if (body.back() == '}') body += ',';
    body += ModelJson(**model, name);
  }
  return JsonResponse(body + "]}");
}

HttpReply OpenAiGateway::GetModel(const HttpRequest& request, HttpWaker waker) {
  const std::string name = request.path.substr(kModelPrefix.size());
  if (name.empty()) return ListModels(request, std::move(waker));
  const absl::StatusOr<std::shared_ptr<const ServedModel>> model = Model();
  if (!model.ok()) return ErrorResponse(ErrorOf(model.status()));
  const std::vector<std::string>& names = (*model)->names;
  if (std::find(names.begin(), names.end(), name) != names.end()) return JsonResponse(ModelJson(**model, name));
  OpenAiError error{.status = 404,
                    .message = absl::StrCat("the model \"", Excerpt(name), "\" is not served here"),
                    .type = "invalid_request_error",
                    .param = "model",
                    .code = "model_not_found"};
  return ErrorResponse(error);
}

HttpReply OpenAiGateway::Live(const HttpRequest&, HttpWaker) { return JsonResponse("{\"status\":\"live\"}"); }

HttpReply OpenAiGateway::Ready(const HttpRequest&, HttpWaker) {
  const ServingState state = health_->State();
  std::string body = absl::StrCat("{\"status\":\"", ServingStateName(state), "\"");
  if (state == ServingState::kLoading) absl::StrAppend(&body, ",\"load_percent\":", health_->LoadPercent());
  HttpResponse response = JsonResponse(body + "}", state == ServingState::kServing ? 200 : 503);
  if (state != ServingState::kServing) response.headers.emplace_back("Retry-After", "1");
  return response;
}

HttpReply OpenAiGateway::RenderMetrics(const HttpRequest&, HttpWaker) {
  if (metrics_ == nullptr) return ErrorResponse(404, "this server keeps no metrics", "unknown_route");
  HttpResponse response;
  response.content_type = Metrics::kContentType;
  response.body = metrics_->Render();
  return response;
}

HttpReply OpenAiGateway::Version(const HttpRequest&, HttpWaker) {
  return JsonResponse(absl::StrCat("{\"version\":", JsonString(kVersion), ",\"commit\":", JsonString(kCommit), "}"));
}

HttpReply OpenAiGateway::OpenApi(const HttpRequest&, HttpWaker) { return JsonResponse(OpenApiDocument()); }

}  // namespace k3
