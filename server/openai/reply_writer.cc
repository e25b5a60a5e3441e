#include "server/openai/reply_writer.h"

#include "server/openai/reply_json.h"

namespace k3 {

std::string ReplyUsage::Json() const {
  std::string out = "{\"prompt_tokens\":";
  AppendInteger(prompt_tokens, &out);
  out += ",\"completion_tokens\":";
  AppendInteger(completion_tokens, &out);
  out += ",\"total_tokens\":";
  AppendInteger(prompt_tokens + completion_tokens, &out);
  out += ",\"prompt_tokens_details\":{\"cached_tokens\":";
  AppendInteger(cached_tokens, &out);
  out += "},\"completion_tokens_details\":{\"reasoning_tokens\":";
  AppendInteger(reasoning_tokens, &out);
  out += "}}";
  return out;
}

void AddUsage(const FinishedEvent& event, int32_t opening_tokens, bool strict, ReplyUsage* usage) {
  usage->prompt_tokens += event.usage.prompt_tokens - (strict ? opening_tokens : 0);
  usage->completion_tokens += event.usage.completion_tokens;
  usage->cached_tokens += event.usage.cached_tokens;
  usage->reasoning_tokens += event.reasoning_tokens;
}

std::string_view FinishReasonWord(StopKind reason) {
  switch (reason) {
    case StopKind::kStop:
      return "stop";
    case StopKind::kToolCalls:
      return "tool_calls";
    case StopKind::kLength:
    case StopKind::kRepetition:  // cut off, not ended
      return "length";
  }
  return "stop";
}

void AppendStopReason(const ChoiceFinishedEvent& event, std::string* out) {
  if (const auto* text = std::get_if<MatchedString>(&event.matched)) {
    out->append(",\"stop_reason\":");
    AppendJsonString(text->text, out);
  } else if (const auto* token = std::get_if<MatchedToken>(&event.matched)) {
    out->append(",\"stop_reason\":");
    AppendInteger(token->token, out);
  } else if (event.reason == StopKind::kRepetition) {
    out->append(",\"stop_reason\":\"repetition\"");
  }
}

void AppendIds(const std::vector<int32_t>& ids, std::string* out) {
  out->push_back('[');
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i > 0) out->push_back(',');
    AppendInteger(ids[i], out);
  }
  out->push_back(']');
}

std::string OpenReply(const ReplyHeader& header, std::string_view object) {
  std::string out = "{\"id\":";
  AppendJsonString(header.id, &out);
  out += ",\"object\":";
  AppendJsonString(object, &out);
  out += ",\"created\":";
  AppendInteger(header.created, &out);
  out += ",\"model\":";
  AppendJsonString(header.model, &out);
  out += ",\"system_fingerprint\":";
  AppendJsonString(header.fingerprint, &out);
  return out;
}

}  // namespace k3
