#include "engine/executor.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace k3 {
namespace {

size_t Aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

// Lays arrays one behind the other in a staging buffer. First pass without memory: counts; second pass: copies and
// yields device addresses.
class InputPacker {
 public:
  InputPacker(void* host, void* device) : host_(static_cast<char*>(host)), device_(static_cast<char*>(device)) {}

  template <typename T>
  const T* Put(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    const size_t at = used_;
    used_ += Aligned(bytes);
    if (host_ == nullptr || bytes == 0) return nullptr;
    std::memcpy(host_ + at, values.data(), bytes);
    return reinterpret_cast<const T*>(device_ + at);
  }
  size_t used() const { return used_; }

 private:
  char* host_;
  char* device_;
  size_t used_ = 0;
};

struct DeviceInputs {
  SequenceBatch batch;
  const int32_t* tokens = nullptr;
  const int32_t* logits_row = nullptr;
  const SampleRow* sample_rows = nullptr;
  const LogitEdit* logit_edits = nullptr;
  const uint32_t* allowed_mask = nullptr;
};

DeviceInputs Pack(const RankPlan& plan, const std::vector<int32_t>& snapshot_rows,
                  const std::vector<int32_t>& snapshot_slots, InputPacker& packer) {
  DeviceInputs in;
  in.tokens = packer.Put(plan.tokens);
  in.batch.num_tokens = plan.num_tokens();
  in.batch.num_sequences = plan.num_sequences();
  in.batch.token_begin = packer.Put(plan.token_begin);
  in.batch.context = packer.Put(plan.context);
  in.batch.state_slot = packer.Put(plan.state_slot);
  in.batch.page_table = packer.Put(plan.page_table);
  in.batch.page_table_stride = plan.page_table_stride;
  in.batch.sequence_of_token = packer.Put(plan.sequence_of_token);
  in.batch.position = packer.Put(plan.position);
  in.batch.num_snapshots = static_cast<int32_t>(plan.snapshots.size());
  in.batch.snapshot_row = packer.Put(snapshot_rows);
  in.batch.snapshot_slot = packer.Put(snapshot_slots);
  in.batch.host_token_begin = plan.token_begin.data();
  in.batch.host_context = plan.context.data();
  in.logits_row = packer.Put(plan.logits_row);
  in.sample_rows = packer.Put(plan.sample_rows);
  in.logit_edits = packer.Put(plan.logit_edits);
  in.allowed_mask = packer.Put(plan.allowed_mask);
  return in;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(const Model& model, Ops& ops, const StepBounds& bounds,
                                                           const CacheGeometry& geometry) {
  try {
    return std::unique_ptr<Executor>(new Executor(model, ops, bounds, geometry));
  } catch (const DeviceError& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for workspace (", Workspace::Bytes(model.config(), bounds, ops), " bytes), ", geometry.pages,
        " latent pages (", CacheStorage::PageBytes(model.config(), geometry), " bytes each) and ", geometry.slots,
        " state slots (", CacheStorage::SlotBytes(model.config(), geometry), " bytes each): ", error.what()));
  }
}

Executor::Executor(const Model& model, Ops& ops, const StepBounds& bounds, const CacheGeometry& geometry)
    : model_(model), ops_(ops), workspace_(model.config(), bounds, ops), cache_(model.config(), geometry, ops) {
  const int64_t pages_per_sequence = (bounds.context + geometry.page_size - 1) / geometry.page_size;
  Reserve(input_, static_cast<size_t>(bounds.tokens * 12 + bounds.sequences * (pages_per_sequence * 4 + 256)) + 65536);
  Reserve(output_, static_cast<size_t>(bounds.logits_rows) * 16 + 4096);
}

Executor::~Executor() {
  for (Staging* staging : {&input_, &output_}) {
    if (staging->host != nullptr) ops_.FreeHost(staging->host);
    if (staging->device != nullptr) ops_.Free(staging->device);
  }
}

void Executor::Reserve(Staging& staging, size_t bytes) {
  if (bytes <= staging.capacity) return;
  const size_t capacity = std::max(bytes, staging.capacity * 2);
  ops_.Synchronize(ops_.stream());
  if (staging.host != nullptr) ops_.FreeHost(staging.host);
  if (staging.device != nullptr) ops_.Free(staging.device);
  staging = {};
  staging.host = ops_.AllocateHost(capacity);
  staging.device = ops_.Allocate(capacity);
  staging.capacity = capacity;
}

absl::Status Executor::Run(const StepPlan& plan, StepResult* result) {
  K3_CHECK(plan.ranks.size() == 1);
  result->ranks.resize(1);
  try {
    RunRank(plan.ranks[0], &result->ranks[0]);
  } catch (const DeviceError& error) {
    return absl::InternalError(error.what());
  }
  return absl::OkStatus();
}

void Executor::RunRank(const RankPlan& plan, RankResult* result) {
  const Stream stream = ops_.stream();
  for (StateSlot slot : plan.zero_slots) cache_.ZeroSlot(slot);
  for (const StateCopy& copy : plan.state_copies) cache_.CopySlot(copy.from, copy.to);
  for (const PageCopy& copy : plan.page_copies) cache_.CopyPage(copy.from, copy.to);

  const size_t rows = plan.logits_row.size();
  const size_t top = static_cast<size_t>(plan.max_top_logprobs);
  result->token.resize(rows);
  result->status.resize(rows);
  result->logprob.resize(rows);
  result->top_ids.resize(rows * top);
  result->top_logprobs.resize(rows * top);
  if (plan.tokens.empty()) {
    ops_.Synchronize(stream);
    return;
  }

  std::vector<int32_t> snapshot_rows, snapshot_slots;
  for (const SnapshotPoint& point : plan.snapshots) {
    snapshot_rows.push_back(point.row);
    snapshot_slots.push_back(point.slot.value);
  }
  InputPacker measure(nullptr, nullptr);
  Pack(plan, snapshot_rows, snapshot_slots, measure);
  Reserve(input_, measure.used());
  InputPacker packer(input_.host, input_.device);
  const DeviceInputs in = Pack(plan, snapshot_rows, snapshot_slots, packer);
  ops_.CopyToDevice(input_.device, input_.host, packer.used(), stream);

  const MatrixView hidden = model_.Forward(in.batch, in.tokens, workspace_, cache_);
  if (rows == 0) {
    ops_.Synchronize(stream);
    return;
  }

  // Outputs one array behind the other: token, status, logprob, top ids, top log-probabilities.
  Reserve(output_, rows * (12 + 8 * top));
  char* out = static_cast<char*>(output_.device);
  auto* token = reinterpret_cast<int32_t*>(out);
  auto* status = reinterpret_cast<int32_t*>(out + rows * 4);
  auto* logprob = reinterpret_cast<float*>(out + rows * 8);
  auto* top_ids = reinterpret_cast<int32_t*>(out + rows * 12);
  auto* top_logprobs = reinterpret_cast<float*>(out + rows * (12 + 4 * top));
  const size_t pass = static_cast<size_t>(workspace_.bounds().logits_rows);
  for (size_t begin = 0; begin < rows; begin += pass) {
    const size_t count = std::min(pass, rows - begin);
    SampleParams sample;
    sample.logits = model_.Logits(hidden, in.logits_row + begin, static_cast<int64_t>(count), workspace_);
    sample.rows = in.sample_rows + begin;
    sample.edits = in.logit_edits;
    sample.allowed_mask = in.allowed_mask;
    sample.max_top_logprobs = plan.max_top_logprobs;
    sample.token = token + begin;
    sample.status = status + begin;
    sample.logprob = logprob + begin;
    sample.top_ids = top_ids + begin * top;
    sample.top_logprobs = top_logprobs + begin * top;
    sample.scratch = workspace_.scratch;
    ops_.Sample(sample, stream);
  }

  ops_.CopyToHost(output_.host, output_.device, rows * (12 + 8 * top), stream);
  ops_.Synchronize(stream);
  const char* host = static_cast<const char*>(output_.host);
  std::memcpy(result->token.data(), host, rows * 4);
  std::memcpy(result->status.data(), host + rows * 4, rows * 4);
  std::memcpy(result->logprob.data(), host + rows * 8, rows * 4);
  if (top > 0) {
    std::memcpy(result->top_ids.data(), host + rows * 12, rows * top * 4);
    std::memcpy(result->top_logprobs.data(), host + rows * (12 + 4 * top), rows * top * 4);
  }
}

void Executor::Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) {
  K3_CHECK(rank == 0);
  K3_CHECK(rank == 0);
  for (PageId page : pages) cache_.FillPage(page, 0);
  for (StateSlot slot : slots) cache_.ZeroSlot(slot);
  ops_.Synchronize(ops_.stream());
}

}  // namespace k3
