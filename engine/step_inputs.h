#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/step.h"
#include "kernels/op_params.h"

namespace k3 {

// A step's arrays in device memory, as the model and the sampler take them.
struct DeviceInputs {
  SequenceBatch batch;
  int32_t* tokens = nullptr;
  const int32_t* logits_row = nullptr;
  const SampleRow* sample_rows = nullptr;
  const LogitEdit* logit_edits = nullptr;
  const uint32_t* allowed_mask = nullptr;
  // Padded steps: the page table as it came, see BeginStepParams.
  const int32_t* packed_table = nullptr;
  const int32_t* packed_stride = nullptr;
};

// Whether the logit edits and masks of a plan lie behind its other arrays, or come pass by pass (PackExtras).
enum class ExtrasPlace { kWithin, kApart };

// Bytes that Pack needs for `plan`.
size_t PackedBytes(const RankPlan& plan, ExtrasPlace extras = ExtrasPlace::kWithin);
// Lays the arrays of a plan one behind the other in `host`, which is to be copied to `device` as a whole, and returns
// their addresses there. The host copies of the batch are those of the plan.
DeviceInputs Pack(const RankPlan& plan, void* host, void* device, ExtrasPlace extras = ExtrasPlace::kWithin);

// Most bytes of edits and mask that one row can have: of each kind one an id.
size_t MostExtrasOfRow(int64_t vocab_size);
// Edits and masks of the sampling rows from `begin` on, as many rows as `room` bytes hold (MostExtrasOfRow at least).
struct PackedExtras {
  size_t end_row = 0;
  size_t bytes = 0;  // to be copied from `host` to `device`
};
// Sets in->logit_edits and in->allowed_mask so that those rows' own indices lead into `device`.
PackedExtras PackExtras(const RankPlan& plan, int64_t vocab_size, size_t begin, size_t room, void* host, void* device,
                        DeviceInputs* in);

// The inputs of a decode step of fixed size: one token a sequence and one drawn row each. All arrays lie at offsets
// that depend on the size alone, so that captured work finds them; what varies (page table, edits, masks) comes behind.
class PaddedInputs {
 public:
  // `epochs`: plans say under which bias epoch a sequence is routed.
  PaddedInputs(int32_t size, int32_t vocab_size, bool epochs);

  int32_t size() const { return size_; }
  // Whether `plan` is such a step, of at most size() sequences.
  bool Takes(const RankPlan& plan) const;
  // What Pack will need.
  size_t PackedBytes(const RankPlan& plan) const;
  // Fills `host` with the plan and padding. Returns the bytes to copy; nothing when they exceed `capacity`.
  std::optional<size_t> Pack(const RankPlan& plan, void* host, size_t capacity) const;
  // The addresses in `device`. `page_table` [size, stride] is where BeginStep spreads the table.
  DeviceInputs At(void* device, const int32_t* page_table, int64_t stride) const;

 private:
  // Where in the block the parts lie whose size varies, in entries, and where it ends.
  struct Tail {
    size_t first_edit = 0;
    size_t first_mask = 0;
    size_t end = 0;
  };
  Tail TailOf(const RankPlan& plan) const;
  size_t Take(size_t bytes);

  int32_t size_;
  int32_t mask_words_;
  bool epochs_;
  size_t used_ = 0;
  size_t header_, tokens_, token_begin_, context_, state_slot_, sequence_of_token_, position_, snapshot_row_,
      snapshot_slot_, epoch_slot_, logits_row_, sample_rows_;
  // Host copies that do not change from step to step. Lengths choose no variant here, so contexts are left at 0.
  std::vector<int32_t> host_token_begin_;
  std::vector<int32_t> host_context_;
};

}  // namespace k3
