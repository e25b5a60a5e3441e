#include "engine/model/golden.h"

#include <cstring>
#include <limits>
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

// Reads prompts out of one file, whose tensors are called PROMPT.PART.
class GoldenReader {
 public:
  GoldenReader(const MappedFile& file, const SafetensorsHeader& header) : file_(file), header_(header) {}

  absl::StatusOr<std::map<std::string, PromptTensors>> Prompts() const {
    std::map<std::string, PromptTensors> prompts;
    for (const StoredTensor& tensor : header_.tensors) {
      const std::string_view name = header_.Name(tensor);
      const size_t dot = name.rfind('.');
      if (dot == std::string_view::npos) {
        return absl::InvalidArgumentError(
            absl::StrCat(file_.path(), ": tensor ", std::string(name), ": expected a name PROMPT.PART"));
      }
      prompts[std::string(name.substr(0, dot))].parts[std::string(name.substr(dot + 1))] = &tensor;
    }
    if (prompts.empty()) return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": holds no prompts"));
    return prompts;
  }

  absl::StatusOr<GoldenPrompt> Prompt(const std::string& name, const PromptTensors& tensors) const {
    GoldenPrompt prompt;
    prompt.name = name;
    const auto logits = Find(name, tensors, "logits", 2, DType::kF32);
    if (!logits.ok()) return logits.status();
    prompt.logits = Floats(**logits);
    prompt.vocab_size = header_.Shape(**logits)[1];
    const auto margin = Find(name, tensors, "margin", 1, DType::kF32);
    if (!margin.ok()) return margin.status();
    prompt.margin = Floats(**margin);

    // One after the other: each checks its ids against what came before.
    absl::Status status = ReadIds(name, tensors, "tokens", prompt.vocab_size, &prompt.tokens);
    const auto positions = static_cast<int64_t>(prompt.tokens.size());
    if (status.ok()) status = ReadIds(name, tensors, "rows", positions, &prompt.rows);
    if (status.ok()) status = ReadIds(name, tensors, "greedy", prompt.vocab_size, &prompt.greedy);
    if (status.ok() && tensors.parts.contains("experts")) status = ReadExperts(tensors, &prompt);
    if (status.ok()) status = CheckSizes(prompt);
    if (!status.ok()) return status;
    return prompt;
  }

 private:
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

  absl::Status ReadIds(const std::string& prompt, const PromptTensors& tensors, const char* part, int64_t limit,
                       std::vector<int32_t>* out) const {
    const auto tensor = Find(prompt, tensors, part, 1, DType::kI64);
    if (!tensor.ok()) return tensor.status();
    absl::StatusOr<std::vector<int32_t>> ids = Ids(**tensor, limit);
    if (!ids.ok()) return ids.status();
    *out = *std::move(ids);
    return absl::OkStatus();
  }

  // [MoE layers, positions, top k]; whether there are so many experts is for the model to say.
  absl::Status ReadExperts(const PromptTensors& tensors, GoldenPrompt* prompt) const {
    const auto experts = Find(prompt->name, tensors, "experts", 3, DType::kI64);
    if (!experts.ok()) return experts.status();
    absl::StatusOr<std::vector<int32_t>> ids = Ids(**experts, std::numeric_limits<int32_t>::max());
    if (!ids.ok()) return ids.status();
    prompt->experts = *std::move(ids);
    const std::span<const int64_t> shape = header_.Shape(**experts);
    prompt->moe_layers = static_cast<int32_t>(shape[0]);
    prompt->top_k = static_cast<int32_t>(shape[2]);
    if (shape[1] == static_cast<int64_t>(prompt->tokens.size())) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": tensor ", prompt->name, ".experts: expected ",
                                                   prompt->tokens.size(), " positions, found ", shape[1]));
  }

  absl::Status CheckSizes(const GoldenPrompt& prompt) const {
    if (!prompt.tokens.empty() && !prompt.rows.empty() &&
        prompt.logits.size() == prompt.rows.size() * static_cast<size_t>(prompt.vocab_size) &&
        prompt.margin.size() == prompt.greedy.size()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(file_.path(), ": prompt ", prompt.name, ": ", prompt.tokens.size(),
                                                   " tokens, ", prompt.rows.size(), " rows, ", prompt.logits.size(),
                                                   " logits, ", prompt.greedy.size(), " greedy tokens and ",
                                                   prompt.margin.size(), " margins do not fit together"));
  }

  const MappedFile& file_;
  const SafetensorsHeader& header_;
};

}  // namespace

absl::StatusOr<std::vector<GoldenPrompt>> LoadGolden(const std::string& path) {
  absl::StatusOr<std::unique_ptr<MappedFile>> file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader((*file)->bytes(), (*file)->size(), path);
  if (!header.ok()) return header.status();
  const GoldenReader reader(**file, *header);
  const auto by_name = reader.Prompts();
  if (!by_name.ok()) return by_name.status();
  std::vector<GoldenPrompt> prompts;
  for (const auto& [name, tensors] : *by_name) {
    absl::StatusOr<GoldenPrompt> prompt = reader.Prompt(name, tensors);
    if (!prompt.ok()) return prompt.status();
    prompts.push_back(*std::move(prompt));
  }
  return prompts;
}

}  // namespace k3
