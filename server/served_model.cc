#include "server/served_model.h"

#include <spdlog/spdlog.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "server/text_file.h"

namespace k3 {
namespace {

// A number of the file within [low, high]; absent and null are the same.
absl::Status ReadNumber(const nlohmann::json& file, const std::string& path, const char* key, double low, double high,
                        std::optional<float>* value) {
  const auto it = file.find(key);
  if (it == file.end() || it->is_null()) return absl::OkStatus();
  if (!it->is_number()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", key, " must be a number"));
  const double number = it->get<double>();
  if (!(number >= low && number <= high)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", key, " must be from ", low, " to ", high, ", not ", number));
  }
  *value = static_cast<float>(number);
  return absl::OkStatus();
}

// An id or a list of them. Whether they are in the vocabulary is for the caller to say.
absl::Status ReadEosIds(const nlohmann::json& file, const std::string& path, std::vector<int32_t>* ids) {
  const nlohmann::json eos = file.value("eos_token_id", nlohmann::json());
  for (const nlohmann::json& id : eos.is_array()  ? eos
                                  : eos.is_null() ? nlohmann::json::array()
                                                  : nlohmann::json::array({eos})) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": eos_token_id must hold token ids, not ", id.dump()));
    }
    ids->push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

// Fields that would change answers and that no request here can ask for, with the value that means nothing. Limits of
// length (max_length, max_new_tokens) are not among them: without one an answer may take what is left of the context.
struct UnfollowedField {
  const char* name;
  double neutral;  // null, false, [] and {} mean nothing too
};
constexpr UnfollowedField kUnfollowed[] = {
    {"num_beams", 1},
    {"typical_p", 1},
    {"no_repeat_ngram_size", 0},
    {"epsilon_cutoff", 0},
    {"eta_cutoff", 0},
    {"penalty_alpha", 0},
    {"guidance_scale", 1},
    {"min_length", 0},
    {"min_new_tokens", 0},
    {"bad_words_ids", 0},
    {"suppress_tokens", 0},
    {"begin_suppress_tokens", 0},
    {"forced_bos_token_id", -1},
    {"forced_eos_token_id", -1},
    {"sequence_bias", 0},
    {"stop_strings", 0},
    {"presence_penalty", 0},
    {"frequency_penalty", 0},
};

void WarnOfUnfollowed(const nlohmann::json& file, const std::string& path) {
  std::string names;
  for (const UnfollowedField& field : kUnfollowed) {
    const auto it = file.find(field.name);
    if (it == file.end() || it->empty() || *it == false || (it->is_number() && it->get<double>() == field.neutral)) {
      continue;
    }
    absl::StrAppend(&names, names.empty() ? "" : ", ", field.name);
  }
  if (!names.empty()) spdlog::warn("{}: these fields are not followed: {}", path, names);
}

}  // namespace

absl::StatusOr<SamplingDefaults> LoadSamplingDefaults(const std::string& dir) {
  SamplingDefaults defaults;
  const std::string path = absl::StrCat(dir, "/generation_config.json");
  const absl::StatusOr<std::string> text = ReadTextFile(path);
  if (absl::IsNotFound(text.status())) return defaults;
  if (!text.ok()) return text.status();
  const nlohmann::json file = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError(absl::StrCat(path, ": is not a JSON object"));
  std::optional<float> top_k;
  absl::Status status = ReadNumber(file, path, "temperature", 0, 100, &defaults.temperature);
  if (status.ok()) status = ReadNumber(file, path, "top_p", 1e-6, 1, &defaults.top_p);
  if (status.ok()) status = ReadNumber(file, path, "top_k", 0, 1e6, &top_k);
  if (status.ok()) status = ReadNumber(file, path, "min_p", 0, 0.999999, &defaults.min_p);
  if (status.ok()) status = ReadNumber(file, path, "repetition_penalty", 1e-3, 10, &defaults.repetition_penalty);
  if (!status.ok()) return status;
  if (top_k.has_value()) {
    defaults.top_k = static_cast<int32_t>(*top_k);
    if (static_cast<float>(*defaults.top_k) != *top_k) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": top_k must be a whole number, not ", *top_k));
    }
  }
  // Greedy decoding is written as a switch in these files.
  const auto do_sample = file.find("do_sample");
  if (do_sample != file.end() && do_sample->is_boolean() && !do_sample->get<bool>()) defaults.temperature = 0.0f;
  if (status = ReadEosIds(file, path, &defaults.eos_token_ids); !status.ok()) return status;
  WarnOfUnfollowed(file, path);
  return defaults;
}

}  // namespace k3
