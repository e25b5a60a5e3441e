#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "engine/scheduler.h"

// Scheduler::PlanStep, second half: the arrays of a RankPlan for what was decided.
namespace k3 {

void Scheduler::Emit(Rank& rank, RankPlan* plan) {
  if (rank.step->scheduled.empty()) return;
  int64_t stride = 0;
  for (const Scheduled& entry : rank.step->scheduled) {
    stride = std::max(stride, config_.PagesFor(int64_t{entry.sequence->computed} + entry.sequence->planned));
  }
  plan->page_table_stride = static_cast<int32_t>(stride);
  plan->page_table.resize(rank.step->scheduled.size() * static_cast<size_t>(stride));
  int32_t index = 0;
  for (Scheduled& entry : rank.step->scheduled) {
    Sequence& sequence = *entry.sequence;
    const int32_t begin = plan->num_tokens();
    const int32_t count = sequence.planned;
    plan->token_begin.push_back(begin);
    plan->context.push_back(sequence.computed);
    plan->state_slot.push_back(sequence.lease.state.value);
    if (config_.bias_epochs) plan->epoch_slot.push_back(sequence.request->epoch.slot);
    static_assert(sizeof(PageId) == sizeof(int32_t));
    std::memcpy(plan->page_table.data() + index * stride, sequence.lease.pages.data(),
                static_cast<size_t>(config_.PagesFor(int64_t{sequence.computed} + count)) * sizeof(int32_t));
    const auto first = sequence.tokens.begin() + sequence.computed;
    plan->tokens.insert(plan->tokens.end(), first, first + count);
    for (int32_t i = 0; i < count; ++i) {
      plan->sequence_of_token.push_back(index);
      plan->position.push_back(sequence.computed + i);
    }
    entry.row_begin = static_cast<int32_t>(rank.step->rows.size());
    EmitRows(rank, sequence, begin, plan);
    entry.row_end = static_cast<int32_t>(rank.step->rows.size());
    EmitSnapshots(rank, sequence, begin, plan);
    entry.lease = sequence.leases;
    entry.begin = sequence.computed;
    entry.end = sequence.computed += count;
    sequence.planned = 0;
    const LiveRequest& live = *sequence.request;
    if (live.choices.size() > 1 && !live.forked) ahead_ = false;
    ++index;
  }
  plan->token_begin.push_back(plan->num_tokens());
}

bool Scheduler::NeedsToken(const Sequence& sequence) {
  return sequence.sampler.counts_tokens() || sequence.request->constraint(sequence.choice) != nullptr;
}

void Scheduler::EmitRows(Rank& rank, Sequence& sequence, int32_t begin, RankPlan* plan) {
  LiveRequest& live = *sequence.request;
  if (sequence.streams_prompt_scores) {
    for (int32_t i = 0; i < sequence.planned; ++i) {
      const int32_t scored = sequence.computed + i + 1;
      if (scored < sequence.prompt_scores || scored >= sequence.prompt_length) continue;
      sequence.sampler.AppendScore(begin + i, sequence.tokens[static_cast<size_t>(scored)], plan);
      rank.step->rows.push_back({&sequence, RowKind::kPromptScore, scored});
    }
  }
  if (sequence.planned < sequence.remaining() ||
      static_cast<int32_t>(sequence.tokens.size()) >= sequence.length_limit) {
    return;
  }
  const int32_t row = begin + sequence.planned - 1;
  const auto draw = [&](Sequence& drawn) {
    try {
      drawn.sampler.AppendDraw(row, live.constraint(drawn.choice), plan, drawn.unknown);
    } catch (const std::exception& error) {
      // The row stands without its mask; the commit ends the request before anything of it is used.
      live.broken = std::string("the token constraint threw: ") + error.what();
    }
    const int32_t index = static_cast<int32_t>(rank.step->rows.size());
    rank.step->rows.push_back({&drawn, RowKind::kDraw, static_cast<int32_t>(drawn.tokens.size())});
    drawn.tokens.push_back(TokenOfRow(index));
    ++drawn.unknown;
    if (NeedsToken(drawn)) ahead_ = false;
  };
  draw(sequence);
  if (live.forked || live.choices.size() == 1) return;
  // The prompt's last row gives the first token of every choice.
  for (Sequence& choice : live.choices) {
    if (&choice == &sequence || choice.phase == SequencePhase::kFinished) continue;
    choice.Begin(config_.eos_token_ids, config_.vocab_size, config_.pool_tokens());
    draw(choice);
  }
}

void Scheduler::EmitSnapshots(Rank& rank, Sequence& sequence, int32_t begin, RankPlan* plan) {
  if (!config_.enable_prefix_caching || config_.snapshot_slots == 0 || !sequence.request->caches()) return;
  const int32_t from = sequence.computed, to = sequence.computed + sequence.planned;
  const int32_t interval = config_.snapshot_interval;
  const int32_t prompt_end = (sequence.prompt_length - 1) / config_.page_size * config_.page_size;
  const auto within = [from, to](int32_t position) { return position > from && position <= to; };
  if (to / interval == from / interval && !within(prompt_end) && !within(sequence.divergence)) return;

  // Most useful first, in case slots run short: the end of the prompt, the divergence point, then late before early.
  std::vector<int32_t>& wanted = snapshot_scratch_;
  wanted.clear();
  const auto want = [&](int32_t position) {
    if (within(position) && std::find(wanted.begin(), wanted.end(), position) == wanted.end())
      wanted.push_back(position);
  };
  want(prompt_end);
  want(sequence.divergence);
  for (int32_t position = to / interval * interval; position > from; position -= interval) want(position);
  const size_t first = plan->snapshots.size();
  for (int32_t position : wanted) {
    const StateSlot slot = rank.cache.ReserveSnapshot(&sequence.lease, position, position == sequence.divergence);
    if (slot.valid()) plan->snapshots.push_back({begin + position - from - 1, slot});
  }
  std::sort(plan->snapshots.begin() + static_cast<ptrdiff_t>(first), plan->snapshots.end(),
            [](const SnapshotPoint& a, const SnapshotPoint& b) { return a.row < b.row; });
}

}  // namespace k3
