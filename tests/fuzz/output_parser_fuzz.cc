// Any token sequence through the output parsers of all formats and the stop strings: text is valid UTF-8, calls are
// numbered in order and end once, complete arguments are JSON objects, and nothing depends on how the events were asked
// for.

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/text/json_parser.h"
#include "server/text/output_parser.h"
#include "server/text/stop_strings.h"
#include "server/text/utf8.h"

namespace {

using k3::OutputEvent;

void Require(bool condition) {
  if (!condition) std::abort();
}

std::shared_ptr<const k3::Tokenizer> K2Vocabulary() {
  std::ifstream file(K3_SOURCE_DIR "/configs/models/tiny-k3/tiktoken.model", std::ios::binary);
  const std::string model((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string config = R"({"added_tokens_decoder":{"3841":{"content":"[EOS]"},"3842":{"content":"<|im_end|>"},
    "3843":{"content":"<|im_user|>"},"3844":{"content":"<|im_assistant|>"},"3850":{"content":"<|im_system|>"},
    "3851":{"content":"<|tool_calls_section_begin|>"},"3852":{"content":"<|tool_calls_section_end|>"},
    "3853":{"content":"<|tool_call_begin|>"},"3854":{"content":"<|tool_call_argument_begin|>"},
    "3855":{"content":"<|tool_call_end|>"},"3857":{"content":"<|im_middle|>"}},"eos_token":"[EOS]"})";
  return k3::Tokenizer::FromContents(model, config).value();
}

// Low bytes stand for what makes structure, the others for themselves as single-byte tokens.
std::vector<int32_t> Tokens(const k3::Tokenizer& tokenizer, bool xtml, const uint8_t* data, size_t size) {
  static const char* const kXtml[] = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"};
  static const char* const kK2[] = {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                                    "<|tool_call_argument_begin|>", "<|tool_call_end|>"};
  static const char* const kTexts[] = {"think",
                                       "response",
                                       "tools",
                                       "call tool=\"f\" index=\"1\"",
                                       "argument key=\"k\" type=\"string\"",
                                       "argument key=\"k\" type=\"number\"",
                                       "json type=\"object\"",
                                       "argument",
                                       "call",
                                       "json",
                                       "message",
                                       "functions.f:1",
                                       "{\"a\": 1}"};
  std::vector<int32_t> ids;
  for (size_t i = 0; i < size; ++i) {
    if (data[i] < 5) {
      ids.push_back(tokenizer.SpecialId((xtml ? kXtml : kK2)[data[i]]).value());
    } else if (data[i] - 5u < std::size(kTexts)) {
      tokenizer.EncodeBytes(kTexts[data[i] - 5], &ids);
    } else if (data[i] == 31) {
      ids.push_back(tokenizer.num_ranks() + 100);  // a special token without meaning
    } else {
      ids.push_back(data[i]);
    }
  }
  return ids;
}

k3::ParsedOutput Parse(const std::shared_ptr<const k3::Tokenizer>& tokenizer, k3::ChatFormat format,
                       k3::OpenChannel open, const std::vector<int32_t>& ids) {
  const auto parser = k3::MakeOutputParser(tokenizer, format, open, 3);
  k3::ParsedOutput output;
  int begun = 0, ended = 0;
  std::vector<OutputEvent> events;
  for (size_t i = 0; i <= ids.size(); ++i) {
    events.clear();
    if (i < ids.size()) {
      parser->Append(ids[i], &events);
    } else {
      parser->Finish(&events);
    }
    for (const OutputEvent& event : events) {
      Require(k3::IsValidUtf8(event.text) && k3::IsValidUtf8(event.name) && k3::IsValidUtf8(event.call_id));
      if (event.kind == OutputEvent::Kind::kCallBegin) {
        Require(event.call == begun++ && begun == ended + 1);
      } else if (event.kind == OutputEvent::Kind::kCallArguments) {
        Require(event.call == begun - 1 && begun == ended + 1);
      } else if (event.kind == OutputEvent::Kind::kCallEnd) {
        Require(event.call == ended++ && begun == ended);
      }
      output.Add(event);
    }
  }
  Require(begun == ended);
  if (format == k3::ChatFormat::kXtml) {
    for (const auto& call : output.calls) {
      if (!call.complete) continue;
      const auto arguments = k3::ParseJson(call.arguments, {.max_depth = 1000});
      Require(arguments.ok() && arguments->is_object());
    }
  }
  return output;
}

// The matcher, byte by byte and at once.
void CheckStops(const std::string& text, const std::vector<std::string>& stops) {
  k3::StopStrings at_once(stops), by_bytes(stops);
  std::string first, second;
  const int matched = at_once.Append(text, &first);
  at_once.Flush(&first);
  int matched_by_bytes = k3::StopStrings::kNoMatch;
  for (const char c : text) {
    matched_by_bytes = by_bytes.Append(std::string_view(&c, 1), &second);
    Require(text.compare(0, second.size(), second) == 0);
  }
  by_bytes.Flush(&second);
  Require(matched == matched_by_bytes && first == second);
  for (const std::string& stop : stops) Require(first.find(stop) == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto xtml = k3::Tokenizer::Load(K3_SOURCE_DIR "/configs/models/tiny-k3").value();
  static const auto k2 = K2Vocabulary();
  if (size == 0) return 0;
  const auto open = static_cast<k3::OpenChannel>(data[0] % 3);
  const std::vector<int32_t> ids = Tokens(*xtml, true, data + 1, size - 1);
  Parse(xtml, k3::ChatFormat::kXtml, open, ids);
  Parse(k2, k3::ChatFormat::kK2, k3::OpenChannel::kContent, Tokens(*k2, false, data + 1, size - 1));
  const k3::ParsedOutput raw = Parse(xtml, k3::ChatFormat::kNone, k3::OpenChannel::kNone, ids);
  std::vector<std::string> stops;
  for (const size_t length : {1, 2, 3}) {
    const std::string stop = raw.content.substr(raw.content.size() / (length + 1), length);
    if (!stop.empty()) stops.push_back(stop);
  }
  CheckStops(raw.content, stops);
  return 0;
}
