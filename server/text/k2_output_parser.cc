#include "server/text/k2_output_parser.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/text/encode_chunks.h"

namespace k3 {

std::string K2FunctionName(std::string_view header) {
  constexpr std::string_view kPrefix = "functions.";
  const size_t begin = header.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return "";
  header = header.substr(begin, header.find_last_not_of(" \t\r\n") + 1 - begin);
  if (header.substr(0, kPrefix.size()) == kPrefix) header.remove_prefix(kPrefix.size());
  const size_t colon = header.rfind(':');
  if (colon != std::string_view::npos && header.find_first_not_of("0123456789", colon + 1) == std::string_view::npos) {
    header = header.substr(0, colon);
  }
  return SanitizeUtf8(header);
}

K2OutputParser::K2OutputParser(std::shared_ptr<const Tokenizer> tokenizer, int32_t history_calls)
    : tokenizer_(std::move(tokenizer)),
      section_begin_id_(tokenizer_->SpecialId("<|tool_calls_section_begin|>").value_or(-1)),
      section_end_id_(tokenizer_->SpecialId("<|tool_calls_section_end|>").value_or(-1)),
      call_begin_id_(tokenizer_->SpecialId("<|tool_call_begin|>").value_or(-1)),
      argument_begin_id_(tokenizer_->SpecialId("<|tool_call_argument_begin|>").value_or(-1)),
      call_end_id_(tokenizer_->SpecialId("<|tool_call_end|>").value_or(-1)),
      channels_(history_calls) {
  for (const char* name : {"<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"}) {
    turn_ids_.push_back(tokenizer_->SpecialId(name).value_or(-1));
  }
}

void K2OutputParser::Append(int32_t id, std::vector<OutputEvent>* events) {
  channels_.set_events(events);
  if (id == section_begin_id_) {
    LeaveCall(/*complete=*/true);
    LeaveContent();
    place_ = Place::kSection;
  } else if (id == section_end_id_) {
    LeaveCall(/*complete=*/true);
  } else if (id == call_begin_id_) {
    LeaveCall(/*complete=*/true);
    LeaveContent();
    place_ = Place::kHeader;
    header_.clear();
  } else if (id == argument_begin_id_) {
    if (place_ == Place::kHeader) BeginCall();
  } else if (id == call_end_id_) {
    LeaveCall(/*complete=*/true);
  } else if (std::find(turn_ids_.begin(), turn_ids_.end(), id) != turn_ids_.end() || IsSilentToken(*tokenizer_, id)) {
    LeaveCall(/*complete=*/false);  // the model ended its turn within a call
    LeaveContent();
    place_ = Place::kSection;
  } else {
    Text(tokenizer_->TokenBytes(id));
  }
}

OpenChannel K2OutputParser::channel() const {
  return place_ == Place::kContent ? OpenChannel::kContent : OpenChannel::kNone;
}

void K2OutputParser::Finish(std::vector<OutputEvent>* events, std::string* undecoded) {
  channels_.set_events(events);
  channels_.TakeUndecoded(undecoded);
  if (place_ == Place::kContent) channels_.Flush(OutputEvent::Kind::kContent);
  if (place_ == Place::kArguments) LeaveCall(/*complete=*/false);
}

void K2OutputParser::Text(std::string_view bytes) {
  switch (place_) {
    case Place::kContent:
      channels_.Content(bytes);
      break;
    case Place::kHeader:
      header_ += bytes;
      break;
    case Place::kSection:
      blank_text_ += bytes;
      if (IsPythonBlank(bytes)) break;
      place_ = Place::kContent;
      channels_.Content(std::exchange(blank_text_, std::string()));
      break;
    case Place::kArguments: {
      std::string text;
      channels_.stream().Append(bytes, &text);
      if (!has_arguments_) text.erase(0, std::min(text.find_first_not_of(" \t\r\n"), text.size()));
      has_arguments_ = has_arguments_ || !text.empty();
      channels_.Arguments(std::move(text));
      break;
    }
  }
}

void K2OutputParser::LeaveContent() {
  if (place_ == Place::kContent) channels_.EndContent();
  blank_text_.clear();
}

void K2OutputParser::BeginCall() {
  std::string name = K2FunctionName(header_);
  const std::string id_prefix = absl::StrCat("functions.", name, ":");
  channels_.BeginCall(std::move(name), id_prefix);
  place_ = Place::kArguments;
  has_arguments_ = false;
}

void K2OutputParser::LeaveCall(bool complete) {
  if (place_ == Place::kHeader) {
    place_ = Place::kSection;
    if (!complete || K2FunctionName(header_).empty()) return;
    BeginCall();  // a call without arguments
  }
  if (place_ != Place::kArguments) return;
  std::string text;
  channels_.stream().Flush(&text);
  channels_.Arguments(complete && !has_arguments_ && text.empty() ? "{}" : std::move(text));
  channels_.EndCall(complete);
  place_ = Place::kSection;
}

}  // namespace k3
