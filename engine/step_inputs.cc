#include "engine/step_inputs.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/core/check.h"

namespace k3 {
namespace {

size_t Aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }
size_t MaskWords(int64_t vocab_size) { return static_cast<size_t>((vocab_size + 31) / 32); }

// Without memory it only counts; with it copies and yields device addresses.
class Packer {
 public:
  Packer(void* host, void* device) : host_(static_cast<char*>(host)), device_(static_cast<char*>(device)) {}

  template <typename T>
  T* Put(const std::vector<T>& values) {
    return PutEach<T>(values.size(), [&](size_t i) { return values[i]; });
  }
  template <typename T, typename Value>
  T* PutEach(size_t count, const Value& value) {
    const size_t at = used_;
    used_ += Aligned(count * sizeof(T));
    if (host_ == nullptr || count == 0) return nullptr;
    T* to = reinterpret_cast<T*>(host_ + at);
    for (size_t i = 0; i < count; ++i) to[i] = value(i);
    return reinterpret_cast<T*>(device_ + at);
  }
  size_t used() const { return used_; }

 private:
  char* host_;
  char* device_;
  size_t used_ = 0;
};

// Padding looks at the first page of its row: even a plan of no sequences has that column, which says that there is
// none.
size_t TableColumns(const RankPlan& plan) {
  K3_CHECK(plan.page_table_stride > 0 || plan.context.empty());
  return static_cast<size_t>(std::max(plan.page_table_stride, 1));
}

DeviceInputs PackAll(const RankPlan& plan, ExtrasPlace extras, Packer& packer) {
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
  in.batch.epoch_slot = packer.Put(plan.epoch_slot);
  in.batch.num_snapshots = static_cast<int32_t>(plan.snapshots.size());
  in.batch.snapshot_row =
      packer.PutEach<int32_t>(plan.snapshots.size(), [&](size_t i) { return plan.snapshots[i].row; });
  in.batch.snapshot_slot =
      packer.PutEach<int32_t>(plan.snapshots.size(), [&](size_t i) { return plan.snapshots[i].slot.value; });
  in.batch.host_token_begin = plan.token_begin.data();
  in.batch.host_context = plan.context.data();
  in.logits_row = packer.Put(plan.logits_row);
  in.sample_rows = packer.Put(plan.sample_rows);
  if (extras == ExtrasPlace::kWithin) {
    in.logit_edits = packer.Put(plan.logit_edits);
    in.allowed_mask = packer.Put(plan.allowed_mask);
  }
  return in;
}

}  // namespace

size_t PackedBytes(const RankPlan& plan, ExtrasPlace extras) {
  Packer measure(nullptr, nullptr);
  PackAll(plan, extras, measure);
  return measure.used();
}

DeviceInputs Pack(const RankPlan& plan, void* host, void* device, ExtrasPlace extras) {
  Packer packer(host, device);
  return PackAll(plan, extras, packer);
}

size_t MostExtrasOfRow(int64_t vocab_size) {
  // Penalties, biases, bans and stops.
  return Aligned(static_cast<size_t>(4 * vocab_size) * sizeof(LogitEdit)) + Aligned(MaskWords(vocab_size) * 4);
}

PackedExtras PackExtras(const RankPlan& plan, int64_t vocab_size, size_t begin, size_t room, void* host, void* device,
                        DeviceInputs* in) {
  const size_t words = MaskWords(vocab_size);
  const auto first_edit = static_cast<size_t>(plan.sample_rows[begin].edit_begin);
  // Rows come with ascending slices of the edits and ascending masks.
  size_t first_mask = 0, masks = 0, edits = 0;
  PackedExtras packed{.end_row = begin};
  for (; packed.end_row < plan.sample_rows.size(); ++packed.end_row) {
    const SampleRow& row = plan.sample_rows[packed.end_row];
    const size_t more_edits = static_cast<size_t>(row.edit_end) - first_edit;
    size_t more_masks = masks;
    if (row.mask_row >= 0) {
      if (masks == 0) first_mask = static_cast<size_t>(row.mask_row);
      more_masks = static_cast<size_t>(row.mask_row) + 1 - first_mask;
    }
    const size_t bytes = Aligned(more_edits * sizeof(LogitEdit)) + Aligned(more_masks * words * 4);
    if (bytes > room) break;
    edits = more_edits;
    masks = more_masks;
    packed.bytes = bytes;
  }
  K3_CHECK(packed.end_row > begin);
  const size_t mask_at = Aligned(edits * sizeof(LogitEdit));
  std::copy_n(plan.logit_edits.begin() + static_cast<ptrdiff_t>(first_edit), edits, static_cast<LogitEdit*>(host));
  std::copy_n(plan.allowed_mask.begin() + static_cast<ptrdiff_t>(first_mask * words), masks * words,
              reinterpret_cast<uint32_t*>(static_cast<char*>(host) + mask_at));
  in->logit_edits = static_cast<const LogitEdit*>(device) - first_edit;
  in->allowed_mask = reinterpret_cast<const uint32_t*>(static_cast<const char*>(device) + mask_at) - first_mask * words;
  return packed;
}

PaddedInputs::PaddedInputs(int32_t size, int32_t vocab_size, bool epochs)
    : size_(size),
      mask_words_((vocab_size + 31) / 32),
      epochs_(epochs),
      host_token_begin_(static_cast<size_t>(size) + 1),
      host_context_(static_cast<size_t>(size), 0) {
  const size_t array = static_cast<size_t>(size) * sizeof(int32_t);
  header_ = Take(2 * sizeof(int32_t));
  tokens_ = Take(array);
  token_begin_ = Take(array + sizeof(int32_t));
  context_ = Take(array);
  state_slot_ = Take(array);
  sequence_of_token_ = Take(array);
  position_ = Take(array);
  snapshot_row_ = Take(array);
  snapshot_slot_ = Take(array);
  epoch_slot_ = Take(epochs ? array : 0);
  logits_row_ = Take(array);
  sample_rows_ = Take(static_cast<size_t>(size) * sizeof(SampleRow));
  std::iota(host_token_begin_.begin(), host_token_begin_.end(), 0);
}

size_t PaddedInputs::Take(size_t bytes) {
  const size_t at = used_;
  used_ += Aligned(bytes);
  return at;
}

bool PaddedInputs::Takes(const RankPlan& plan) const {
  const size_t count = plan.context.size();
  if (count == 0 || count > static_cast<size_t>(size_) || plan.tokens.size() != count ||
      plan.logits_row.size() != count || plan.snapshots.size() > count) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    if (plan.logits_row[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

PaddedInputs::Tail PaddedInputs::TailOf(const RankPlan& plan) const {
  // Edits and masks are addressed from the start of the block: their offsets are whole numbers of entries.
  const size_t stride = TableColumns(plan);
  const size_t mask_bytes = static_cast<size_t>(mask_words_) * sizeof(uint32_t);
  const size_t table_end = used_ + static_cast<size_t>(size_) * stride * sizeof(int32_t);
  Tail tail;
  tail.first_edit = (table_end + sizeof(LogitEdit) - 1) / sizeof(LogitEdit);
  const size_t edits_end = (tail.first_edit + plan.logit_edits.size()) * sizeof(LogitEdit);
  tail.first_mask = (edits_end + mask_bytes - 1) / mask_bytes;
  tail.end = plan.logit_edits.empty() ? table_end : edits_end;
  if (!plan.allowed_mask.empty()) {
    tail.end = tail.first_mask * mask_bytes + plan.allowed_mask.size() * sizeof(uint32_t);
  }
  return tail;
}

size_t PaddedInputs::PackedBytes(const RankPlan& plan) const { return TailOf(plan).end; }

std::optional<size_t> PaddedInputs::Pack(const RankPlan& plan, void* host, size_t capacity) const {
  const size_t live = plan.context.size(), size = static_cast<size_t>(size_);
  const size_t stride = TableColumns(plan);
  const size_t mask_bytes = static_cast<size_t>(mask_words_) * sizeof(uint32_t);
  const Tail tail = TailOf(plan);
  const size_t first_edit = tail.first_edit, first_mask = tail.first_mask, end = tail.end;
  if (end > capacity) return std::nullopt;

  char* base = static_cast<char*>(host);
  const auto array = [base](size_t offset) { return reinterpret_cast<int32_t*>(base + offset); };
  const auto put = [&](size_t offset, const std::vector<int32_t>& values, int32_t padding) {
    std::copy(values.begin(), values.end(), array(offset));
    std::fill(array(offset) + values.size(), array(offset) + size, padding);
  };
  array(header_)[0] = static_cast<int32_t>(stride);
  array(header_)[1] = static_cast<int32_t>(live);
  put(tokens_, plan.tokens, 0);
  std::iota(array(token_begin_), array(token_begin_) + size + 1, 0);
  put(context_, plan.context, 0);
  put(state_slot_, plan.state_slot, -1);
  std::iota(array(sequence_of_token_), array(sequence_of_token_) + size, 0);
  put(position_, plan.position, 0);
  if (epochs_) put(epoch_slot_, plan.epoch_slot, 0);
  for (size_t i = 0; i < size; ++i) {
    const bool given = i < plan.snapshots.size();
    array(snapshot_row_)[i] = given ? plan.snapshots[i].row : kNoRow;
    array(snapshot_slot_)[i] = given ? plan.snapshots[i].slot.value : -1;
  }
  std::iota(array(logits_row_), array(logits_row_) + size, 0);
  auto* rows = reinterpret_cast<SampleRow*>(base + sample_rows_);
  for (size_t i = 0; i < size; ++i) {
    rows[i] = i < live ? plan.sample_rows[i] : SampleRow{};
    rows[i].edit_begin += static_cast<int32_t>(first_edit);
    rows[i].edit_end += static_cast<int32_t>(first_edit);
    if (rows[i].mask_row >= 0) rows[i].mask_row += static_cast<int32_t>(first_mask);
  }
  std::copy_n(plan.page_table.data(), live * stride, array(used_));
  std::fill(array(used_) + live * stride, array(used_) + size * stride, -1);
  if (!plan.logit_edits.empty()) {
    std::memcpy(base + first_edit * sizeof(LogitEdit), plan.logit_edits.data(),
                plan.logit_edits.size() * sizeof(LogitEdit));
  }
  if (!plan.allowed_mask.empty()) {
    std::memcpy(base + first_mask * mask_bytes, plan.allowed_mask.data(), plan.allowed_mask.size() * sizeof(uint32_t));
  }
  return end;
}

DeviceInputs PaddedInputs::At(void* device, const int32_t* page_table, int64_t stride) const {
  char* base = static_cast<char*>(device);
  const auto array = [base](size_t offset) { return reinterpret_cast<int32_t*>(base + offset); };
  DeviceInputs in;
  in.tokens = array(tokens_);
  in.batch.num_tokens = size_;
  in.batch.num_sequences = size_;
  in.batch.live_tokens = array(header_) + 1;
  in.batch.token_begin = array(token_begin_);
  in.batch.context = array(context_);
  in.batch.state_slot = array(state_slot_);
  in.batch.page_table = page_table;
  in.batch.page_table_stride = stride;
  in.batch.sequence_of_token = array(sequence_of_token_);
  in.batch.position = array(position_);
  if (epochs_) in.batch.epoch_slot = array(epoch_slot_);
  in.batch.num_snapshots = size_;
  in.batch.snapshot_row = array(snapshot_row_);
  in.batch.snapshot_slot = array(snapshot_slot_);
  in.batch.host_token_begin = host_token_begin_.data();
  in.batch.host_context = host_context_.data();
  in.logits_row = array(logits_row_);
  in.sample_rows = reinterpret_cast<const SampleRow*>(base + sample_rows_);
  in.logit_edits = reinterpret_cast<const LogitEdit*>(base);
  in.allowed_mask = reinterpret_cast<const uint32_t*>(base);
  in.packed_table = array(used_);
  in.packed_stride = array(header_);
  return in;
}

}  // namespace k3
