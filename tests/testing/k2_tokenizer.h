#pragma once

#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "server/text/tokenizer.h"
#include "tests/testing/paths.h"

namespace k3::testing {

// The shipped vocabulary with the special tokens of the K2 family.
inline std::shared_ptr<const Tokenizer> K2Tokenizer() {
  std::ifstream file(TinyK3() + "/tiktoken.model", std::ios::binary);
  const std::string model((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::string config = R"({"added_tokens_decoder":{"3841":{"content":"[EOS]"},
      "3842":{"content":"<|im_end|>"},"3843":{"content":"<|im_user|>"},"3844":{"content":"<|im_assistant|>"},
      "3850":{"content":"<|im_system|>"},"3851":{"content":"<|tool_calls_section_begin|>"},
      "3852":{"content":"<|tool_calls_section_end|>"},"3853":{"content":"<|tool_call_begin|>"},
      "3854":{"content":"<|tool_call_argument_begin|>"},"3855":{"content":"<|tool_call_end|>"},
      "3857":{"content":"<|im_middle|>"}},"eos_token":"[EOS]"})";
  return Tokenizer::FromContents(model, config).value();
}

}  // namespace k3::testing
