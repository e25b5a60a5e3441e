#include "server/text/tokenizer_files.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/text/token_table.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

absl::Status LineError(const std::string& path, size_t line, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ":", line, ": ", what));
}

struct RankedToken {
  std::string bytes;
  int64_t rank = 0;
  size_t line = 0;
};

absl::StatusOr<RankedToken> ParseLine(std::string_view line, const std::string& path, size_t number) {
  const size_t blank = line.find(' ');
  if (blank == std::string_view::npos || blank == 0) {
    return LineError(path, number, "expected a base64 token, a blank and a rank");
  }
  RankedToken token;
  token.line = number;
  const absl::string_view encoded(line.data(), blank);
  // The lenient decoder takes blanks and missing padding: encoding again tells.
  if (!absl::Base64Unescape(encoded, &token.bytes) || absl::Base64Escape(token.bytes) != encoded) {
    return LineError(path, number, "the token is not valid base64");
  }
  if (token.bytes.empty()) return LineError(path, number, "the token is empty");
  const std::string_view digits = line.substr(blank + 1);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(digits.data(), digits.size()), &token.rank)) {
    return LineError(path, number, "the rank is not a number");
  }
  return token;
}

std::string ReservedName(int32_t id) { return absl::StrCat("<|reserved_token_", id, "|>"); }

// "bos_token" and the like: a string, an object with "content", or null.
absl::StatusOr<int32_t> FindNamedToken(const Json& config, const char* key, const std::vector<std::string>& names,
                                       int32_t first_id, const std::string& path) {
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return -1;
  const Json* value = &*it;
  if (value->is_object() && value->contains("content")) value = &(*value)["content"];
  if (!value->is_string()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", key, " is not a string"));
  const auto& name = value->get_ref<const std::string&>();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return first_id + static_cast<int32_t>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", key, " \"", name, "\" is not in added_tokens_decoder"));
}

absl::Status ReadAddedTokens(const Json& added, int32_t first_id, const std::string& path,
                             std::vector<std::string>* names) {
  if (!added.is_object())
    return absl::InvalidArgumentError(absl::StrCat(path, ": added_tokens_decoder is not an object"));
  for (const auto& [key, value] : added.items()) {
    const std::string where = absl::StrCat(path, ": added_tokens_decoder[\"", key, "\"]");
    int32_t id = 0;
    if (!absl::SimpleAtoi(key, &id)) return absl::InvalidArgumentError(where + ": the key is not an id");
    if (id < first_id || id >= first_id + SpecialTokens::kReserved) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": the id is outside [", first_id, ", ",
                                                     first_id + SpecialTokens::kReserved, ") after the ranks"));
    }
    if (!value.is_object() || !value.contains("content") || !value["content"].is_string() ||
        value["content"].get_ref<const std::string&>().empty()) {
      return absl::InvalidArgumentError(where + ": content is missing, empty or not a string");
    }
    (*names)[id - first_id] = value["content"].get<std::string>();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseTiktokenModel(std::string_view text, const std::string& path) {
  std::vector<RankedToken> lines;
  for (size_t begin = 0, number = 1; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    auto token = ParseLine(text.substr(begin, end - begin), path, number);
    if (!token.ok()) return token.status();
    if (number > TokenTable::kMaxTokens) {
      return LineError(path, number, absl::StrCat("more than ", TokenTable::kMaxTokens, " tokens"));
    }
    lines.push_back(*std::move(token));
    begin = end + 1;
  }

  std::vector<std::string> tokens(lines.size());
  absl::flat_hash_map<std::string, size_t> line_of;
  line_of.reserve(lines.size());
  for (RankedToken& token : lines) {
    if (token.rank >= static_cast<int64_t>(lines.size())) {
      return LineError(
          path, token.line,
          absl::StrCat("rank ", token.rank, " in a file of ", lines.size(), " tokens: ranks must have no gaps"));
    }
    if (!tokens[token.rank].empty())
      return LineError(path, token.line, absl::StrCat("rank ", token.rank, " occurs twice"));
    const auto [it, added] = line_of.emplace(token.bytes, token.line);
    if (!added) return LineError(path, token.line, absl::StrCat("the token is already on line ", it->second));
    tokens[token.rank] = std::move(token.bytes);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (!line_of.contains(std::string(1, static_cast<char>(byte)))) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": no token for the single byte 0x", absl::Hex(byte, absl::kZeroPad2)));
    }
  }
  return tokens;
}

absl::StatusOr<SpecialTokens> ParseTokenizerConfig(std::string_view text, int32_t first_id, const std::string& path) {
  Json config;
  try {
    config = Json::parse(text);
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  if (!config.is_object()) return absl::InvalidArgumentError(path + ": not a JSON object");

  SpecialTokens special;
  special.names.resize(SpecialTokens::kReserved);
  if (config.contains("added_tokens_decoder")) {
    const absl::Status status = ReadAddedTokens(config["added_tokens_decoder"], first_id, path, &special.names);
    if (!status.ok()) return status;
  }
  absl::flat_hash_set<std::string> seen;
  for (int32_t i = 0; i < SpecialTokens::kReserved; ++i) {
    std::string& name = special.names[i];
    if (name.empty()) name = ReservedName(first_id + i);
    if (!seen.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": two special tokens are called \"", name, "\""));
    }
  }
  const std::pair<const char*, int32_t*> named[] = {{"bos_token", &special.bos_id},
                                                    {"eos_token", &special.eos_id},
                                                    {"pad_token", &special.pad_id},
                                                    {"unk_token", &special.unk_id}};
  for (const auto& [key, id] : named) {
    auto found = FindNamedToken(config, key, special.names, first_id, path);
    if (!found.ok()) return found.status();
    *id = *found;
  }
  return special;
}

SpecialTokens DefaultSpecialTokens(int32_t first_id) {
  static constexpr std::pair<int32_t, const char*> kNames[] = {
      {0, "[BOS]"},
      {1, "[EOS]"},
      {2, "<|end_of_msg|>"},
      {3, "<|open|>"},
      {4, "<|close|>"},
      {5, "<|sep|>"},
      {6, "[start_header_id]"},
      {7, "[end_header_id]"},
      {9, "[EOT]"},
      {18, "<|media_begin|>"},
      {19, "<|media_content|>"},
      {20, "<|media_end|>"},
      {21, "<|media_pad|>"},
      {65, "<osagent_mode>"},
      {254, "[UNK]"},
      {255, "[PAD]"},
  };
  SpecialTokens special;
  for (int32_t i = 0; i < SpecialTokens::kReserved; ++i) special.names.push_back(ReservedName(first_id + i));
  for (const auto& [offset, name] : kNames) special.names[offset] = name;
  special.bos_id = first_id;
  special.eos_id = first_id + 1;
  special.unk_id = first_id + 254;
  special.pad_id = first_id + 255;
  return special;
}

}  // namespace k3
