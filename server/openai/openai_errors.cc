#include "server/openai/openai_errors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/error_details.h"
#include "server/openai/reply_json.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

// A body stays small whatever the client sent.
constexpr size_t kMaxMessageBytes = 2000;

bool Strip(std::string_view prefix, std::string_view* path) {
  if (!path->starts_with(prefix)) return false;
  path->remove_prefix(prefix.size());
  return true;
}

// "[3].text" -> "[3]"; "" -> ""
std::string_view FirstIndex(std::string_view rest) {
  return rest.starts_with('[') ? rest.substr(0, rest.find(']') + 1) : std::string_view();
}

// GenerationSpec's path -> the name that this route's clients know.
std::string ParamOf(std::string_view path, OpenAiRoute route, std::string_view max_tokens_field,
                    std::string_view prompt) {
  const bool chat = route == OpenAiRoute::kChat;
  if (path == "input" || path == "chat") return chat ? "messages" : std::string(prompt);
  if (Strip("chat.", &path)) return std::string(path);
  if (path == "prompt" || path.starts_with("prompt.segments")) return std::string(prompt);
  if (Strip("tokens.ids", &path)) return absl::StrCat(std::string(prompt), std::string(FirstIndex(path)));
  if (Strip("sampling.", &path)) return std::string(path.substr(0, path.find('[')));
  if (path == "stopping.max_new_tokens") return std::string(max_tokens_field);
  if (path == "stopping.min_new_tokens") return "min_tokens";
  if (path == "stopping.repetition") return "repetition_stop";
  if (Strip("stopping.", &path)) return std::string(path.substr(0, path.find('[')));
  if (path == "output.top_logprobs") return chat ? "top_logprobs" : "logprobs";
  if (path.starts_with("output.prompt_logprobs")) return "prompt_logprobs";
  if (path.starts_with("constraint")) return "response_format";
  if (path == "reasoning.enabled") return "thinking";
  if (path == "reasoning.token_budget") return "thinking.budget_tokens";
  if (path.starts_with("reasoning")) return "reasoning_effort";
  if (path == "cache.salt") return "cache_salt";
  return std::string(path);
}

int HttpStatusOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAborted:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return 499;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

const char* TypeOf(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 429:
      return "rate_limit_error";
    case 501:
    case 505:
      return "invalid_request_error";
    case 504:
      return "timeout";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

// Reasons that clients know by another word, or that say nothing beyond the type.
std::string CodeOf(const ErrorDetails& details) {
  if (details.reason == "invalid_field") return "";
  return details.reason;
}

std::string Shorten(std::string text) {
  return text.size() <= kMaxMessageBytes ? text : Excerpt(text, kMaxMessageBytes);
}

}  // namespace

OpenAiError ErrorOf(const absl::Status& status, OpenAiRoute route, std::string_view max_tokens_field,
                    std::string_view request_id, std::string_view prompt) {
  OpenAiError error;
  error.status = HttpStatusOf(status.code());
  error.type = TypeOf(error.status);
  if (error.status == 500) {
    error.message = "internal error";
    if (!request_id.empty()) absl::StrAppend(&error.message, ", request ", std::string(request_id));
    error.code = "internal_error";
    return error;
  }
  const ErrorDetails details = DetailsOf(status);
  error.message = std::string(status.message());
  error.code = CodeOf(details);
  if (!details.fields.empty()) {
    error.param = ParamOf(details.fields[0].path, route, max_tokens_field, prompt);
    if (error.code != "model_not_found") {
      error.message = absl::StrCat(error.param, ": ", details.fields[0].description);
    }
  } else if (status.code() == absl::StatusCode::kFailedPrecondition) {
    error.param = ParamOf("input", route, max_tokens_field, prompt);
  } else {
    error.param = FieldErrorPath(status);
  }
  if (error.param.size() > 200) error.param.clear();
  error.message = Shorten(std::move(error.message));
  if (details.retry_after.has_value()) {
    // Whole seconds, and rather late than too early.
    const absl::Duration wait = absl::Ceil(*details.retry_after, absl::Seconds(1));
    error.retry_after_seconds = static_cast<int>(std::clamp<int64_t>(absl::ToInt64Seconds(wait), 1, 120));
  } else if (error.status == 429 || error.status == 503) {
    error.retry_after_seconds = 1;
  }
  return error;
}

OpenAiError ErrorOf(const absl::Status& status) { return ErrorOf(status, OpenAiRoute::kChat, "max_tokens", ""); }

std::string ErrorBody(const OpenAiError& error) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? "null" : JsonString(text); };
  return absl::StrCat("{\"error\":{\"message\":", JsonString(error.message), ",\"type\":", JsonString(error.type),
                      ",\"param\":", text_or_null(error.param), ",\"code\":", text_or_null(error.code), "}}");
}

HttpResponse ErrorResponse(const OpenAiError& error) {
  HttpResponse response;
  response.status = error.status;
  response.body = ErrorBody(error);
  if (error.retry_after_seconds > 0) {
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_seconds));
  }
  if (error.status == 500) response.headers.emplace_back("x-should-retry", "true");
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

HttpResponse ErrorResponse(int status, std::string_view message, std::string_view code) {
  OpenAiError error;
  error.status = status;
  error.message = message;
  error.type = TypeOf(status);
  error.code = code;
  if (status == 503) error.retry_after_seconds = 1;
  HttpResponse response = ErrorResponse(error);
  // Clients repeat every 5xx, and these stay as they are.
  if (status == 501 || status == 505) response.headers.emplace_back("x-should-retry", "false");
  return response;
}

}  // namespace k3
