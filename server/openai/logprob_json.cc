#include "server/openai/logprob_json.h"

#include <algorithm>
#include <span>

#include "server/openai/reply_json.h"
#include "server/text/output_channels.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

// The alternatives of row `i`, without the padding.
std::span<const TopLogprob> TopOf(const LogprobRows& rows, size_t i, int32_t wanted) {
  const size_t width = static_cast<size_t>(rows.top_per_token);
  std::span<const TopLogprob> top(rows.top.data() + i * width, width);
  top = top.first(std::min(width, static_cast<size_t>(std::max(wanted, 0))));
  const auto padding = std::find_if(top.begin(), top.end(), [](const TopLogprob& entry) { return entry.token < 0; });
  return top.first(static_cast<size_t>(padding - top.begin()));
}

// One number for one token: where the chosen token is also among the best, its own value stands in both places.
float ValueOf(const TopLogprob& entry, int32_t token, float logprob) {
  return entry.token == token ? logprob : entry.logprob;
}

void AppendChatToken(const Tokenizer& tokenizer, int32_t token, float logprob, std::string* out) {
  const std::string_view bytes = tokenizer.TokenBytes(token);
  out->append("{\"token\":");
  AppendJsonString(bytes, out);
  out->append(",\"logprob\":");
  AppendFloat(logprob, out);
  out->append(",\"bytes\":[");
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i > 0) out->push_back(',');
    AppendInteger(static_cast<uint8_t>(bytes[i]), out);
  }
  out->push_back(']');
}

void AppendComma(std::string* list) {
  if (!list->empty()) list->push_back(',');
}

int64_t CharactersBegunIn(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

}  // namespace

std::string TokenLabel(const Tokenizer& tokenizer, int32_t token) {
  const std::string_view bytes = tokenizer.TokenBytes(token);
  if (IsValidUtf8(bytes)) return std::string(bytes);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string label = "bytes:";
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    label += "\\x";
    label += kHex[byte >> 4];
    label += kHex[byte & 15];
  }
  return label;
}

void AppendChatLogprobs(const LogprobRows& rows, const Tokenizer& tokenizer, int32_t top_logprobs, std::string* out) {
  for (size_t i = 0; i < rows.token_ids.size(); ++i) {
    AppendComma(out);
    AppendChatToken(tokenizer, rows.token_ids[i], rows.logprobs[i], out);
    out->append(",\"top_logprobs\":[");
    bool first = true;
    for (const TopLogprob& entry : TopOf(rows, i, top_logprobs)) {
      if (!first) out->push_back(',');
      first = false;
      AppendChatToken(tokenizer, entry.token, ValueOf(entry, rows.token_ids[i], rows.logprobs[i]), out);
      out->push_back('}');
    }
    out->append("]}");
  }
}

void CompletionLogprobs::AppendToken(int32_t token, bool silent) {
  AppendComma(&tokens_);
  AppendJsonString(TokenLabel(tokenizer_, token), &tokens_);
  AppendComma(&offsets_);
  AppendInteger(offset_, &offsets_);
  if (!silent) offset_ += CharactersBegunIn(tokenizer_.TokenBytes(token));
}

void CompletionLogprobs::AppendUnscored(int32_t token) {
  AppendToken(token, /*silent=*/false);
  AppendComma(&values_);
  values_ += "null";
  AppendComma(&tops_);
  tops_ += "null";
}

void CompletionLogprobs::Append(const LogprobRows& rows, bool generated) {
  for (size_t i = 0; i < rows.token_ids.size(); ++i) {
    const int32_t token = rows.token_ids[i];
    const float logprob = rows.logprobs[i];
    AppendToken(token, generated && IsSilentToken(tokenizer_, token));
    AppendComma(&values_);
    AppendFloat(logprob, &values_);
    AppendComma(&tops_);
    tops_.push_back('{');
    bool has_token = false;
    bool first = true;
    const auto append = [&](int32_t id, float value) {
      if (!first) tops_.push_back(',');
      first = false;
      AppendJsonString(TokenLabel(tokenizer_, id), &tops_);
      tops_.push_back(':');
      AppendFloat(value, &tops_);
    };
    for (const TopLogprob& entry : TopOf(rows, i, top_logprobs_)) {
      has_token |= entry.token == token;
      append(entry.token, ValueOf(entry, token, logprob));
    }
    if (!has_token) append(token, logprob);
    tops_.push_back('}');
  }
}

void CompletionLogprobs::Take(std::string* out) {
  out->append("{\"tokens\":[").append(tokens_);
  out->append("],\"token_logprobs\":[").append(values_);
  out->append("],\"top_logprobs\":[").append(tops_);
  out->append("],\"text_offset\":[").append(offsets_).append("]}");
  tokens_.clear();
  values_.clear();
  tops_.clear();
  offsets_.clear();
}

std::string PromptLogprobsJson(const std::vector<int32_t>& prompt_ids, const LogprobRows& rows,
                               const Tokenizer& tokenizer, int32_t top_logprobs) {
  std::string out = prompt_ids.empty() ? "[" : "[null";
  for (size_t i = 0; i < rows.token_ids.size(); ++i) {
    const int32_t token = rows.token_ids[i];
    const std::span<const TopLogprob> top = TopOf(rows, i, top_logprobs);
    out += ",{";
    const auto append = [&](int32_t id, float value, int64_t rank) {
      out.push_back('"');
      AppendInteger(id, &out);
      out += "\":{\"logprob\":";
      AppendFloat(value, &out);
      out += ",\"rank\":";
      if (rank > 0) {
        AppendInteger(rank, &out);
      } else {
        out += "null";  // worse than all that are listed
      }
      out += ",\"decoded_token\":";
      AppendJsonString(tokenizer.TokenBytes(id), &out);
      out.push_back('}');
    };
    const auto own =
        std::find_if(top.begin(), top.end(), [&](const TopLogprob& entry) { return entry.token == token; });
    append(token, rows.logprobs[i], own == top.end() ? 0 : own - top.begin() + 1);
    for (size_t k = 0; k < top.size(); ++k) {
      if (top[k].token == token) continue;
      out.push_back(',');
      append(top[k].token, top[k].logprob, static_cast<int64_t>(k) + 1);
    }
    out.push_back('}');
  }
  out.push_back(']');
  return out;
}

}  // namespace k3
