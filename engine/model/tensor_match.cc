#include "engine/model/tensor_match.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/model/name_list.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

using Location = Checkpoint::Location;
using Shape = std::span<const int64_t>;

constexpr char kAnyFloat[] = "BF16, F16 or F32";

bool IsFloat(std::optional<DType> type) { return type == DType::kBF16 || type == DType::kF16 || type == DType::kF32; }

bool SameShape(Shape actual, const std::vector<int64_t>& expected) {
  return std::equal(actual.begin(), actual.end(), expected.begin(), expected.end());
}

bool IsVectorOf(Shape actual, int64_t size) {
  int64_t count = 1, wide = 0;
  for (int64_t dim : actual) {
    if (dim < 1 || dim > size) return false;
    count *= dim;
    wide += dim != 1;
  }
  return !actual.empty() && wide <= 1 && count == size;
}

bool ShapeFits(const TensorSpec& spec, Shape actual) {
  switch (spec.form) {
    case TensorForm::kMatrix:
    case TensorForm::kExpert:
      return SameShape(actual, spec.shape);
    case TensorForm::kVector:
      return IsVectorOf(actual, spec.elements());
    case TensorForm::kALog:
      return IsVectorOf(actual, spec.elements()) || (actual.size() == 1 && actual[0] > spec.elements());
    case TensorForm::kConvTaps:
      return SameShape(actual, spec.shape) || SameShape(actual, {spec.shape[0], 1, spec.shape[1]});
  }
  return false;
}

std::string Bracketed(Shape shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

std::string ExpectedShape(const TensorSpec& spec) {
  const int64_t n = spec.elements();
  switch (spec.form) {
    case TensorForm::kALog:
      return absl::StrCat("[", n, "], longer, or [1, 1, ", n, ", 1]");
    case TensorForm::kConvTaps:
      return absl::StrCat("[", spec.shape[0], ", 1, ", spec.shape[1], "] or ", Bracketed(spec.shape));
    default:
      return Bracketed(spec.shape);
  }
}

class Matcher {
 public:
  Matcher(const Checkpoint& checkpoint, const ModelConfig& config) : checkpoint_(checkpoint), config_(config) {
    used_.resize(checkpoint.num_shards());
    for (size_t s = 0; s < used_.size(); ++s) used_[s].resize(checkpoint.shard_header(s).tensors.size());
  }

  absl::StatusOr<TensorMatch> Run() {
    match_.mxfp4_experts.resize(config_.num_hidden_layers);
    match_.layer_ranges.resize(config_.num_hidden_layers);
    ranges_ = &match_.model_ranges;
    for (const TensorSpec& spec : ModelTensors(config_)) {
      const bool found = MatchPlain(spec);
      if (spec.role == TensorRole::kLmHead) match_.separate_head = found;
    }
    for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      ranges_ = &match_.layer_ranges[layer];
      for (const TensorSpec& spec : LayerTensors(config_, layer)) MatchPlain(spec);
      if (!config_.IsMoe(layer)) continue;
      layer_form_known_ = false;
      for (int32_t expert = 0; expert < config_.num_experts; ++expert) {
        for (const TensorSpec& spec : ExpertTensors(config_, layer, expert)) MatchExpert(spec, layer);
      }
    }
    if (!missing_.empty()) {
      return absl::DataLossError(absl::StrCat(Where(), ": ", missing_.count(),
                                              " tensors that the model needs are missing: ", missing_.ToString(),
                                              PrefixHint()));
    }
    if (!wrong_.empty()) return absl::DataLossError(wrong_.ToString());
    if (absl::Status status = CheckUnused(); !status.ok()) return status;
    return std::move(match_);
  }

 private:
  std::string Where() const {
    return checkpoint_.num_shards() == 1
               ? checkpoint_.shard_file(0).path()
               : absl::StrCat(checkpoint_.num_shards(), " files like ", checkpoint_.shard_file(0).path());
  }

  // The commonest reason for "everything is missing".
  std::string PrefixHint() const {
    if (config_.tensor_prefix.empty()) return "";
    const std::string name = "model.embed_tokens.weight";
    if (checkpoint_.Find(config_.tensor_prefix + name) || !checkpoint_.Find(name)) return "";
    return absl::StrCat(" (the files lack the prefix '", config_.tensor_prefix, "' that ", config_.model_type,
                        " names have)");
  }

  void Use(Location at) {
    used_[at.shard][at.index] = true;
    const StoredTensor& stored = checkpoint_.Stored(at);
    match_.bytes += stored.end - stored.begin;
    for (FileRange& range : *ranges_) {
      if (range.shard != at.shard) continue;
      range.begin = std::min(range.begin, stored.begin);
      range.end = std::max(range.end, stored.end);
      return;
    }
    ranges_->push_back({at.shard, stored.begin, stored.end});
  }

  void Wrong(Location at, const std::string& expected) {
    wrong_.Add(absl::StrCat(checkpoint_.File(at).path(), ": tensor '", EscapeName(checkpoint_.Name(at)), "': expected ",
                            expected, ", found ", DescribeStored(checkpoint_, at)));
  }

  bool MatchPlain(const TensorSpec& spec) {
    const std::optional<Location> at = checkpoint_.Find(spec.name);
    if (!at) {
      if (const auto packed = checkpoint_.Find(spec.name + "_packed")) {
        Wrong(*packed, absl::StrCat("a plain tensor '", spec.name, "' (only routed experts may be packed)"));
      } else if (spec.required) {
        missing_.Add(absl::StrCat("'", spec.name, "'"));
      }
      return false;
    }
    Use(*at);
    if (!IsFloat(checkpoint_.Type(*at)) || !ShapeFits(spec, checkpoint_.Shape(*at))) {
      Wrong(*at, absl::StrCat(kAnyFloat, " ", ExpectedShape(spec)));
    }
    return true;
  }

  void MatchExpert(const TensorSpec& spec, int32_t layer) {
    const std::string packed_name = spec.name + "_packed", scale_name = spec.name + "_scale";
    const std::optional<Location> plain = checkpoint_.Find(spec.name);
    const std::optional<Location> packed = checkpoint_.Find(packed_name);
    const std::optional<Location> scale = checkpoint_.Find(scale_name);
    if (plain && (packed || scale)) {
      Wrong(*plain, absl::StrCat("either this tensor or '", packed_name, "' and '", scale_name, "'"));
      return;
    }
    if (!plain && !packed && !scale) {
      missing_.Add(absl::StrCat("'", config_.mxfp4_experts ? packed_name : spec.name, "'"));
      return;
    }
    if (!layer_form_known_) {
      match_.mxfp4_experts[layer] = !plain;
      layer_form_known_ = true;
    } else if (match_.mxfp4_experts[layer] != !plain) {
      Wrong(plain ? *plain : packed ? *packed : *scale, "all experts of a layer plain or all packed");
      return;
    }
    if (plain) {
      MatchPlain(spec);
      return;
    }
    const int64_t rows = spec.shape[0], cols = spec.shape[1];
    MatchBytes(packed, packed_name, {rows, cols / 2});
    MatchBytes(scale, scale_name, {rows, cols / kMxfp4BlockSize});
    if (packed && cols % kMxfp4BlockSize != 0) {
      Wrong(*packed, absl::StrCat("rows of a multiple of ", kMxfp4BlockSize, " weights (the model has ", cols, ")"));
    }
  }

  void MatchBytes(std::optional<Location> at, const std::string& name, const std::vector<int64_t>& shape) {
    if (!at) {
      missing_.Add(absl::StrCat("'", name, "'"));
      return;
    }
    Use(*at);
    if (checkpoint_.Type(*at) != DType::kU8 || !SameShape(checkpoint_.Shape(*at), shape)) {
      Wrong(*at, absl::StrCat("U8 ", Bracketed(shape)));
    }
  }

  // A weight of a layer that the model has, for which the configuration knows no use: the files are of a model that
  // computes something else. Buffers such as inv_freq, layers beyond the last (drafts) and other parts are passed over.
  bool IsWeightOfTheModel(std::string_view name) const {
    if (!name.starts_with(config_.tensor_prefix)) return false;
    name.remove_prefix(config_.tensor_prefix.size());
    const auto ends_like_a_weight = [&] {
      for (const char* end : {".weight", ".bias", "_bias", "_packed", "_scale", ".A_log"}) {
        if (name.ends_with(end)) return true;
      }
      return false;
    };
    if (!ends_like_a_weight()) return false;
    constexpr std::string_view kLayers = "model.layers.";
    if (!name.starts_with(kLayers)) {
      return name.starts_with("lm_head.") || (name.starts_with("model.") && name.find('.', 6) == name.rfind('.'));
    }
    name.remove_prefix(kLayers.size());
    name = name.substr(0, name.find('.'));
    int32_t layer = 0;
    return absl::SimpleAtoi(absl::string_view(name.data(), name.size()), &layer) && layer >= 0 &&
           layer < config_.num_hidden_layers;
  }

  absl::Status CheckUnused() {
    NameList useless, unknown;
    size_t vision = 0;
    for (uint32_t s = 0; s < used_.size(); ++s) {
      for (uint32_t i = 0; i < used_[s].size(); ++i) {
        if (used_[s][i]) continue;
        const std::string_view name = checkpoint_.Name({s, i});
        if (name.starts_with("vision_tower.") || name.starts_with("mm_projector.")) {
          ++vision;
          match_.vision_bytes += checkpoint_.Bytes({s, i});
        } else {
          (IsWeightOfTheModel(name) ? useless : unknown).Add(absl::StrCat("'", EscapeName(name), "'"));
        }
      }
    }
    if (!useless.empty()) {
      return absl::DataLossError(absl::StrCat(Where(), ": ", useless.count(),
                                              " tensors that the model of config.json has no use for (does it lack a "
                                              "field, or is it another model's?): ",
                                              useless.ToString()));
    }
    if (vision > 0)
      spdlog::info("skipping {} vision tensors ({} bytes): only text is served", vision, match_.vision_bytes);
    if (!unknown.empty()) {
      spdlog::warn("{}: ignoring {} tensors that this model does not use: {}", Where(), unknown.count(),
                   unknown.ToString());
    }
    return absl::OkStatus();
  }

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  std::vector<std::vector<bool>> used_;
  TensorMatch match_;
  std::vector<FileRange>* ranges_ = nullptr;
  bool layer_form_known_ = false;
  NameList missing_;
  NameList wrong_;
};

}  // namespace

std::string DescribeStored(const Checkpoint& checkpoint, Checkpoint::Location at) {
  return absl::StrCat(SafetensorsHeader::TypeName(checkpoint.Stored(at)), " ", Bracketed(checkpoint.Shape(at)));
}

absl::StatusOr<TensorMatch> MatchTensors(const Checkpoint& checkpoint, const ModelConfig& config) {
  return Matcher(checkpoint, config).Run();
}

}  // namespace k3
