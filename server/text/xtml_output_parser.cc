#include "server/text/xtml_output_parser.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/text/encode_chunks.h"
#include "server/text/json_parser.h"
#include "server/text/json_writer.h"

namespace k3 {
namespace {

// A header that grows beyond this lost its separator. An argument's key may be long, a closing tag's name is not.
constexpr size_t kMaxOpenHeader = 16 * 1024;
constexpr size_t kMaxCloseHeader = 32;

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
}

std::string Attribute(const std::vector<std::pair<std::string, std::string>>& attributes, std::string_view key) {
  for (const auto& [name, value] : attributes) {
    if (name == key) return value;
  }
  return "";
}

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  AppendJsonEscaped(text, &out);
  out.push_back('"');
  return out;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> ParseXtmlAttributes(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> attributes;
  while (true) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const size_t equals = text.find("=\"");
    if (equals == std::string_view::npos) return attributes;
    const size_t end = text.find('"', equals + 2);
    if (end == std::string_view::npos) return attributes;
    std::string value(text.substr(equals + 2, end - equals - 2));
    absl::StrReplaceAll({{"&quot;", "\""}}, &value);
    absl::StrReplaceAll({{"&amp;", "&"}}, &value);
    attributes.emplace_back(SanitizeUtf8(text.substr(0, equals)), SanitizeUtf8(value));
    text.remove_prefix(end + 1);
  }
}

XtmlOutputParser::XtmlOutputParser(std::shared_ptr<const Tokenizer> tokenizer, OpenChannel open_channel,
                                   int32_t history_calls)
    : tokenizer_(std::move(tokenizer)),
      open_id_(tokenizer_->SpecialId("<|open|>").value_or(-1)),
      close_id_(tokenizer_->SpecialId("<|close|>").value_or(-1)),
      separator_id_(tokenizer_->SpecialId("<|sep|>").value_or(-1)),
      end_id_(tokenizer_->SpecialId("<|end_of_msg|>").value_or(-1)),
      channels_(history_calls) {
  if (open_channel == OpenChannel::kReasoning) place_ = Place::kReasoning;
  if (open_channel == OpenChannel::kContent) place_ = Place::kContent;
}

void XtmlOutputParser::Append(int32_t id, std::vector<OutputEvent>* events) {
  channels_.set_events(events);
  is_text_ = false;
  if (id == open_id_) {
    BeginHeader(Header::kOpen);
  } else if (id == close_id_) {
    BeginHeader(Header::kClose);
  } else if (id == separator_id_ && header_ != Header::kNone) {
    EndHeader(/*with_separator=*/true);
  } else if (id == end_id_) {
    EndHeader(/*with_separator=*/false);
    EndMessage();
  } else if (!IsSilentToken(*tokenizer_, id)) {
    const std::string_view bytes = tokenizer_->TokenBytes(id);
    if (header_ == Header::kNone) {
      is_text_ = true;
      Text(bytes);
      return;
    }
    header_text_ += bytes;
    const size_t limit = header_ == Header::kOpen ? kMaxOpenHeader : kMaxCloseHeader;
    if (header_text_.size() > limit) EndHeader(/*with_separator=*/false);
  }
}

OpenChannel XtmlOutputParser::channel() const {
  if (!is_text_) return OpenChannel::kNone;
  if (place_ == Place::kReasoning) return OpenChannel::kReasoning;
  return place_ == Place::kContent ? OpenChannel::kContent : OpenChannel::kNone;
}

void XtmlOutputParser::Finish(std::vector<OutputEvent>* events, std::string* undecoded) {
  channels_.set_events(events);
  channels_.TakeUndecoded(undecoded);
  if (place_ == Place::kReasoning) channels_.Flush(OutputEvent::Kind::kReasoning);
  if (place_ == Place::kContent) channels_.Flush(OutputEvent::Kind::kContent);
  if (InCall()) {
    if (place_ == Place::kArgument && string_argument_) {
      std::string text;
      channels_.stream().Flush(&text);
      channels_.Arguments(std::move(text));
    }
    channels_.EndCall(/*complete=*/false);
  }
}

void XtmlOutputParser::BeginHeader(Header kind) {
  EndHeader(/*with_separator=*/false);
  header_ = kind;
}

// Acts on the header that was read, if any. One without its separator still counts when it is nothing but a tag's name.
void XtmlOutputParser::EndHeader(bool with_separator) {
  if (header_ == Header::kNone) return;
  const Header kind = std::exchange(header_, Header::kNone);
  const std::string text = std::exchange(header_text_, std::string());
  const std::string_view trimmed = Trimmed(text);
  const size_t name_end = std::min(trimmed.find(' '), trimmed.size());
  const bool plain_name = name_end == trimmed.size();
  bool understood = false;
  if (with_separator || plain_name) {
    const std::string_view tag = trimmed.substr(0, name_end);
    understood = kind == Header::kOpen ? OpenTag(tag, trimmed.substr(name_end)) : CloseTag(tag);
  }
  if (!understood) {
    Text(absl::StrCat(kind == Header::kOpen ? "<|open|>" : "<|close|>", text, with_separator ? "<|sep|>" : ""));
  }
}

bool XtmlOutputParser::OpenTag(std::string_view tag, std::string_view attributes) {
  if (tag == "think") {
    if (place_ == Place::kReasoning) return true;  // the prompt has opened it already
    LeaveChannel();
    place_ = Place::kReasoning;
  } else if (tag == "response") {
    if (place_ == Place::kContent) return true;
    LeaveChannel();
    place_ = Place::kContent;
  } else if (tag == "tools") {
    LeaveChannel();
    place_ = Place::kTools;
  } else if (tag == "message") {
    LeaveChannel();
  } else if (tag == "call") {
    std::string name = Attribute(ParseXtmlAttributes(attributes), "tool");
    if (place_ == Place::kReasoning || name.empty()) return false;
    if (InCall()) LeaveCall(/*complete=*/true);
    if (place_ != Place::kTools) LeaveChannel();
    place_ = Place::kCall;
    has_arguments_ = has_json_ = damaged_ = false;
    channels_.BeginCall(name, absl::StrCat(name, "_"));
  } else if (tag == "argument" && InCall()) {
    const auto parsed = ParseXtmlAttributes(attributes);
    LeaveArgument();
    BeginArgument(Attribute(parsed, "key"), Attribute(parsed, "type"));
  } else if (tag == "json" && InCall()) {
    LeaveArgument();
    place_ = Place::kJson;
  } else {
    return false;
  }
  return true;
}

bool XtmlOutputParser::CloseTag(std::string_view tag) {
  if (tag == "think") {
    if (place_ == Place::kReasoning) LeaveChannel();
  } else if (tag == "response") {
    if (place_ == Place::kContent) LeaveChannel();
  } else if (tag == "argument" || tag == "json") {
    LeaveArgument();
  } else if (tag == "call") {
    if (InCall()) LeaveCall(/*complete=*/true);
  } else if (tag == "tools") {
    if (InCall() || place_ == Place::kTools) LeaveChannel();
  } else if (tag == "message") {
    LeaveChannel();
  } else {
    return false;
  }
  return true;
}

void XtmlOutputParser::EndMessage() {
  if (place_ == Place::kArgument || place_ == Place::kJson) LeaveCall(/*complete=*/false);
  LeaveChannel();
}

void XtmlOutputParser::LeaveChannel() {
  if (InCall()) LeaveCall(/*complete=*/true);
  if (place_ == Place::kReasoning) channels_.EndReasoning();
  if (place_ == Place::kContent) channels_.EndContent();
  place_ = Place::kMessage;
  blank_text_.clear();
}

void XtmlOutputParser::LeaveCall(bool complete) {
  LeaveArgument();
  complete = complete && !damaged_;
  if (complete) channels_.Arguments(has_arguments_ ? "}" : "{}");
  channels_.EndCall(complete);
  place_ = Place::kTools;
}

void XtmlOutputParser::BeginArgument(std::string key, std::string_view type) {
  place_ = Place::kArgument;
  damaged_ = damaged_ || has_json_;  // the two forms do not mix
  key_ = absl::StrCat(has_arguments_ ? "," : "{", Quoted(key), ":");
  has_arguments_ = true;
  argument_type_ = type;
  string_argument_ = type == "string" || type.empty();
  buffer_.clear();
  if (string_argument_) channels_.Arguments(absl::StrCat(key_, "\""));
}

void XtmlOutputParser::LeaveArgument() {
  if (place_ == Place::kArgument && string_argument_) {
    std::string text;
    channels_.stream().Flush(&text);
    channels_.Arguments(text + "\"");
  } else if (place_ == Place::kArgument) {
    // A value that is not what its type says is handed over as the text that it is.
    const std::string text(Trimmed(SanitizeUtf8(buffer_)));
    const bool missing_null = text.empty() && argument_type_ == "null";
    channels_.Arguments(key_ + (missing_null ? "null" : ParseJson(text).ok() ? text : Quoted(text)));
  } else if (place_ == Place::kJson) {
    const std::string text(Trimmed(SanitizeUtf8(buffer_)));
    const auto value = ParseJson(text);
    damaged_ = damaged_ || has_arguments_ || !value.ok() || !value->is_object();
    // The object's own closing brace comes with the call's end.
    channels_.Arguments(damaged_ ? text : text.substr(0, text.size() - 1));
    has_arguments_ = has_json_ = true;
  } else {
    return;
  }
  buffer_.clear();
  place_ = Place::kCall;
}

void XtmlOutputParser::Text(std::string_view bytes) {
  switch (place_) {
    case Place::kReasoning:
      channels_.Reasoning(bytes);
      break;
    case Place::kContent:
      channels_.Content(bytes);
      break;
    case Place::kMessage:
    case Place::kTools:
      StrayText(bytes);
      break;
    case Place::kCall:
      break;  // between arguments there is nothing to say
    case Place::kArgument:
      if (string_argument_) {
        std::string text, escaped;
        channels_.stream().Append(bytes, &text);
        AppendJsonEscaped(text, &escaped);
        channels_.Arguments(std::move(escaped));
        break;
      }
      [[fallthrough]];
    case Place::kJson:
      buffer_ += bytes;
      break;
  }
}

void XtmlOutputParser::StrayText(std::string_view bytes) {
  blank_text_ += bytes;
  if (IsPythonBlank(bytes)) return;
  const std::string text = std::exchange(blank_text_, std::string());
  place_ = Place::kContent;
  channels_.Content(text);
}

}  // namespace k3
