#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/text/output_channels.h"
#include "server/text/output_parser.h"

namespace k3 {

// K3's answers. Where a model leaves out markers, the next one decides:
//   - opening a channel ends the one before, reasoning included;
//   - opening an argument or a call, or closing anything around them, ends an open argument and call;
//   - text between channels is content, unless it is only white space;
//   - a tag that is unknown, or impossible where it stands (a call amid reasoning), is text there;
//   - the end of the message within an argument leaves the call incomplete.
class XtmlOutputParser : public OutputParser {
 public:
  XtmlOutputParser(std::shared_ptr<const Tokenizer> tokenizer, OpenChannel open_channel, int32_t history_calls);

  void Append(int32_t id, std::vector<OutputEvent>* events) override;
  void Finish(std::vector<OutputEvent>* events, std::string* undecoded) override;
  OpenChannel channel() const override;

 private:
  enum class Place : uint8_t { kMessage, kReasoning, kContent, kTools, kCall, kArgument, kJson };
  enum class Header : uint8_t { kNone, kOpen, kClose };

  void BeginHeader(Header kind);
  void EndHeader(bool with_separator);
  bool OpenTag(std::string_view tag, std::string_view attributes);
  bool CloseTag(std::string_view tag);
  void EndMessage();

  void Text(std::string_view bytes);
  void StrayText(std::string_view bytes);

  // Leaves whatever is open and arrives between channels, or between calls.
  void LeaveChannel();
  void LeaveCall(bool complete);
  void LeaveArgument();

  void BeginArgument(std::string key, std::string_view type);
  bool InCall() const { return place_ == Place::kCall || place_ == Place::kArgument || place_ == Place::kJson; }

  std::shared_ptr<const Tokenizer> tokenizer_;
  const int32_t open_id_;
  const int32_t close_id_;
  const int32_t separator_id_;
  const int32_t end_id_;

  OutputChannels channels_;
  Place place_ = Place::kMessage;
  Header header_ = Header::kNone;
  bool is_text_ = false;  // the last token: not part of a marker or header
  std::string header_text_;
  std::string blank_text_;  // white space between channels, shown if content follows

  // The open call.
  bool has_arguments_ = false;  // the object's brace is out
  bool has_json_ = false;
  bool damaged_ = false;  // what is out already cannot become one JSON object
  std::string key_;
  bool string_argument_ = false;
  std::string argument_type_;
  std::string buffer_;  // of an argument that is shown when whole
};

// ` key="value"`, as attributes are written in a tag; values unescaped. Reads as far as it is well-formed.
std::vector<std::pair<std::string, std::string>> ParseXtmlAttributes(std::string_view text);

}  // namespace k3
