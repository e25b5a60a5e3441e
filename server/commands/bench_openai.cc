#include "server/commands/bench_openai.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

using nlohmann::json;

bool HasText(const json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() && !it->get_ref<const std::string&>().empty();
}

bool HasToken(const json& choice) {
  if (HasText(choice, "text")) return true;
  const auto delta = choice.find("delta");
  if (delta == choice.end() || !delta->is_object()) return false;
  if (HasText(*delta, "content") || HasText(*delta, "reasoning_content") || HasText(*delta, "reasoning")) return true;
  const auto calls = delta->find("tool_calls");
  return calls != delta->end() && calls->is_array() && !calls->empty();
}

// The usage of a chunk, at the top or, as some servers have it, on the first choice. Null when absent.
const json* FindUsage(const json& chunk) {
  if (const auto it = chunk.find("usage"); it != chunk.end() && it->is_object()) return &*it;
  const auto choices = chunk.find("choices");
  if (choices == chunk.end() || !choices->is_array() || choices->empty() || !choices->front().is_object())
    return nullptr;
  const auto it = choices->front().find("usage");
  return it != choices->front().end() && it->is_object() ? &*it : nullptr;
}

int64_t Count(const json& object, const char* key, int64_t missing) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number_integer() ? it->get<int64_t>() : missing;
}

// The error's code, else its type, else nothing.
std::string ErrorName(const json& body) {
  if (!body.is_object()) return "";
  const auto error = body.find("error");
  if (error == body.end() || !error->is_object()) return "";
  for (const char* key : {"code", "type"}) {
    if (HasText(*error, key)) return (*error)[key].get<std::string>().substr(0, 60);
  }
  return "";
}

}  // namespace

const char* OpenAiRoute(const BenchConfig& config) {
  return config.input == BenchInput::kChat ? "/v1/chat/completions" : "/v1/completions";
}

std::string OpenAiBody(const BenchConfig& config, const BenchRequest& request, const std::string& model) {
  json body = {{"model", model},
               {"stream", true},
               {"stream_options", {{"include_usage", true}, {"continuous_usage_stats", true}}},
               {"temperature", config.temperature},
               {"seed", request.seed >> 11}};  // exact as a double, which is what JSON readers may make of it
  if (config.input == BenchInput::kChat) {
    body["messages"] = json::array({{{"role", "user"}, {"content", request.prompt_text}}});
    body["max_completion_tokens"] = request.max_tokens;
  } else {
    if (request.prompt_tokens.empty()) {
      body["prompt"] = request.prompt_text;
    } else {
      body["prompt"] = request.prompt_tokens;
    }
    body["max_tokens"] = request.max_tokens;
  }
  if (config.ignore_eos) body["ignore_eos"] = true;
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string OpenAiErrorKind(int status, std::string_view body) {
  const std::string name = ErrorName(json::parse(body, nullptr, /*allow_exceptions=*/false));
  return name.empty() ? absl::StrCat("http ", status) : absl::StrCat("http ", status, " ", name);
}

void OpenAiStreamReader::Feed(std::string_view bytes, Clock::time_point now) {
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    if (end == std::string_view::npos) {
      partial_ += bytes;
      return;
    }
    if (partial_.empty()) {
      Line(bytes.substr(0, end), now);
    } else {
      partial_ += bytes.substr(0, end);
      Line(partial_, now);
      partial_.clear();
    }
    bytes.remove_prefix(end + 1);
  }
}

void OpenAiStreamReader::Line(std::string_view line, Clock::time_point now) {
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  constexpr std::string_view kData = "data:";
  if (line.substr(0, kData.size()) != kData) return;  // comments, event names, blank lines
  line.remove_prefix(kData.size());
  if (!line.empty() && line.front() == ' ') line.remove_prefix(1);
  if (line == "[DONE]") {
    done_ = true;
  } else if (!done_) {
    Chunk(line, now);
  }
}

void OpenAiStreamReader::Chunk(std::string_view text, Clock::time_point now) {
  const json chunk = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!chunk.is_object()) {
    if (record_->ok()) record_->error = "event is not a JSON object";
    return;
  }
  if (const auto error = chunk.find("error"); error != chunk.end() && !error->is_null()) {
    const std::string name = ErrorName(chunk);
    if (record_->ok()) record_->error = name.empty() ? "error event" : absl::StrCat("error event ", name);
    return;
  }
  bool has_token = false;
  bool has_choices = false;
  if (const auto choices = chunk.find("choices"); choices != chunk.end() && choices->is_array()) {
    for (const json& choice : *choices) {
      has_choices = true;
      if (choice.is_object() && HasToken(choice)) has_token = true;
    }
  }
  // Where chunks tell running totals, one without is part of the next total.
  int64_t tokens = has_token && !counted_ ? 1 : 0;
  if (const json* usage = FindUsage(chunk)) {
    const int64_t total = Count(*usage, "completion_tokens", -1);
    if (has_choices && total >= 0 && (counted_ || record_->arrivals.empty())) {
      // A running total. The first chunk decides: a usage on the last chunk alone is not one.
      counted_ = true;
      tokens = total - std::max<int64_t>(usage_tokens_, 0);
    }
    usage_tokens_ = std::max(usage_tokens_, total);
    record_->prompt_tokens = static_cast<int32_t>(Count(*usage, "prompt_tokens", record_->prompt_tokens));
    if (const auto details = usage->find("prompt_tokens_details"); details != usage->end() && details->is_object()) {
      record_->cached_tokens = static_cast<int32_t>(Count(*details, "cached_tokens", record_->cached_tokens));
    }
  }
  if (tokens > 0) record_->arrivals.push_back({now, static_cast<int32_t>(tokens)});
}

void OpenAiStreamReader::Finish() {
  if (record_->ok() && !done_) record_->error = "stream without [DONE]";
  const int64_t missing = usage_tokens_ - record_->output_tokens();
  if (counted_ || missing <= 0 || record_->arrivals.empty()) return;
  const size_t first = record_->arrivals.size() > 1 ? 1 : 0;
  const auto places = static_cast<int64_t>(record_->arrivals.size() - first);
  for (int64_t i = 0; i < places; ++i) {
    record_->arrivals[first + static_cast<size_t>(i)].tokens +=
        static_cast<int32_t>(missing * (i + 1) / places - missing * i / places);
  }
}

}  // namespace k3
