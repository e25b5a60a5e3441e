#include "server/served_model.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

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

}  // namespace

absl::StatusOr<SamplingDefaults> LoadSamplingDefaults(const std::string& dir) {
  SamplingDefaults defaults;
  const std::string path = absl::StrCat(dir, "/generation_config.json");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return defaults;
  const nlohmann::json file = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError(absl::StrCat(path, ": is not a JSON object"));
  std::optional<float> top_k;
  absl::Status status = ReadNumber(file, path, "temperature", 0, 100, &defaults.temperature);
  if (status.ok()) status = ReadNumber(file, path, "top_p", 1e-6, 1, &defaults.top_p);
  if (status.ok()) status = ReadNumber(file, path, "top_k", 0, 1e6, &top_k);
  if (status.ok()) status = ReadNumber(file, path, "min_p", 0, 0.999999, &defaults.min_p);
  if (status.ok()) status = ReadNumber(file, path, "repetition_penalty", 1e-3, 10, &defaults.repetition_penalty);
  if (!status.ok()) return status;
  if (top_k.has_value()) defaults.top_k = static_cast<int32_t>(*top_k);
  // Greedy decoding is written as a switch in these files.
  const auto do_sample = file.find("do_sample");
  if (do_sample != file.end() && do_sample->is_boolean() && !do_sample->get<bool>()) defaults.temperature = 0.0f;
  const nlohmann::json eos = file.value("eos_token_id", nlohmann::json());
  for (const nlohmann::json& id : eos.is_array()  ? eos
                                  : eos.is_null() ? nlohmann::json::array()
                                                  : nlohmann::json::array({eos})) {
    if (!id.is_number_integer())
      return absl::InvalidArgumentError(absl::StrCat(path, ": eos_token_id must hold integers"));
    defaults.eos_token_ids.push_back(id.get<int32_t>());
  }
  return defaults;
}

}  // namespace k3
