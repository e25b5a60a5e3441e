#include "tests/testing/hash_model_runner.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "kernels/core/check.h"

namespace k3::testing {

HashModelRunner::HashModelRunner(const HashModel& model, const EngineConfig& config)
    : model_(model), config_(config), ranks_(static_cast<size_t>(config.data_parallel)) {
  for (Memory& memory : ranks_) {
    memory.slots.resize(static_cast<size_t>(config.state_slots + config.snapshot_slots));
    std::memset(static_cast<void*>(memory.slots.data()), 0xFF, memory.slots.size() * sizeof(HashState));
    memory.lines.assign(static_cast<size_t>(config.latent_pages) * static_cast<size_t>(config.page_size), kPoison);
  }
}

void HashModelRunner::PoisonSlot(int32_t rank, StateSlot slot) {
  std::memset(static_cast<void*>(&Slot(rank, slot)), 0xFF, sizeof(HashState));
}

void HashModelRunner::PoisonPage(int32_t rank, PageId page) {
  uint64_t* lines = ranks_[static_cast<size_t>(rank)].lines.data() + int64_t{page.value} * config_.page_size;
  std::fill(lines, lines + config_.page_size, kPoison);
}

void HashModelRunner::Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) {
  for (PageId page : pages) PoisonPage(rank, page);
  for (StateSlot slot : slots) PoisonSlot(rank, slot);
  scrubbed_pages += static_cast<int64_t>(pages.size());
  scrubbed_slots += static_cast<int64_t>(slots.size());
}

void HashModelRunner::CheckPlan(const RankPlan& plan) const {
  const size_t sequences = plan.context.size(), tokens = plan.tokens.size();
  K3_CHECK(plan.num_tokens() <= config_.max_num_batched_tokens);
  K3_CHECK(sequences == 0 ? plan.token_begin.size() <= 1 : plan.token_begin.size() == sequences + 1);
  K3_CHECK(plan.state_slot.size() == sequences && plan.sequence_of_token.size() == tokens &&
           plan.position.size() == tokens);
  std::set<int32_t> live, written_slots, written_pages;
  for (size_t s = 0; s < sequences; ++s) {
    const int32_t begin = plan.token_begin[s], end = plan.token_begin[s + 1];
    K3_CHECK(begin < end && end <= plan.num_tokens() && end - begin <= config_.prefill_chunk);
    K3_CHECK(plan.state_slot[s] >= 0 && plan.state_slot[s] < config_.state_slots);
    K3_CHECK(live.insert(plan.state_slot[s]).second);
    for (int32_t row = begin; row < end; ++row) {
      K3_CHECK(plan.sequence_of_token[static_cast<size_t>(row)] == static_cast<int32_t>(s));
      K3_CHECK(plan.position[static_cast<size_t>(row)] == plan.context[s] + row - begin);
    }
    const int32_t first_page = plan.context[s] / config_.page_size;
    const int32_t last_page = (plan.context[s] + end - begin - 1) / config_.page_size;
    K3_CHECK(last_page < plan.page_table_stride);
    for (int32_t page = 0; page <= last_page; ++page) {
      const int32_t id = plan.page_table[s * static_cast<size_t>(plan.page_table_stride) + static_cast<size_t>(page)];
      K3_CHECK(id >= 0 && id < config_.latent_pages);
      if (page >= first_page) K3_CHECK(written_pages.insert(id).second);
    }
  }
  for (size_t s = 0; s < sequences; ++s) {  // nobody reads what another one writes
    const int32_t first_page = plan.context[s] / config_.page_size;
    for (int32_t page = 0; page < first_page; ++page) {
      const int32_t id = plan.page_table[s * static_cast<size_t>(plan.page_table_stride) + static_cast<size_t>(page)];
      K3_CHECK(written_pages.count(id) == 0);
    }
  }
  int32_t last_row = -1;
  for (const SnapshotPoint& point : plan.snapshots) {
    K3_CHECK(point.row > last_row && point.row < plan.num_tokens());
    last_row = point.row;
    K3_CHECK(point.slot.value >= config_.state_slots &&
             point.slot.value < config_.state_slots + config_.snapshot_slots);
    K3_CHECK(written_slots.insert(point.slot.value).second);
    const size_t row = static_cast<size_t>(point.row);
    K3_CHECK((plan.position[row] + 1) % config_.page_size == 0);
  }
  for (StateSlot slot : plan.zero_slots) K3_CHECK(written_slots.insert(slot.value).second);
  for (const StateCopy& copy : plan.state_copies) {
    K3_CHECK(written_slots.insert(copy.to.value).second && copy.to.value < config_.state_slots);
  }
  K3_CHECK(plan.logits_row.size() == plan.sample_rows.size());
  const size_t words = static_cast<size_t>(config_.vocab_size + 31) / 32;
  K3_CHECK(plan.allowed_mask.size() % words == 0);
  for (size_t r = 0; r < plan.sample_rows.size(); ++r) {
    const SampleRow& row = plan.sample_rows[r];
    K3_CHECK(plan.logits_row[r] >= 0 && plan.logits_row[r] < plan.num_tokens());
    K3_CHECK(row.edit_begin <= row.edit_end && row.edit_end <= static_cast<int32_t>(plan.logit_edits.size()));
    K3_CHECK(row.mask_row < static_cast<int32_t>(plan.allowed_mask.size() / words));
    K3_CHECK(row.top_logprobs <= plan.max_top_logprobs && row.uniform >= 0 && row.uniform < 1);
    K3_CHECK(row.top_k >= 0 && row.top_k < config_.vocab_size);
    for (int32_t e = row.edit_begin + 1; e < row.edit_end; ++e) {
      K3_CHECK(plan.logit_edits[static_cast<size_t>(e - 1)].kind <= plan.logit_edits[static_cast<size_t>(e)].kind);
    }
  }
}

absl::Status HashModelRunner::Run(const StepPlan& plan, StepResult* result) {
  if (before_step) {
    if (absl::Status status = before_step(plan); !status.ok()) return status;
  }
  K3_CHECK(plan.ranks.size() == ranks_.size());
  result->ranks.resize(ranks_.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    CheckPlan(plan.ranks[r]);
    RunRank(plan.ranks[r], static_cast<int32_t>(r), &ranks_[r], &result->ranks[r]);
  }
  ++steps;
  return absl::OkStatus();
}

HashModel HashModelRunner::UnderEpoch(const HashModel& model, int32_t rank, uint64_t epoch) {
  if (epoch == 0) return model;  // no bias, whoever's
  return HashModel(model.vocab_size(), 1 + 1000 * epoch + static_cast<uint64_t>(rank));
}

void HashModelRunner::RunRank(const RankPlan& plan, int32_t rank, Memory* memory, RankResult* result) {
  K3_CHECK(plan.epoch_slot.size() == (config_.bias_epochs ? plan.context.size() : 0));
  for (const EpochUpload& upload : plan.epoch_uploads) {
    K3_CHECK(upload.slot > 0 && upload.slot < kEpochSlots && upload.number <= memory->newest_epoch);
    memory->epochs[upload.slot] = upload.number;
  }
  result->routing.updated = 0;
  if (config_.bias_epochs && steps % 16 == 3) {
    // A new one after some steps, now and then none.
    const bool none = steps % 80 == 67;
    if (!none) ++memory->newest_epoch;
    result->routing.updated = 1;
    result->routing.groups = 1;
    result->routing.load = {static_cast<uint32_t>(plan.tokens.size())};
    result->routing.newest_epoch = none ? 0 : memory->newest_epoch;
  }
  const auto slot = [memory](StateSlot id) -> HashState& { return memory->slots[static_cast<size_t>(id.value)]; };
  for (StateSlot id : plan.zero_slots) slot(id) = HashState{};
  for (const StateCopy& copy : plan.state_copies) slot(copy.to) = slot(copy.from);
  for (const PageCopy& copy : plan.page_copies) {
    const uint64_t* from = memory->lines.data() + int64_t{copy.from.value} * config_.page_size;
    std::copy(from, from + config_.page_size, memory->lines.data() + int64_t{copy.to.value} * config_.page_size);
  }
  const auto model_of = [&](size_t sequence) {
    return UnderEpoch(model_, rank,
                      config_.bias_epochs ? memory->epochs[static_cast<size_t>(plan.epoch_slot[sequence])] : 0);
  };
  outputs_.resize(plan.tokens.size());
  size_t next_snapshot = 0;
  for (size_t s = 0; s < plan.context.size(); ++s) {
    HashState& state = memory->slots[static_cast<size_t>(plan.state_slot[s])];
    const HashModel model = model_of(s);
    const int32_t* pages = plan.page_table.data() + s * static_cast<size_t>(plan.page_table_stride);
    const auto line = [&](int32_t position) -> uint64_t& {
      return memory
          ->lines[static_cast<size_t>(pages[position / config_.page_size]) * static_cast<size_t>(config_.page_size) +
                  static_cast<size_t>(position % config_.page_size)];
    };
    for (int32_t row = plan.token_begin[s]; row < plan.token_begin[s + 1]; ++row) {
      const int32_t token = plan.tokens[static_cast<size_t>(row)];
      const int32_t position = plan.position[static_cast<size_t>(row)];
      line(position) = model.Line(state, token);
      model.Advance(&state, token);
      uint64_t attention = 0;
      bool poisoned = false;
      for (int32_t past = 0; past <= position; ++past) {
        poisoned |= line(past) == kPoison;
        attention += model.Attend(line(past), token);
      }
      // A real model's later layers would carry it into the state.
      if (poisoned) state.fold = kPoison;
      outputs_[static_cast<size_t>(row)] = model.Output(state, attention);
      while (next_snapshot < plan.snapshots.size() && plan.snapshots[next_snapshot].row == row) {
        slot(plan.snapshots[next_snapshot++].slot) = state;
      }
    }
  }
  K3_CHECK(next_snapshot == plan.snapshots.size());

  const size_t rows = plan.sample_rows.size(), stride = static_cast<size_t>(plan.max_top_logprobs);
  const size_t words = static_cast<size_t>(config_.vocab_size + 31) / 32;
  result->token.assign(rows, -1);
  result->status.assign(rows, SampleStatus::kOk);
  result->logprob.assign(rows, 0);
  result->top_ids.assign(rows * stride, -1);
  result->top_logprobs.assign(rows * stride, 0);
  for (size_t r = 0; r < rows; ++r) {
    const SampleRow& row = plan.sample_rows[r];
    const size_t token = static_cast<size_t>(plan.logits_row[r]);
    model_of(static_cast<size_t>(plan.sequence_of_token[token])).Logits(outputs_[token], &logits_);
    const std::span<const LogitEdit> edits =
        std::span(plan.logit_edits)
            .subspan(static_cast<size_t>(row.edit_begin), static_cast<size_t>(row.edit_end - row.edit_begin));
    const std::span<const uint32_t> mask =
        row.mask_row < 0 ? std::span<const uint32_t>{}
                         : std::span(plan.allowed_mask).subspan(static_cast<size_t>(row.mask_row) * words, words);
    const SampledRow sampled = SampleReference(logits_, row, edits, mask);
    result->token[r] = sampled.token;
    result->status[r] = sampled.status;
    result->logprob[r] = sampled.logprob;
    for (size_t i = 0; i < sampled.top.size(); ++i) {
      result->top_ids[r * stride + i] = sampled.top[i].token;
      result->top_logprobs[r * stride + i] = sampled.top[i].logprob;
    }
  }
}

}  // namespace k3::testing
