#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/openai/field_reader.h"
#include "server/openai/openai_errors.h"
#include "server/openai/reply_json.h"
#include "server/openai/reply_writer.h"
#include "server/openai_gateway.h"
#include "server/text/field_error.h"
#include "server/text/utf8.h"

// The gateway's routes around text and ids; nothing is run on the model.
namespace k3 {
namespace {

// A reply that is made elsewhere and sent once.
class DeferredReply final : public HttpJob, public std::enable_shared_from_this<DeferredReply> {
 public:
  explicit DeferredReply(HttpWaker waker) : waker_(std::move(waker)) {}

  void Set(HttpResponse response) {
    {
      std::lock_guard lock(mutex_);
      response_ = std::move(response);
    }
    waker_.Wake();
  }
  void OnReady(HttpWriter& writer) override {
    std::lock_guard lock(mutex_);
    if (response_) writer.Respond(*std::exchange(response_, std::nullopt));
  }
  void OnAbort(HttpAbort) override {}

 private:
  const HttpWaker waker_;
  std::mutex mutex_;
  std::optional<HttpResponse> response_;  // guarded by mutex_
};

// {"token_ids":[...],"count":n} and for /tokenize what vLLM's clients read.
HttpResponse IdsResponse(const absl::StatusOr<std::vector<int32_t>>& ids, OpenAiRoute route, int32_t max_model_len) {
  if (!ids.ok()) return ErrorResponse(ErrorOf(ids.status(), route, "max_tokens", ""));
  HttpResponse response;
  std::string& body = response.body;
  body = "{\"token_ids\":";
  AppendIds(*ids, &body);
  absl::StrAppend(&body, ",\"count\":", ids->size());
  if (max_model_len > 0) {
    body += ",\"tokens\":";
    AppendIds(*ids, &body);
    absl::StrAppend(&body, ",\"max_model_len\":", max_model_len);
  }
  body += '}';
  return response;
}

// The token's name in quotes, or null.
std::string TokenName(const Tokenizer& tokenizer, const std::optional<int32_t>& id) {
  return id ? JsonString(tokenizer.TokenBytes(*id)) : "null";
}
std::string TokenNumber(const std::optional<int32_t>& id) { return id ? absl::StrCat(*id) : "null"; }

}  // namespace

HttpReply OpenAiGateway::Tokenize(const HttpRequest& request, HttpWaker waker) {
  const absl::StatusOr<JsonValue> value = ParseBody(request.body);
  if (!value.ok()) return ErrorResponse(ErrorOf(value.status()));
  const absl::StatusOr<std::shared_ptr<const ServedModel>> model = Model();
  if (!model.ok()) return ErrorResponse(ErrorOf(model.status()));
  const int32_t max_model_len = (*model)->engine->Limits().max_model_len;
  auto reply = std::make_shared<DeferredReply>(std::move(waker));
  FieldReader body(*value, "");
  if (body.Has("messages")) {
    absl::StatusOr<GenerationRequest> prompt = ParseChatPrompt(*value, options_);
    if (!prompt.ok()) return ErrorResponse(ErrorOf(prompt.status()));
    service_->Render(*std::move(prompt), [reply, max_model_len](const absl::StatusOr<std::vector<int32_t>>& ids) {
      reply->Set(IdsResponse(ids, OpenAiRoute::kChat, max_model_len));
    });
    return std::shared_ptr<HttpJob>(reply);
  }
  std::optional<std::string> text = body.String("prompt");
  if (!text) text = body.String("text");
  const std::string name = body.String("model").value_or("");
  const bool control_tokens = body.Bool("control_tokens").value_or(false);
  if (!text) body.Fail("prompt", "a prompt or messages are required");
  if (!body.ok()) return ErrorResponse(ErrorOf(body.status()));
  service_->Tokenize(name, *std::move(text), control_tokens,
                     [reply, max_model_len](const absl::StatusOr<std::vector<int32_t>>& ids) {
                       reply->Set(IdsResponse(ids, OpenAiRoute::kCompletions, max_model_len));
                     });
  return std::shared_ptr<HttpJob>(reply);
}

HttpReply OpenAiGateway::Render(const HttpRequest& request, HttpWaker waker) {
  const absl::StatusOr<JsonValue> value = ParseBody(request.body);
  if (!value.ok()) return ErrorResponse(ErrorOf(value.status()));
  absl::StatusOr<GenerationRequest> prompt = ParseChatPrompt(*value, options_);
  if (!prompt.ok()) return ErrorResponse(ErrorOf(prompt.status()));
  auto reply = std::make_shared<DeferredReply>(std::move(waker));
  service_->Render(*std::move(prompt), [reply](const absl::StatusOr<std::vector<int32_t>>& ids) {
    reply->Set(IdsResponse(ids, OpenAiRoute::kChat, 0));
  });
  return std::shared_ptr<HttpJob>(reply);
}

HttpReply OpenAiGateway::Detokenize(const HttpRequest& request, HttpWaker) {
  const absl::StatusOr<JsonValue> value = ParseBody(request.body);
  if (!value.ok()) return ErrorResponse(ErrorOf(value.status()));
  FieldReader body(*value, "");
  const std::string_view key = body.Has("token_ids") ? "token_ids" : "tokens";
  std::vector<uint32_t> ids;
  if (const JsonValue* list = body.Array(key)) {
    for (size_t i = 0; i < list->items.size() && body.ok(); ++i) {
      const std::optional<int64_t> id = WholeNumber(list->items[i]);
      if (!id || *id < 0 || *id > std::numeric_limits<uint32_t>::max()) {
        body.Fail(absl::StrCat(std::string(key), "[", i, "]"), "expected a token id");
      } else {
        ids.push_back(static_cast<uint32_t>(*id));
      }
    }
  } else {
    body.Fail("token_ids", "a list of token ids is required");
  }
  const std::string name = body.String("model").value_or("");
  const bool skip = body.Bool("skip_control_tokens").value_or(body.Bool("skip_special_tokens").value_or(false));
  if (!body.ok()) return ErrorResponse(ErrorOf(body.status()));
  const absl::StatusOr<std::string> bytes = service_->Detokenize(name, ids, skip);
  if (!bytes.ok()) return ErrorResponse(ErrorOf(bytes.status()));
  const std::string text = JsonString(*bytes);
  return HttpResponse{.body = absl::StrCat("{\"text\":", text, ",\"prompt\":", text, "}")};
}

HttpReply OpenAiGateway::TokenizerInfo(const HttpRequest&, HttpWaker) {
  const absl::StatusOr<std::shared_ptr<const ServedModel>> found = Model();
  if (!found.ok()) return ErrorResponse(ErrorOf(found.status()));
  const ServedModel& model = **found;
  const Tokenizer& tokenizer = *model.tokenizer;
  // What the vocabulary's own files call the end, where replies stop at it.
  std::optional<int32_t> eos = tokenizer.eos_id();
  const std::vector<int32_t>& ends = model.eos_token_ids;
  if (!ends.empty() && (!eos.has_value() || std::find(ends.begin(), ends.end(), *eos) == ends.end())) {
    eos = ends.front();
  }
  std::string stop_ids;
  AppendIds(model.eos_token_ids, &stop_ids);
  return HttpResponse{
      .body = absl::StrCat(
          "{\"tokenizer_class\":\"TikTokenTokenizer\",\"vocab_size\":", tokenizer.vocab_size(),
          ",\"model_max_length\":", model.engine->Limits().max_model_len,
          ",\"bos_token\":", TokenName(tokenizer, tokenizer.bos_id()),
          ",\"bos_token_id\":", TokenNumber(tokenizer.bos_id()), ",\"eos_token\":", TokenName(tokenizer, eos),
          ",\"eos_token_id\":", TokenNumber(eos), ",\"pad_token\":", TokenName(tokenizer, tokenizer.pad_id()),
          ",\"pad_token_id\":", TokenNumber(tokenizer.pad_id()), ",\"stop_token_ids\":", stop_ids,
          ",\"chat_format\":", JsonString(ChatFormatName(model.renderer->format())), ",\"chat_template\":null}")};
}

}  // namespace k3
