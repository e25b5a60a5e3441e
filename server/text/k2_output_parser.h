#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/text/output_channels.h"
#include "server/text/output_parser.h"

namespace k3 {

// The K2 family's answers: content, then a section of calls, each a header functions.NAME:NUMBER and its arguments as
// JSON, which is handed on as it comes. Text after or between calls is content, unless it is only white space.
class K2OutputParser : public OutputParser {
 public:
  K2OutputParser(std::shared_ptr<const Tokenizer> tokenizer, int32_t history_calls);

  void Append(int32_t id, std::vector<OutputEvent>* events) override;
  void Finish(std::vector<OutputEvent>* events, std::string* undecoded) override;
  OpenChannel channel() const override;

 private:
  enum class Place : uint8_t { kContent, kSection, kHeader, kArguments };

  void Text(std::string_view bytes);
  void LeaveContent();
  void BeginCall();
  void LeaveCall(bool complete);

  std::shared_ptr<const Tokenizer> tokenizer_;
  const int32_t section_begin_id_;
  const int32_t section_end_id_;
  const int32_t call_begin_id_;
  const int32_t argument_begin_id_;
  const int32_t call_end_id_;
  std::vector<int32_t> turn_ids_;  // begin or end a turn

  OutputChannels channels_;
  Place place_ = Place::kContent;
  std::string header_;
  std::string blank_text_;
  bool has_arguments_ = false;
};

// The NAME of functions.NAME:NUMBER; the prefix and the number may be missing.
std::string K2FunctionName(std::string_view header);

}  // namespace k3
