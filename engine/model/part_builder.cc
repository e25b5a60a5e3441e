#include "engine/model/part_builder.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "engine/model/random_weights.h"
#include "kernels/core/bfloat16.h"
#include "kernels/core/check.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

using Role = TensorRole;

constexpr uint8_t kNanScale = 255;  // the reserved E8M0 code

float ElementAt(const HostTensor& tensor, int64_t index) {
  switch (tensor.dtype) {
    case DType::kF32: {
      float value;
      std::memcpy(&value, static_cast<const char*>(tensor.data) + index * 4, 4);
      return value;
    }
    case DType::kBF16:
    case DType::kF16: {
      uint16_t bits;
      std::memcpy(&bits, static_cast<const char*>(tensor.data) + index * 2, 2);
      return tensor.dtype == DType::kBF16 ? Bf16ToFloat(bits) : F16ToFloat(bits);
    }
    default:
      break;
  }
  K3_CHECK(false && "not a float type");
  return 0;
}

}  // namespace

absl::Status PartBuilder::Layer(int32_t layer) {
  specs_ = LayerTensors(config_, layer);
  FetchMatrices();
  LayerWeights& out = model_.weights.layers[layer];
  out.input_norm = Vector(Role::kInputNorm);
  out.post_attention_norm = Vector(Role::kPostAttentionNorm);
  out.attention_mix_query = MixQuery(Role::kAttentionMixNorm, Role::kAttentionMixProj);
  out.mlp_mix_query = MixQuery(Role::kMlpMixNorm, Role::kMlpMixProj);
  if (config_.layers[layer] == LayerKind::kKda) {
    out.kda = Kda();
  } else {
    out.mla = Mla();
  }
  if (!config_.IsMoe(layer)) {
    out.mlp = std::make_unique<MlpWeights>(Mlp(Role::kMlpGate, Role::kMlpUp, Role::kMlpDown));
    return absl::OkStatus();
  }
  out.moe = Moe();
  return Experts(layer, *out.moe);
}

void PartBuilder::Model() {
  specs_ = ModelTensors(config_);
  FetchMatrices();
  Weights& out = model_.weights;
  const HostTensor& embedding = Part(Role::kEmbedding);
  out.embedding = ops_.MakeTable(embedding);
  bytes_ += embedding.bytes();
  const HostTensor& head = Part(Role::kLmHead);
  if (Has(Role::kLmHead)) {
    if (config_.tie_word_embeddings) WarnIfHeadDiffers(embedding, head);
    out.lm_head = Linear({Role::kLmHead});
  } else {
    out.lm_head = Linear({Role::kEmbedding});
  }
  out.final_norm = Vector(Role::kFinalNorm);
  out.output_mix_query = MixQuery(Role::kOutputMixNorm, Role::kOutputMixProj);
  if (!ops_.is_cpu()) return;
  // The table may point into its buffer for as long as the model lives.
  std::move(buffers_.begin(), buffers_.end(), std::back_inserter(model_.host_memory));
  buffers_.clear();
}

const HostTensor& PartBuilder::Part(Role role) const { return parts_[static_cast<size_t>(role)]; }

bool PartBuilder::Has(Role role) const { return !Part(role).shape.empty(); }

const TensorSpec* PartBuilder::Spec(Role role) const {
  for (const TensorSpec& spec : specs_) {
    if (spec.role == role) return &spec;
  }
  return nullptr;
}

void PartBuilder::FetchMatrices() {
  for (const TensorSpec& spec : specs_) {
    if (spec.form != TensorForm::kMatrix) continue;
    HostTensor tensor;
    if (checkpoint_ != nullptr) {
      const auto at = checkpoint_->Find(spec.name);
      if (!at) continue;  // optional: a tied head
      tensor = Aligned(checkpoint_->View(*at));
    } else {
      if (spec.role == Role::kLmHead && config_.tie_word_embeddings) continue;
      tensor = RandomMatrix(spec);
    }
    Cut(spec.shard, tensor);
    if (tensor.data == nullptr && ops_.is_cpu()) Materialise(tensor);
    parts_[static_cast<size_t>(spec.role)] = std::move(tensor);
  }
}

HostTensor PartBuilder::RandomMatrix(const TensorSpec& spec) const {
  HostTensor tensor;
  tensor.dtype = DType::kBF16;
  tensor.shape = spec.shape;
  tensor.name = spec.name;
  tensor.random_stddev = RandomStddev(spec);
  const bool whole = spec.shard == TensorShard::kReplicated || spec.shard == TensorShard::kExperts;
  tensor.random_seed = RandomSeed(*options_.random_seed, spec.name, whole ? 0 : options_.tensor_parallel_rank);
  return tensor;
}

void PartBuilder::Cut(TensorShard shard, HostTensor& tensor) const {
  const int64_t ranks = options_.tensor_parallel_size, rank = options_.tensor_parallel_rank;
  if (ranks == 1 || (shard != TensorShard::kRows && shard != TensorShard::kColumns)) return;
  const bool rows = shard == TensorShard::kRows;
  const int64_t part = tensor.shape[rows ? 0 : 1] / ranks;
  if (tensor.data != nullptr) {
    const int64_t first = rank * part * (rows && tensor.shape.size() > 1 ? tensor.shape[1] : 1);
    tensor.data = static_cast<const char*>(tensor.data) + first * static_cast<int64_t>(SizeOf(tensor.dtype));
    if (!rows) tensor.row_stride = tensor.shape[1];
  }
  tensor.shape[rows ? 0 : 1] = part;
}

uint8_t* PartBuilder::NewBuffer(size_t bytes) {
  buffers_.push_back(std::make_unique_for_overwrite<uint8_t[]>(bytes));
  return buffers_.back().get();
}

void PartBuilder::Materialise(HostTensor& tensor) {
  auto* out = reinterpret_cast<uint16_t*>(NewBuffer(tensor.bytes()));
  WriteRandomBf16(tensor, out);
  tensor.data = out;
}

HostTensor PartBuilder::Aligned(HostTensor tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % SizeOf(tensor.dtype) == 0) return tensor;
  uint8_t* copy = NewBuffer(tensor.bytes());
  std::memcpy(copy, tensor.data, tensor.bytes());
  tensor.data = copy;
  return tensor;
}

std::vector<float> PartBuilder::Values(Role role) const {
  const TensorSpec* spec = Spec(role);
  if (spec == nullptr) return {};
  const int64_t count = spec->elements();  // a padded A_log is longer; its head is what counts
  std::vector<float> values(static_cast<size_t>(count));
  if (checkpoint_ != nullptr) {
    const auto at = checkpoint_->Find(spec->name);
    if (!at) return {};
    const HostTensor tensor = checkpoint_->View(*at);
    for (int64_t i = 0; i < count; ++i) values[i] = ElementAt(tensor, i);
  } else {
    const uint64_t seed = RandomSeed(*options_.random_seed, spec->name, 0);
    for (int64_t i = 0; i < count; ++i) values[i] = RandomElement(*spec, seed, i);
  }
  if (spec->shard != TensorShard::kRows || options_.tensor_parallel_size == 1) return values;
  const int64_t part = count / options_.tensor_parallel_size;
  const auto begin = values.begin() + part * options_.tensor_parallel_rank;
  return std::vector<float>(begin, begin + part);
}

const float* PartBuilder::Upload(const std::vector<float>& values) {
  if (values.empty()) return nullptr;
  bytes_ += values.size() * sizeof(float);
  return ops_.MakeVector(values);
}

const float* PartBuilder::Vector(Role role) { return Upload(Values(role)); }

const float* PartBuilder::MixQuery(Role norm_role, Role query_role) {
  std::vector<float> norm = Values(norm_role);
  const std::vector<float> query = Values(query_role);
  if (norm.empty() || query.empty()) return nullptr;
  for (size_t i = 0; i < norm.size(); ++i) norm[i] *= query[i];
  return Upload(norm);
}

std::unique_ptr<LinearWeight> PartBuilder::Linear(std::initializer_list<Role> roles) {
  std::vector<HostTensor> rows;
  for (Role role : roles) {
    if (Has(role)) rows.push_back(Part(role));
  }
  if (rows.empty()) return nullptr;
  std::unique_ptr<LinearWeight> weight = ops_.MakeLinear(rows);
  bytes_ += weight->bytes;
  return weight;
}

std::unique_ptr<KdaWeights> PartBuilder::Kda() {
  auto out = std::make_unique<KdaWeights>();
  out->in_proj = Linear({Role::kQ, Role::kK, Role::kV, Role::kDecayA, Role::kBeta, Role::kGate, Role::kGateA});
  out->f_b_proj = Linear({Role::kDecayB});
  out->g_b_proj = Linear({Role::kGateB});
  out->o_proj = Linear({Role::kO});
  std::vector<float> taps = Values(Role::kQConv);
  for (Role role : {Role::kKConv, Role::kVConv}) {
    const std::vector<float> more = Values(role);
    taps.insert(taps.end(), more.begin(), more.end());
  }
  out->conv_taps = Upload(taps);
  out->dt_bias = Vector(Role::kDtBias);
  out->a_log = Vector(Role::kALog);
  out->o_norm = Vector(Role::kONorm);
  return out;
}

std::unique_ptr<MlaWeights> PartBuilder::Mla() {
  auto out = std::make_unique<MlaWeights>();
  out->in_proj = Linear({Role::kQA, Role::kQ, Role::kKvA, Role::kGate});
  out->q_a_norm = Vector(Role::kQANorm);
  out->q_b_proj = Linear({Role::kQB});
  out->kv_a_norm = Vector(Role::kKvANorm);
  out->kv_b = ops_.MakeLatentProjection(Part(Role::kKvB), config_.num_attention_heads / options_.tensor_parallel_size,
                                        config_.qk_nope_head_dim, config_.v_head_dim);
  bytes_ += out->kv_b->bytes;
  out->o_proj = Linear({Role::kO});
  return out;
}

MlpWeights PartBuilder::Mlp(Role gate, Role up, Role down) {
  MlpWeights out;
  out.gate_up = Linear({gate, up});
  out.down = Linear({down});
  return out;
}

std::unique_ptr<MoeWeights> PartBuilder::Moe() {
  auto out = std::make_unique<MoeWeights>();
  out->router = Linear({Role::kRouter});
  out->router_bias = Vector(Role::kRouterBias);
  out->latent_down = Linear({Role::kLatentDown});
  out->latent_norm = Vector(Role::kLatentNorm);
  out->latent_up = Linear({Role::kLatentUp});
  out->shared = Mlp(Role::kSharedGate, Role::kSharedUp, Role::kSharedDown);
  return out;
}

absl::Status PartBuilder::Experts(int32_t layer, MoeWeights& out) {
  const int32_t leaves = options_.expert_leaves;
  for (int32_t leaf = 0; leaf < leaves; ++leaf) {
    const ExpertRange range =
        ExpertsOfRank(config_.num_experts, options_.expert_rank * leaves + leaf, options_.expert_ranks * leaves);
    if (absl::Status status = ExpertGroup(layer, range, out); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PartBuilder::ExpertGroup(int32_t layer, const ExpertRange& range, MoeWeights& out) {
  const bool packed = match_ != nullptr ? match_->mxfp4_experts[layer] : config_.mxfp4_experts;
  std::vector<HostExpert> experts(static_cast<size_t>(range.count));
  for (int32_t i = 0; i < range.count; ++i) {
    for (const TensorSpec& spec : ExpertTensors(config_, layer, range.first + i)) {
      HostExpert& expert = experts[i];
      HostTensor& weight = spec.role == Role::kExpertW1   ? expert.w1
                           : spec.role == Role::kExpertW3 ? expert.w3
                                                          : expert.w2;
      HostTensor& scale = spec.role == Role::kExpertW1   ? expert.w1_scale
                          : spec.role == Role::kExpertW3 ? expert.w3_scale
                                                         : expert.w2_scale;
      if (!packed) {
        weight = FetchPlainExpert(spec);
      } else if (absl::Status status = FetchPacked(spec, weight, scale); !status.ok()) {
        return status;
      }
    }
  }
  out.experts.push_back(ops_.MakeExperts(range.first, experts));
  bytes_ += out.experts.back()->bytes;
  return absl::OkStatus();
}

HostTensor PartBuilder::FetchPlainExpert(const TensorSpec& spec) {
  if (checkpoint_ != nullptr) return Aligned(checkpoint_->View(*checkpoint_->Find(spec.name)));
  HostTensor weight = RandomMatrix(spec);
  if (ops_.is_cpu()) Materialise(weight);
  return weight;
}

absl::Status PartBuilder::FetchPacked(const TensorSpec& spec, HostTensor& weight, HostTensor& scale) {
  if (checkpoint_ != nullptr) {
    const Checkpoint::Location scale_at = *checkpoint_->Find(spec.name + "_scale");
    weight = checkpoint_->View(*checkpoint_->Find(spec.name + "_packed"));
    scale = checkpoint_->View(scale_at);
    return CheckScales(scale, checkpoint_->File(scale_at).path());
  }
  weight = RandomMatrix(spec);
  weight.dtype = scale.dtype = DType::kU8;
  scale.name = spec.name + "_scale";
  scale.shape = {spec.shape[0], spec.shape[1] / kMxfp4BlockSize};
  weight.name = spec.name + "_packed";
  weight.shape = {spec.shape[0], spec.shape[1] / 2};
  uint8_t* codes = NewBuffer(weight.bytes());
  uint8_t* scales = NewBuffer(scale.bytes());
  WriteRandomBytes(weight.random_seed, codes, weight.bytes());
  std::memset(scales, RandomScaleCode(weight.random_stddev), scale.bytes());
  weight.data = codes;
  scale.data = scales;
  return absl::OkStatus();
}

absl::Status PartBuilder::CheckScales(const HostTensor& scale, const std::string& file) {
  const void* found = std::memchr(scale.data, kNanScale, scale.bytes());
  if (found == nullptr) return absl::OkStatus();
  const int64_t index = static_cast<const uint8_t*>(found) - static_cast<const uint8_t*>(scale.data);
  return absl::DataLossError(absl::StrCat(file, ": tensor '", scale.name, "': the scale of row ",
                                          index / scale.shape[1], ", block ", index % scale.shape[1],
                                          " is 255 (NaN), expected 0 to 254"));
}

void PartBuilder::WarnIfHeadDiffers(const HostTensor& embedding, const HostTensor& head) const {
  bool equal = true;
  if (embedding.dtype == head.dtype) {
    equal = std::memcmp(embedding.data, head.data, head.bytes()) == 0;
  } else {
    for (int64_t i = 0; equal && i < head.elements(); ++i) equal = ElementAt(embedding, i) == ElementAt(head, i);
  }
  if (equal) return;
  spdlog::warn("tie_word_embeddings is true, but '{}' is there and differs from the embedding: using it", head.name);
}

}  // namespace k3
