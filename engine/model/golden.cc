#include "engine/model/golden.h"

#include <cstring>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/mapped_file.h"
#include "engine/model/safetensors.h"

namespace k3 {
namespace {

// The tensors of one prompt by the part of the name behind the last dot.
struct PromptTensors {
  std::map<std::string, const StoredTensor*, std::less<>> parts;
};

class Reader {
 public:
  Reader(const MappedFile& file, const SafetensorsHeader& header) : file_(file), header_(header) {}

  absl::StatusOr<const StoredTensor*> Find(const std::string& prompt, const PromptTensors& tensors, const char* part,
                                           size_t rank, DType dtype) const {
    const auto it = tensors.parts.find(part);
    if (it == tensors.parts.end()) {
      return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": no tensor ", prompt, ".", part));
    }
    const StoredTensor& tensor = *it->second;
    if (header_.Shape(tensor).size() != rank || SafetensorsHeader::Type(tensor) != dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          file_.path(), ": tensor ", std::string(header_.Name(tensor)), ": expected ", k3::Name(dtype), " with ", rank,
          " dimensions, found ", SafetensorsHeader::TypeName(tensor), " with ", header_.Shape(tensor).size()));
    }
    return &tensor;
  }

  std::vector<float> Floats(const StoredTensor& tensor) const {
    std::vector<float> values((tensor.end - tensor.begin) / sizeof(float));
    std::memcpy(values.data(), file_.data() + tensor.begin, values.size() * sizeof(float));
    return values;
  }

  // Ids must be in [0, limit).
  absl::StatusOr<std::vector<int32_t>> Ids(const StoredTensor& tensor, int64_t limit) const {
    std::vector<int32_t> values((tensor.end - tensor.begin) / sizeof(int64_t));
    for (size_t i = 0; i < values.size(); ++i) {
      int64_t value = 0;
      std::memcpy(&value, file_.data() + tensor.begin + i * sizeof(int64_t), sizeof(value));
      if (value < 0 || value >= limit) {
        return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": tensor ", std::string(header_.Name(tensor)),
                                                       "[", i, "]: expected a value in [0, ", limit, "), found ",
                                                       value));
      }
      values[i] = static_cast<int32_t>(value);
    }
    return values;
  }

 private:
  const MappedFile& file_;
  const SafetensorsHeader& header_;
};

}  // namespace

absl::StatusOr<std::vector<GoldenPrompt>> LoadGolden(const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader((*file)->bytes(), (*file)->size(), path);
  if (!header.ok()) return header.status();

  std::map<std::string, PromptTensors> by_prompt;
  for (const StoredTensor& tensor : header->tensors) {
    const std::string_view name = header->Name(tensor);
    const size_t dot = name.rfind('.');
    if (dot == std::string_view::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", std::string(name), ": expected a name PROMPT.PART"));
    }
    by_prompt[std::string(name.substr(0, dot))].parts[std::string(name.substr(dot + 1))] = &tensor;
  }
  if (by_prompt.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no prompts"));

  constexpr int64_t kMaxId = INT32_MAX;
  const Reader reader(**file, *header);
  std::vector<GoldenPrompt> prompts;
  for (const auto& [name, tensors] : by_prompt) {
    GoldenPrompt prompt;
    prompt.name = name;

    const auto logits = reader.Find(name, tensors, "logits", 2, DType::kF32);
    if (!logits.ok()) return logits.status();
    prompt.logits = reader.Floats(**logits);
    prompt.vocab_size = header->Shape(**logits)[1];

    // One after the other: each checks its ids against what came before.
    const auto read_ids = [&](const char* part, int64_t limit, std::vector<int32_t>* out) -> absl::Status {
      const auto tensor = reader.Find(name, tensors, part, 1, DType::kI64);
      if (!tensor.ok()) return tensor.status();
      absl::StatusOr<std::vector<int32_t>> ids = reader.Ids(**tensor, limit);
      if (!ids.ok()) return ids.status();
      *out = *std::move(ids);
      return absl::OkStatus();
    };
    if (absl::Status s = read_ids("tokens", prompt.vocab_size, &prompt.tokens); !s.ok()) return s;
    if (absl::Status s = read_ids("rows", static_cast<int64_t>(prompt.tokens.size()), &prompt.rows); !s.ok()) return s;
    if (absl::Status s = read_ids("greedy", prompt.vocab_size, &prompt.greedy); !s.ok()) return s;

    const auto margin = reader.Find(name, tensors, "margin", 1, DType::kF32);
    if (!margin.ok()) return margin.status();
    prompt.margin = reader.Floats(**margin);

    if (tensors.parts.contains("experts")) {
      const auto experts = reader.Find(name, tensors, "experts", 3, DType::kI64);
      if (!experts.ok()) return experts.status();
      absl::StatusOr<std::vector<int32_t>> ids = reader.Ids(**experts, kMaxId);
      if (!ids.ok()) return ids.status();
      prompt.experts = *std::move(ids);
      prompt.moe_layers = static_cast<int32_t>(header->Shape(**experts)[0]);
      prompt.top_k = static_cast<int32_t>(header->Shape(**experts)[2]);
      if (header->Shape(**experts)[1] != static_cast<int64_t>(prompt.tokens.size())) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", name, ".experts: expected ",
                                                       prompt.tokens.size(), " positions, found ",
                                                       header->Shape(**experts)[1]));
      }
    }
    if (prompt.tokens.empty() || prompt.rows.empty() ||
        prompt.logits.size() != prompt.rows.size() * static_cast<size_t>(prompt.vocab_size) ||
        prompt.margin.size() != prompt.greedy.size()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": prompt ", name, ": ", prompt.tokens.size(), " tokens, ",
                                                     prompt.rows.size(), " rows, ", prompt.logits.size(), " logits, ",
                                                     prompt.greedy.size(), " greedy tokens and ", prompt.margin.size(),
                                                     " margins do not fit together"));
    }
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

}  // namespace k3
