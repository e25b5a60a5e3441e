#include "server/text/tokenizer_files.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

std::string ByteLines() {
  std::string text;
  for (int i = 0; i < 256; ++i) {
    absl::StrAppend(&text, absl::Base64Escape(std::string(1, static_cast<char>(i))), " ", i, "\n");
  }
  return text;
}

std::string ModelError(const std::string& text) {
  const auto tokens = ParseTiktokenModel(text, "dir/tiktoken.model");
  EXPECT_FALSE(tokens.ok());
  EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(tokens.status().message());
}

TEST(TiktokenModel, Reads) {
  const auto tokens = ParseTiktokenModel(ByteLines() + "YWI= 257\nYWJj 256\n", "f").value();
  ASSERT_EQ(tokens.size(), 258u);
  EXPECT_EQ(tokens[0], std::string(1, '\0'));
  EXPECT_EQ(tokens[256], "abc");
  EXPECT_EQ(tokens[257], "ab");
  EXPECT_TRUE(ParseTiktokenModel(ByteLines() + "YWI= 256", "f").ok());  // the last line may lack its end
}

TEST(TiktokenModel, EveryMalformedLineIsNamed) {
  const std::string bytes = ByteLines();
  EXPECT_EQ(ModelError(bytes + "YWI=\n"), "dir/tiktoken.model:257: expected a base64 token, a blank and a rank");
  EXPECT_EQ(ModelError(bytes + "\nYWI= 256\n"), "dir/tiktoken.model:257: expected a base64 token, a blank and a rank");
  EXPECT_EQ(ModelError(bytes + " 256\n"), "dir/tiktoken.model:257: expected a base64 token, a blank and a rank");
  EXPECT_EQ(ModelError(bytes + "YW! 256\n"), "dir/tiktoken.model:257: the token is not valid base64");
  EXPECT_EQ(ModelError(bytes + "YWI 256\n"), "dir/tiktoken.model:257: the token is not valid base64");
  EXPECT_EQ(ModelError(bytes + "YWJ= 256\n"), "dir/tiktoken.model:257: the token is not valid base64");
  for (const char* rank : {"", "x", "-1", "1.5", " 256", "256 ", "0x100", "99999999999999999999"}) {
    EXPECT_EQ(ModelError(absl::StrCat(bytes, "YWI= ", rank, "\n")), "dir/tiktoken.model:257: the rank is not a number");
  }
  EXPECT_EQ(ModelError(bytes + "YWI= 257\n"),
            "dir/tiktoken.model:257: rank 257 in a file of 257 tokens: ranks must have no gaps");
  EXPECT_EQ(ModelError(bytes + "YWI= 7\n"), "dir/tiktoken.model:257: rank 7 occurs twice");
  EXPECT_EQ(ModelError(bytes + "YQ== 256\n"), "dir/tiktoken.model:257: the token is already on line 98");
  EXPECT_EQ(ModelError(bytes + "YWI= 256\r\n"), "dir/tiktoken.model:257: the rank is not a number");
  EXPECT_EQ(ModelError(""), "dir/tiktoken.model: no token for the single byte 0x00");
}

constexpr char kConfig[] = R"({"added_tokens_decoder": {"300": {"content": "[BOS]"}, "301": {"content": "<|open|>"},
  "555": {"content": "[PAD]"}}, "bos_token": "[BOS]", "eos_token": {"content": "<|open|>"}, "pad_token": null})";

TEST(TokenizerConfig, NamesFollowTheRanks) {
  const auto special = ParseTokenizerConfig(kConfig, 300, "f").value();
  ASSERT_EQ(special.names.size(), 256u);
  EXPECT_EQ(special.names[0], "[BOS]");
  EXPECT_EQ(special.names[1], "<|open|>");
  EXPECT_EQ(special.names[2], "<|reserved_token_302|>");
  EXPECT_EQ(special.names[255], "[PAD]");
  EXPECT_EQ(special.bos_id, 300);
  EXPECT_EQ(special.eos_id, 301);
  EXPECT_EQ(special.pad_id, -1);
}

TEST(TokenizerConfig, Errors) {
  const auto error = [](const std::string& text, int32_t first = 300) {
    const auto special = ParseTokenizerConfig(text, first, "f.json");
    EXPECT_EQ(special.status().code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(special.status().message());
  };
  EXPECT_EQ(error("[]"), "f.json: not a JSON object");
  EXPECT_EQ(error("{").substr(0, 8), "f.json: ");
  EXPECT_EQ(error(kConfig, 301), "f.json: added_tokens_decoder[\"300\"]: the id is outside [301, 557) after the ranks");
  EXPECT_EQ(error(kConfig, 299), "f.json: added_tokens_decoder[\"555\"]: the id is outside [299, 555) after the ranks");
  EXPECT_EQ(error(R"({"added_tokens_decoder": []})"), "f.json: added_tokens_decoder is not an object");
  EXPECT_EQ(error(R"({"added_tokens_decoder": {"a": {}}})"),
            "f.json: added_tokens_decoder[\"a\"]: the key is not an id");
  EXPECT_EQ(error(R"({"added_tokens_decoder": {"300": {"content": 1}}})"),
            "f.json: added_tokens_decoder[\"300\"]: content is missing, empty or not a string");
  EXPECT_EQ(error(R"({"added_tokens_decoder": {"300": {"content": "a"}, "301": {"content": "a"}}})"),
            "f.json: two special tokens are called \"a\"");
  EXPECT_EQ(error(R"({"eos_token": "[EOS]"})"), "f.json: eos_token \"[EOS]\" is not in added_tokens_decoder");
  EXPECT_EQ(error(R"({"eos_token": 5})"), "f.json: eos_token is not a string");
}

TEST(TokenizerConfig, DefaultsAreK3s) {
  const SpecialTokens special = DefaultSpecialTokens(163584);
  EXPECT_EQ(special.names[163587 - 163584], "<|open|>");
  EXPECT_EQ(special.names[163605 - 163584], "<|media_pad|>");
  EXPECT_EQ(special.names[163592 - 163584], "<|reserved_token_163592|>");
  EXPECT_EQ(special.names[163649 - 163584], "<osagent_mode>");
  EXPECT_EQ(special.eos_id, 163585);
  EXPECT_EQ(special.pad_id, 163839);
}

}  // namespace
}  // namespace k3
