#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/text/byte_pair_encoder.h"
#include "server/text/pretokenizer.h"
#include "server/text/token_table.h"
#include "server/text/tokenizer_files.h"

namespace k3 {

enum class EncodeMode {
  kOrdinary,  // spellings of special tokens are plain text: whatever comes from users, tools or history
  kControl,   // all special tokens are recognised: the server's own markup
};

// A tiktoken vocabulary with its special tokens. Ids [0, num_ranks) are mergeable tokens, [num_ranks, vocab_size)
// special ones. Immutable after load; any number of threads may use one.
class Tokenizer {
 public:
  // Reads tiktoken.model and, where present, tokenizer_config.json (else K3's default names) in `directory`.
  // NOT_FOUND without the first; INVALID_ARGUMENT naming file and line or key when one is malformed.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> Load(const std::string& directory);
  // The same from the files' contents. `config` nullopt: default names. `directory` is for messages.
  static absl::StatusOr<std::shared_ptr<const Tokenizer>> FromContents(std::string_view model,
                                                                       std::optional<std::string_view> config,
                                                                       const std::string& directory = "");

  // Appends the ids of `text`. INVALID_ARGUMENT naming the byte when it is not UTF-8; then nothing was appended.
  absl::Status Encode(std::string_view text, EncodeMode mode, std::vector<int32_t>* ids) const;
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text, EncodeMode mode = EncodeMode::kOrdinary) const;

  // Any bytes, in ordinary mode: a byte outside valid UTF-8 is a symbol by itself. For tests; requests are UTF-8.
  void EncodeBytes(std::string_view bytes, std::vector<int32_t>* ids) const;

  // The exact bytes, not necessarily UTF-8. A special id gives its name, an id outside the vocabulary U+FFFD.
  std::string Decode(std::span<const int32_t> ids) const;
  std::string_view TokenBytes(int32_t id) const;

  int32_t num_ranks() const { return table_.size(); }
  int32_t vocab_size() const { return num_ranks() + SpecialTokens::kReserved; }
  bool IsSpecial(int32_t id) const { return id >= num_ranks() && id < vocab_size(); }
  std::optional<int32_t> SpecialId(std::string_view name) const;

  std::optional<int32_t> bos_id() const { return Named(special_.bos_id); }
  std::optional<int32_t> eos_id() const { return Named(special_.eos_id); }
  std::optional<int32_t> pad_id() const { return Named(special_.pad_id); }
  // End a chat answer: the file's eos token, [EOS] (some files call the end of a message eos), and the end of a message
  // (<|end_of_msg|> or <|im_end|>), ascending.
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

 private:
  Tokenizer() : encoder_(table_) {}

  static std::optional<int32_t> Named(int32_t id) { return id < 0 ? std::nullopt : std::optional<int32_t>(id); }
  void IndexSpecialTokens();
  // What one Encode keeps from chunk to chunk.
  struct Scratch {
    std::vector<uint32_t> piece_ends;
    std::unique_ptr<PieceCache> cache;  // for texts that are long enough to repeat themselves
  };
  void EncodeAll(std::string_view text, bool valid_utf8, EncodeMode mode, std::vector<int32_t>* ids) const;
  // One chunk of EncodeChunks.
  void EncodeOrdinaryChunk(std::string_view chunk, Scratch* scratch, std::vector<int32_t>* ids) const;
  void EncodeControlChunk(std::string_view chunk, Scratch* scratch, std::vector<int32_t>* ids) const;
  // The special token that starts at `text`'s first byte, longest first; -1 when there is none.
  int32_t SpecialPrefix(std::string_view text) const;

  TokenTable table_;
  BytePairEncoder encoder_;
  std::unique_ptr<Pretokenizer> pretokenizer_;
  SpecialTokens special_;
  absl::flat_hash_map<std::string, int32_t> special_ids_;
  std::vector<size_t> special_lengths_;  // distinct, longest first
  std::string special_first_bytes_;
  std::vector<int32_t> stop_ids_;
};

}  // namespace k3
