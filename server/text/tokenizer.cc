#include "server/text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/text/encode_chunks.h"
#include "server/text/utf8.h"
#include "server/text_file.h"

namespace k3 {
namespace {

std::string FilePath(const std::string& directory, const char* name) {
  return directory.empty() ? name : absl::StrCat(directory, "/", name);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::Load(const std::string& directory) {
  auto model = ReadTextFile(FilePath(directory, "tiktoken.model"));
  if (!model.ok()) return model.status();
  auto config = ReadTextFile(FilePath(directory, "tokenizer_config.json"));
  if (!config.ok() && !absl::IsNotFound(config.status())) return config.status();
  return FromContents(*model, config.ok() ? std::optional<std::string_view>(*config) : std::nullopt, directory);
}

absl::StatusOr<std::shared_ptr<const Tokenizer>> Tokenizer::FromContents(std::string_view model,
                                                                         std::optional<std::string_view> config,
                                                                         const std::string& directory) {
  std::shared_ptr<Tokenizer> tokenizer(new Tokenizer());
  auto tokens = ParseTiktokenModel(model, FilePath(directory, "tiktoken.model"));
  if (!tokens.ok()) return tokens.status();
  tokenizer->table_.Build(*tokens);

  const int32_t first_special = tokenizer->num_ranks();
  if (config.has_value()) {
    auto special = ParseTokenizerConfig(*config, first_special, FilePath(directory, "tokenizer_config.json"));
    if (!special.ok()) return special.status();
    tokenizer->special_ = *std::move(special);
  } else {
    tokenizer->special_ = DefaultSpecialTokens(first_special);
  }
  tokenizer->IndexSpecialTokens();

  auto pretokenizer = Pretokenizer::Create();
  if (!pretokenizer.ok()) return pretokenizer.status();
  tokenizer->pretokenizer_ = *std::move(pretokenizer);
  return tokenizer;
}

void Tokenizer::IndexSpecialTokens() {
  for (size_t i = 0; i < special_.names.size(); ++i) {
    const std::string& name = special_.names[i];
    special_ids_[name] = num_ranks() + static_cast<int32_t>(i);
    special_lengths_.push_back(name.size());
    if (special_first_bytes_.find(name[0]) == std::string::npos) special_first_bytes_.push_back(name[0]);
  }
  std::sort(special_lengths_.begin(), special_lengths_.end(), std::greater<>());
  special_lengths_.erase(std::unique(special_lengths_.begin(), special_lengths_.end()), special_lengths_.end());

  for (const auto id : {eos_id(), SpecialId("[EOS]"), SpecialId("<|end_of_msg|>"), SpecialId("<|im_end|>")}) {
    if (id.has_value()) stop_ids_.push_back(*id);
  }
  std::sort(stop_ids_.begin(), stop_ids_.end());
  stop_ids_.erase(std::unique(stop_ids_.begin(), stop_ids_.end()), stop_ids_.end());
}

std::optional<int32_t> Tokenizer::SpecialId(std::string_view name) const {
  const auto it = special_ids_.find(absl::string_view(name.data(), name.size()));
  return it == special_ids_.end() ? std::nullopt : std::optional<int32_t>(it->second);
}

absl::Status Tokenizer::Encode(std::string_view text, EncodeMode mode, std::vector<int32_t>* ids) const {
  const size_t valid = ValidUtf8Prefix(text);
  if (valid != text.size()) {
    return absl::InvalidArgumentError(absl::StrCat("text is not valid UTF-8 at byte ", valid));
  }
  EncodeAll(text, /*valid_utf8=*/true, mode, ids);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, EncodeMode mode) const {
  std::vector<int32_t> ids;
  const absl::Status status = Encode(text, mode, &ids);
  if (!status.ok()) return status;
  return ids;
}

void Tokenizer::EncodeBytes(std::string_view bytes, std::vector<int32_t>* ids) const {
  EncodeAll(bytes, /*valid_utf8=*/false, EncodeMode::kOrdinary, ids);
}

void Tokenizer::EncodeAll(std::string_view text, bool valid_utf8, EncodeMode mode, std::vector<int32_t>* ids) const {
  constexpr size_t kCacheFromBytes = 8 * 1024;
  Scratch scratch;
  if (text.size() >= kCacheFromBytes) scratch.cache = std::make_unique<PieceCache>();
  EncodeChunks chunks(text, valid_utf8);
  for (std::string_view chunk; chunks.Next(&chunk);) {
    if (mode == EncodeMode::kControl) {
      EncodeControlChunk(chunk, &scratch, ids);
    } else {
      EncodeOrdinaryChunk(chunk, &scratch, ids);
    }
  }
}

void Tokenizer::EncodeOrdinaryChunk(std::string_view chunk, Scratch* scratch, std::vector<int32_t>* ids) const {
  scratch->piece_ends.clear();
  pretokenizer_->Split(chunk, &scratch->piece_ends);
  uint32_t begin = 0;
  for (const uint32_t end : scratch->piece_ends) {
    encoder_.Encode(chunk.substr(begin, end - begin), scratch->cache.get(), ids);
    begin = end;
  }
}

void Tokenizer::EncodeControlChunk(std::string_view chunk, Scratch* scratch, std::vector<int32_t>* ids) const {
  size_t plain_begin = 0;
  size_t at = chunk.find_first_of(special_first_bytes_);
  while (at != std::string_view::npos) {
    const int32_t id = SpecialPrefix(chunk.substr(at));
    if (id < 0) {
      at = chunk.find_first_of(special_first_bytes_, at + 1);
      continue;
    }
    EncodeOrdinaryChunk(chunk.substr(plain_begin, at - plain_begin), scratch, ids);
    ids->push_back(id);
    plain_begin = at + TokenBytes(id).size();
    at = chunk.find_first_of(special_first_bytes_, plain_begin);
  }
  EncodeOrdinaryChunk(chunk.substr(plain_begin), scratch, ids);
}

int32_t Tokenizer::SpecialPrefix(std::string_view text) const {
  for (const size_t length : special_lengths_) {
    if (length > text.size()) continue;
    const auto id = SpecialId(text.substr(0, length));
    if (id.has_value()) return *id;
  }
  return -1;
}

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id >= 0 && id < num_ranks()) return table_.Bytes(id);
  if (IsSpecial(id)) return special_.names[id - num_ranks()];
  return kReplacementCharacter;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += TokenBytes(id);
  return bytes;
}

}  // namespace k3
