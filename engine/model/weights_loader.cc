#include "engine/model/weights_loader.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "engine/model/random_weights.h"
#include "engine/model/tensor_match.h"
#include "kernels/core/bfloat16.h"
#include "kernels/core/check.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

using Role = TensorRole;

constexpr uint8_t kNanScale = 255;  // the reserved E8M0 code
constexpr int32_t kModelPart = -1;  // part number of the tensors outside the layers

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

// Parts of the tensors of one layer, by role, as this rank needs them.
using Parts = std::array<HostTensor, static_cast<size_t>(Role::kCount)>;

// Builds one part (layer or model) of the weights. One object per part and thread.
class PartBuilder {
 public:
  PartBuilder(const TensorMatch* match, Ops& ops, const LoadOptions& options, LoadedModel& model)
      : match_(match),
        config_(model.config),
        checkpoint_(model.checkpoint.get()),
        ops_(ops),
        options_(options),
        model_(model) {}

  absl::Status Layer(int32_t layer) {
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

  void Model() {
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

  size_t bytes() const { return bytes_; }

 private:
  const HostTensor& Part(Role role) const { return parts_[static_cast<size_t>(role)]; }
  bool Has(Role role) const { return !Part(role).shape.empty(); }
  const TensorSpec* Spec(Role role) const {
    for (const TensorSpec& spec : specs_) {
      if (spec.role == role) return &spec;
    }
    return nullptr;
  }

  // Every tensor of the part that is a matrix, as a whole or as this rank's share.
  void FetchMatrices() {
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

  HostTensor RandomMatrix(const TensorSpec& spec) const {
    HostTensor tensor;
    tensor.dtype = DType::kBF16;
    tensor.shape = spec.shape;
    tensor.name = spec.name;
    tensor.random_stddev = RandomStddev(spec);
    const bool whole = spec.shard == TensorShard::kReplicated || spec.shard == TensorShard::kExperts;
    tensor.random_seed = RandomSeed(*options_.random_seed, spec.name, whole ? 0 : options_.tensor_parallel_rank);
    return tensor;
  }

  void Cut(TensorShard shard, HostTensor& tensor) const {
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

  uint8_t* NewBuffer(size_t bytes) {
    buffers_.push_back(std::make_unique_for_overwrite<uint8_t[]>(bytes));
    return buffers_.back().get();
  }

  void Materialise(HostTensor& tensor) {
    auto* out = reinterpret_cast<uint16_t*>(NewBuffer(tensor.bytes()));
    WriteRandomBf16(tensor, out);
    tensor.data = out;
  }

  // Old writers did not pad the header, so data may lie at odd addresses.
  HostTensor Aligned(HostTensor tensor) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % SizeOf(tensor.dtype) == 0) return tensor;
    uint8_t* copy = NewBuffer(tensor.bytes());
    std::memcpy(copy, tensor.data, tensor.bytes());
    tensor.data = copy;
    return tensor;
  }

  // The values of a small tensor, this rank's share of them; empty when the model or the checkpoint has none.
  std::vector<float> Values(Role role) const {
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

  const float* Upload(const std::vector<float>& values) {
    if (values.empty()) return nullptr;
    bytes_ += values.size() * sizeof(float);
    return ops_.MakeVector(values);
  }
  const float* Vector(Role role) { return Upload(Values(role)); }

  // Key-norm weight times pseudo-query (spec 3.2), folded in fp32 as the formula does.
  const float* MixQuery(Role norm_role, Role query_role) {
    std::vector<float> norm = Values(norm_role);
    const std::vector<float> query = Values(query_role);
    if (norm.empty() || query.empty()) return nullptr;
    for (size_t i = 0; i < norm.size(); ++i) norm[i] *= query[i];
    return Upload(norm);
  }

  std::unique_ptr<LinearWeight> Linear(std::initializer_list<Role> roles) {
    std::vector<HostTensor> rows;
    for (Role role : roles) {
      if (Has(role)) rows.push_back(Part(role));
    }
    if (rows.empty()) return nullptr;
    std::unique_ptr<LinearWeight> weight = ops_.MakeLinear(rows);
    bytes_ += weight->bytes;
    return weight;
  }

  std::unique_ptr<KdaWeights> Kda() {
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

  std::unique_ptr<MlaWeights> Mla() {
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

  MlpWeights Mlp(Role gate, Role up, Role down) {
    MlpWeights out;
    out.gate_up = Linear({gate, up});
    out.down = Linear({down});
    return out;
  }

  std::unique_ptr<MoeWeights> Moe() {
    auto out = std::make_unique<MoeWeights>();
    out->router = Linear({Role::kRouter});
    out->router_bias = Vector(Role::kRouterBias);
    out->latent_down = Linear({Role::kLatentDown});
    out->latent_norm = Vector(Role::kLatentNorm);
    out->latent_up = Linear({Role::kLatentUp});
    out->shared = Mlp(Role::kSharedGate, Role::kSharedUp, Role::kSharedDown);
    return out;
  }

  absl::Status Experts(int32_t layer, MoeWeights& out) {
    const ExpertRange range = ExpertsOfRank(config_.num_experts, options_.expert_rank, options_.expert_ranks);
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
    out.experts = ops_.MakeExperts(range.first, experts);
    bytes_ += out.experts->bytes;
    return absl::OkStatus();
  }

  HostTensor FetchPlainExpert(const TensorSpec& spec) {
    if (checkpoint_ != nullptr) return Aligned(checkpoint_->View(*checkpoint_->Find(spec.name)));
    HostTensor weight = RandomMatrix(spec);
    if (ops_.is_cpu()) Materialise(weight);
    return weight;
  }

  absl::Status FetchPacked(const TensorSpec& spec, HostTensor& weight, HostTensor& scale) {
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

  static absl::Status CheckScales(const HostTensor& scale, const std::string& file) {
    const void* found = std::memchr(scale.data, kNanScale, scale.bytes());
    if (found == nullptr) return absl::OkStatus();
    const int64_t index = static_cast<const uint8_t*>(found) - static_cast<const uint8_t*>(scale.data);
    return absl::DataLossError(absl::StrCat(file, ": tensor '", scale.name, "': the scale of row ",
                                            index / scale.shape[1], ", block ", index % scale.shape[1],
                                            " is 255 (NaN), expected 0 to 254"));
  }

  void WarnIfHeadDiffers(const HostTensor& embedding, const HostTensor& head) const {
    bool equal = true;
    if (embedding.dtype == head.dtype) {
      equal = std::memcmp(embedding.data, head.data, head.bytes()) == 0;
    } else {
      for (int64_t i = 0; equal && i < head.elements(); ++i) equal = ElementAt(embedding, i) == ElementAt(head, i);
    }
    if (equal) return;
    spdlog::warn("tie_word_embeddings is true, but '{}' is there and differs from the embedding: using it", head.name);
  }

  const TensorMatch* match_;  // null with random weights
  const ModelConfig& config_;
  const Checkpoint* checkpoint_;
  Ops& ops_;
  const LoadOptions& options_;
  LoadedModel& model_;
  std::vector<TensorSpec> specs_;
  Parts parts_;
  std::vector<std::unique_ptr<uint8_t[]>> buffers_;  // freed with this object, after the backend has copied
  size_t bytes_ = 0;
};

// One piece of work and where its bytes lie.
struct LoadPart {
  int32_t layer = kModelPart;
  std::vector<FileRange> ranges;
  uint64_t bytes = 0;
};

// In file order, so that a disk is read forwards.
std::vector<LoadPart> PartsInFileOrder(const TensorMatch* match, int32_t layers) {
  std::vector<LoadPart> parts(static_cast<size_t>(layers) + 1);
  for (int32_t layer = 0; layer < layers; ++layer) parts[layer + 1].layer = layer;
  if (match == nullptr) return parts;
  for (LoadPart& part : parts) {
    part.ranges = part.layer == kModelPart ? match->model_ranges : match->layer_ranges[part.layer];
    for (const FileRange& range : part.ranges) part.bytes += range.end - range.begin;
  }
  std::stable_sort(parts.begin(), parts.end(), [](const LoadPart& a, const LoadPart& b) {
    const FileRange& x = a.ranges.front();
    const FileRange& y = b.ranges.front();
    return x.shard != y.shard ? x.shard < y.shard : x.begin < y.begin;
  });
  return parts;
}

// Builds all parts, on one or several threads; the first failure ends it.
class LoadRun {
 public:
  LoadRun(const TensorMatch* match, Ops& ops, const LoadOptions& options, LoadedModel& model)
      : match_(match),
        ops_(ops),
        options_(options),
        model_(model),
        parts_(PartsInFileOrder(match, model.config.num_hidden_layers)) {
    for (const LoadPart& part : parts_) progress_.bytes_total += part.bytes;
  }

  absl::Status Run() {
    if (options_.threads <= 1) {
      Work();
    } else {
      std::vector<std::thread> threads;
      for (int i = 0; i < options_.threads; ++i) threads.emplace_back([this] { Work(); });
      for (std::thread& thread : threads) thread.join();
    }
    if (exception_ != nullptr) std::rethrow_exception(exception_);
    if (!status_.ok()) return status_;
    if (match_ == nullptr) {
      spdlog::info("made {:.3f} GB of random weights", static_cast<double>(model_.weights.bytes) / 1e9);
    } else if (options_.print_progress) {
      printer_.Finish(progress_);
    }
    return absl::OkStatus();
  }

 private:
  void Work() {
    while (!failed_) {
      const size_t index = next_++;
      if (index >= parts_.size()) return;
      if (index == 0) Advise(parts_[0], &MappedFile::Prefetch);
      if (index + 1 < parts_.size()) Advise(parts_[index + 1], &MappedFile::Prefetch);
      try {
        Build(parts_[index]);
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (exception_ == nullptr) exception_ = std::current_exception();
        failed_ = true;
      }
    }
  }

  void Build(const LoadPart& part) {
    PartBuilder builder(match_, ops_, options_, model_);
    absl::Status status;
    if (part.layer == kModelPart) {
      builder.Model();
    } else {
      status = builder.Layer(part.layer);
    }
    // The embedding table may be used in place; everything else has been copied. Should a backend point into the file
    // after all, the bytes are still there, only to be read again.
    if (part.layer != kModelPart) Advise(part, &MappedFile::Release);
    std::lock_guard lock(mutex_);
    if (!status.ok()) {
      if (status_.ok()) status_ = status;
      failed_ = true;
      return;
    }
    model_.weights.bytes += builder.bytes();
    progress_.bytes_done += part.bytes;
    progress_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (options_.progress) options_.progress(progress_);
    if (options_.print_progress) printer_.Update(progress_);
  }

  void Advise(const LoadPart& part, void (MappedFile::*advise)(uint64_t, uint64_t) const) const {
    for (const FileRange& range : part.ranges) {
      (model_.checkpoint->shard_file(range.shard).*advise)(range.begin, range.end);
    }
  }

  const TensorMatch* match_;
  Ops& ops_;
  const LoadOptions& options_;
  LoadedModel& model_;
  const std::vector<LoadPart> parts_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // guards everything below and model_'s totals
  LoadProgress progress_;
  LoadProgressPrinter printer_;
  absl::Status status_;
  std::exception_ptr exception_;
};

}  // namespace

ExpertRange ExpertsOfRank(int32_t experts, int32_t rank, int32_t ranks) {
  const auto begin = [&](int64_t r) { return static_cast<int32_t>(experts * r / ranks); };
  return {begin(rank), begin(rank + 1) - begin(rank)};
}

absl::Status CheckTensorParallel(const ModelConfig& config, int32_t size) {
  if (size == 1) return absl::OkStatus();
  const auto check = [&](const char* field, int64_t value) {
    if (value % size == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("tensor-parallel-size ", size, " does not divide ", field, " (", value, ")"));
  };
  const std::pair<const char*, int64_t> fields[] = {
      {"num_attention_heads", config.num_attention_heads},
      {"linear_attn_config.num_heads", config.kda_heads},
      {"intermediate_size", config.intermediate_size},
      {"the shared experts' width", config.shared_intermediate_size()},
      {"vocab_size", config.vocab_size},
  };
  for (const auto& [field, value] : fields) {
    if (absl::Status status = check(field, value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWeights(const std::string& dir, const ModelConfig& config, Ops& ops,
                                                         const LoadOptions& options) {
  if (absl::Status status = CheckTensorParallel(config, options.tensor_parallel_size); !status.ok()) return status;
  auto model = std::make_unique<LoadedModel>();
  model->config = config;
  model->weights.layers.resize(config.num_hidden_layers);
  std::optional<TensorMatch> match;
  if (!options.random_seed) {
    auto checkpoint = Checkpoint::Open(dir);
    if (!checkpoint.ok()) return checkpoint.status();
    model->checkpoint = *std::move(checkpoint);
    auto matched = MatchTensors(*model->checkpoint, config);
    if (!matched.ok()) return matched.status();
    match = *std::move(matched);
  }
  LoadRun run(match ? &*match : nullptr, ops, options, *model);
  if (absl::Status status = run.Run(); !status.ok()) return status;
  return model;
}

}  // namespace k3
