#include "engine/step.h"

namespace k3 {

void RankPlan::Clear() {
  zero_slots.clear();
  state_copies.clear();
  page_copies.clear();
  tokens.clear();
  token_begin.clear();
  context.clear();
  state_slot.clear();
  // page_table keeps its size: the planner resizes it to [S, stride] and entries past a sequence's length are unread,
  // so clearing it would only make every step zero it again.
  page_table_stride = 0;
  sequence_of_token.clear();
  position.clear();
  snapshots.clear();
  epoch_uploads.clear();
  epoch_slot.clear();
  logits_row.clear();
  sample_rows.clear();
  logit_edits.clear();
  allowed_mask.clear();
  max_top_logprobs = 0;
}

}  // namespace k3
