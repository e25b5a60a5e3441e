#include "engine/model/sequence_runner.h"

#include <algorithm>
#include <numeric>

#include "kernels/core/check.h"

namespace k3 {
namespace {

StepBounds Bounds(int64_t max_context, int64_t max_chunk) {
  return {.tokens = max_chunk, .sequences = 1, .logits_rows = std::min<int64_t>(max_chunk, 64), .context = max_context};
}

CacheGeometry Geometry(const Ops& ops, int64_t max_context, int32_t page_size) {
  CacheGeometry geometry;
  geometry.pages = static_cast<int32_t>((max_context + page_size - 1) / page_size);
  geometry.page_size = page_size;
  geometry.page_dtype = ops.activation_dtype();
  geometry.slots = 1;
  geometry.conv_dtype = ops.activation_dtype();
  return geometry;
}

}  // namespace

SequenceRunner::SequenceRunner(const Model& model, Ops& ops, int64_t max_context, int64_t max_chunk, int32_t page_size)
    : model_(model),
      ops_(ops),
      max_chunk_(max_chunk),
      workspace_(model.config(), Bounds(max_context, max_chunk), ops, model.workspace_ranks()),
      cache_(model.config(), Geometry(ops, max_context, page_size), ops),
      page_table_(static_cast<size_t>(cache_.geometry().pages)) {
  std::iota(page_table_.begin(), page_table_.end(), 0);
  input_capacity_ = static_cast<size_t>(max_chunk) * 4 + page_table_.size() + 8;
  inputs_ = static_cast<int32_t*>(ops.Allocate(input_capacity_ * sizeof(int32_t)));
  Reset();
}

SequenceRunner::~SequenceRunner() { ops_.Free(inputs_); }

void SequenceRunner::Reset() {
  length_ = 0;
  cache_.ZeroSlot(StateSlot{0});
}

std::vector<float> SequenceRunner::Append(std::span<const int32_t> tokens, std::span<const int32_t> rows,
                                          RoutingProbe* probe) {
  const int32_t count = static_cast<int32_t>(tokens.size());
  K3_CHECK(count > 0 && count <= max_chunk_);
  K3_CHECK(length_ + count <= static_cast<int64_t>(page_table_.size()) * cache_.geometry().page_size);

  // tokens | rows | token_begin | context, slot | page table | sequence of token | position
  std::vector<int32_t> host(tokens.begin(), tokens.end());
  host.insert(host.end(), rows.begin(), rows.end());
  const size_t begin_at = host.size();
  const int32_t context = static_cast<int32_t>(length_);
  host.insert(host.end(), {0, count, context, 0});
  const size_t table_at = host.size();
  host.insert(host.end(), page_table_.begin(), page_table_.end());
  const size_t sequence_at = host.size();
  host.resize(host.size() + tokens.size(), 0);
  const size_t position_at = host.size();
  for (int32_t t = 0; t < count; ++t) host.push_back(context + t);
  K3_CHECK(host.size() <= input_capacity_);
  ops_.CopyToDevice(inputs_, host.data(), host.size() * sizeof(int32_t), ops_.stream());

  SequenceBatch batch;
  batch.num_tokens = count;
  batch.num_sequences = 1;
  batch.token_begin = inputs_ + begin_at;
  batch.context = inputs_ + begin_at + 2;
  batch.state_slot = inputs_ + begin_at + 3;
  batch.page_table = inputs_ + table_at;
  batch.page_table_stride = static_cast<int64_t>(page_table_.size());
  batch.sequence_of_token = inputs_ + sequence_at;
  batch.position = inputs_ + position_at;
  batch.host_token_begin = host.data() + begin_at;
  batch.host_context = host.data() + begin_at + 2;

  if (before_forward) before_forward(count);
  const MatrixView hidden = model_.Forward(batch, inputs_, workspace_, cache_, probe);
  length_ += count;
  const int64_t vocab = model_.config().vocab_size;
  std::vector<float> logits(rows.size() * static_cast<size_t>(vocab));
  const size_t pass = static_cast<size_t>(workspace_.bounds().logits_rows);
  for (size_t begin = 0; begin < rows.size(); begin += pass) {
    const size_t n = std::min(pass, rows.size() - begin);
    const MatrixView out = model_.Logits(hidden, inputs_ + tokens.size() + begin, static_cast<int64_t>(n), workspace_);
    ops_.CopyToHost(logits.data() + begin * vocab, out.data, n * static_cast<size_t>(vocab) * sizeof(float),
                    ops_.stream());
    ops_.Synchronize(ops_.stream());
  }
  ops_.Synchronize(ops_.stream());
  return logits;
}

void SequenceRunner::LendExperts(int64_t rows) {
  K3_CHECK(rows > 0 && rows <= max_chunk_);
  model_.Forward(SequenceBatch(), nullptr, workspace_, cache_, nullptr, rows);
  ops_.Synchronize(ops_.stream());
}

}  // namespace k3
