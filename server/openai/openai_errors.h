#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/http/http_message.h"
#include "server/openai/openai_request.h"

// Statuses as OpenAI error bodies: {"error":{"message","type","param","code"}}.
namespace k3 {

struct OpenAiError {
  int status = 500;
  std::string message;
  std::string type;
  std::string param;            // "" is null
  std::string code;             // "" is null
  int retry_after_seconds = 0;  // 0: not told
};

// What a status of the common path means for a client of this route. Paths of GenerationSpec become the names that the
// route's clients use; `prompt` is the completion route's name of the one that failed, "prompt[3]" in a batch. An
// internal error tells the request id only.
OpenAiError ErrorOf(const absl::Status& status, OpenAiRoute route, std::string_view max_tokens_field,
                    std::string_view request_id, std::string_view prompt = "prompt");
// For routes without a token limit and errors found before the route is known.
OpenAiError ErrorOf(const absl::Status& status);

// The object with the key "error", for bodies and for events inside a stream.
std::string ErrorBody(const OpenAiError& error);
HttpResponse ErrorResponse(const OpenAiError& error);
// An error of HTTP itself.
HttpResponse ErrorResponse(int status, std::string_view message, std::string_view code = "");

}  // namespace k3
