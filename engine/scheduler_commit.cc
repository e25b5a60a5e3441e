#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/scheduler.h"
#include "kernels/core/check.h"

// Scheduler::CommitStep: what a step that has run changes.
namespace k3 {

void Scheduler::CommitStep(const StepPlan& plan, const StepResult& result, Clock::time_point now) {
  K3_CHECK(step_open() && plan.ranks.size() == ranks_.size() && result.ranks.size() == ranks_.size());
  committing_ = true;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    const RankStep& step = rank.steps[committed_ % kMostOpen];
    const size_t rows = step.rows.size();
    K3_CHECK(result.ranks[r].token.size() >= rows && result.ranks[r].status.size() >= rows &&
             result.ranks[r].logprob.size() >= rows);
    rank.cache.LetGoOfRestores();
    if (result.ranks[r].routing.updated != 0) NoteRouting(rank, result.ranks[r].routing);
    for (const Scheduled& entry : step.scheduled) CommitSequence(rank, entry, plan.ranks[r], result.ranks[r], now);
  }
  ++committed_;
  ++counters_.steps;
  committing_ = false;
  for (const Deferred& deferred : std::exchange(deferred_, {})) {
    if (deferred.choice < 0) {
      CancelNow(deferred.id, deferred.why, now);
    } else {
      StopChoiceNow(deferred.id, deferred.choice, now);
    }
  }
  BuryDead();
}

void Scheduler::CommitSequence(Rank& rank, const Scheduled& entry, const RankPlan& plan, const RankResult& result,
                               Clock::time_point now) {
  Sequence& sequence = *entry.sequence;
  const std::vector<Row>& rows = rank.steps[committed_ % kMostOpen].rows;
  LiveRequest& live = *sequence.request;
  // It ended or gave up its lease since the step was planned.
  if (sequence.phase != SequencePhase::kRunning || sequence.leases != entry.lease) return;
  const int32_t computed = entry.end;  // as far as this step; the next may be under way
  rank.cache.SnapshotsTaken(&sequence.lease, computed);

  for (int32_t row = entry.row_begin; row < entry.row_end; ++row) {
    const SampleStatus status = result.status[static_cast<size_t>(row)];
    if (status == SampleStatus::kOk) continue;
    if (status == SampleStatus::kNonFinite) {
      ++counters_.nonfinite_rows;
      if (live.is_shadow) ++counters_.verified_hits, ++counters_.hit_disagreements;
      FinishRequest(
          live, absl::InternalError(absl::StrCat("the model produced non-finite logits at position ", computed - 1)),
          now, /*condemn=*/true);
    } else {
      FinishRequest(live,
                    absl::InvalidArgumentError(absl::StrCat(
                        "after ", sequence.sampler.generated(),
                        " tokens the request's own constraint, allowed and banned ids leave none to choose")),
                    now);
    }
    return;
  }
  if (!live.broken.empty()) {
    FinishRequest(live, absl::InternalError(live.broken), now);
    return;
  }

  // A prompt enters the cache once all of it is computed and its last row was finite; an answer page by page.
  const bool prompt_done = computed >= sequence.prompt_length;
  const bool prompt_step = entry.begin < sequence.prompt_length;
  if (config_.enable_prefix_caching && live.caches() && prompt_done &&
      (prompt_step || computed / config_.page_size > sequence.lease.published)) {
    sequence.ExtendHashes(config_.page_size);
    rank.cache.Publish(sequence.Key(), computed / config_.page_size, live.id, &sequence.lease);
  }
  if (live.backlog > 0) {
    const int64_t left = sequence.known() - computed;
    backlog_tokens_ += left - live.backlog;
    live.backlog = left;
  }
  if (prompt_step) {
    const int32_t done = std::min(computed, sequence.prompt_length);
    if (done > live.prefill_reported) {
      live.prefill_reported = done;
      Notify(live, [&](TokenSink& sink) { sink.OnPrefillProgress(done, sequence.prompt_length); });
    }
  }
  if (prompt_done && !live.forked && sequence.choice == live.source) {
    live.forked = true;
    bool followers = false;
    for (Sequence& choice : live.choices) {
      if (choice.phase != SequencePhase::kQueued) continue;
      SetPhase(choice, SequencePhase::kForking);
      followers = true;
    }
    if (followers) forking_.push_back(live.id);
  }

  for (int32_t r = entry.row_begin; r < entry.row_end && !live.finished; ++r) {
    const size_t index = static_cast<size_t>(r);
    const Row& row = rows[index];
    if (row.kind == RowKind::kPromptScore) {
      sequence.prompt_scores = std::max(sequence.prompt_scores, row.index + 1);
      const TokenLogprob logprob = LogprobOf(index, plan, result);
      Notify(live, [&](TokenSink& sink) { sink.OnPromptLogprob(row.index, logprob); });
    } else if (row.sequence->phase != SequencePhase::kFinished) {
      AcceptToken(row, index, plan, result, now);
    }
  }
  if (live.finished) return;
  if (!live.broken.empty()) {
    FinishRequest(live, absl::InternalError(live.broken), now);
    return;
  }
  if (prompt_done && live.sampling().max_new_tokens == 0) {
    for (Sequence& choice : live.choices) {
      if (!live.finished && choice.phase != SequencePhase::kFinished)
        FinishChoice(choice, FinishReason::kLength, -1, now);
    }
  }
}

void Scheduler::AcceptToken(const Row& row, size_t index, const RankPlan& plan, const RankResult& result,
                            Clock::time_point now) {
  Sequence& sequence = *row.sequence;
  LiveRequest& live = *sequence.request;
  const int32_t token = result.token[index];
  K3_CHECK(token >= 0 && token < config_.vocab_size);
  if (!live.has_first_token) {
    live.has_first_token = true;
    live.first_token_at = now;
  }
  if (live.is_shadow) {
    ++counters_.verified_hits;
    const bool agrees = token == live.expected.token &&
                        std::abs(result.logprob[index] - live.expected.logprob) <= config_.verify_tolerance;
    if (!agrees) ++counters_.hit_disagreements;
    FinishRequest(live, absl::OkStatus(), now);
    return;
  }
  if (TokenConstraint* constraint = live.constraint(sequence.choice); constraint != nullptr) {
    try {
      if (!constraint->Accept(token)) live.broken = absl::StrCat("token ", token, " violates the request's constraint");
    } catch (const std::exception& error) {
      live.broken = absl::StrCat("the token constraint threw: ", error.what());
    }
    if (!live.broken.empty()) return;
  }
  if (live.check_hit && row.index == sequence.prompt_length && sequence.choice == 0) {
    live.check_hit = false;
    VerifyHit(live, {token, result.logprob[index]});
  }
  K3_CHECK(row.index == sequence.known());
  sequence.tokens[static_cast<size_t>(row.index)] = token;
  --sequence.unknown;
  sequence.sampler.Count(token);
  ++live.usage.completion_tokens;
  ++counters_.generated_tokens;
  if (live.sampling().top_logprobs >= 0) {
    const TokenLogprob logprob = LogprobOf(index, plan, result);
    Notify(live, [&](TokenSink& sink) { sink.OnToken(sequence.choice, token, &logprob); });
  } else {
    Notify(live, [&](TokenSink& sink) { sink.OnToken(sequence.choice, token, nullptr); });
  }
  const auto generated = std::span(std::as_const(sequence.tokens))
                             .subspan(static_cast<size_t>(sequence.prompt_length),
                                      static_cast<size_t>(sequence.known() - sequence.prompt_length));
  const bool repeats = sequence.repetition.Add(generated);
  if (sequence.sampler.IsStop(token)) {
    FinishChoice(sequence, FinishReason::kStop, token, now);
  } else if (repeats) {
    FinishChoice(sequence, FinishReason::kRepetition, -1, now);
  } else if (sequence.known() >= sequence.length_limit) {
    FinishChoice(sequence, FinishReason::kLength, -1, now);
  }
}

TokenLogprob Scheduler::LogprobOf(size_t row, const RankPlan& plan, const RankResult& result) {
  TokenLogprob logprob;
  logprob.logprob = result.logprob[row];
  const size_t wanted = static_cast<size_t>(plan.sample_rows[row].top_logprobs);
  const size_t stride = static_cast<size_t>(plan.max_top_logprobs);
  top_scratch_.clear();
  for (size_t i = 0; i < wanted; ++i) {
    top_scratch_.push_back({result.top_ids[row * stride + i], result.top_logprobs[row * stride + i]});
  }
  logprob.top = top_scratch_;
  return logprob;
}

void Scheduler::VerifyHit(const LiveRequest& live, const HitCheck& expected) {
  constexpr int32_t kMostShadows = 4;  // a slow machine verifies fewer hits instead of queueing them up
  if (shadows_ >= kMostShadows) return;
  const Request& original = *live.request;
  auto request = std::make_unique<Request>();
  request->external_id = original.external_id;
  request->prompt_tokens = original.prompt_tokens;
  request->sampling = original.sampling;
  request->sampling.max_new_tokens = 1;
  request->sampling.top_logprobs = -1;
  request->priority = original.priority;
  request->bypass_prefix_cache = true;
  if (!original.constraints.empty()) request->constraints.push_back(original.constraints[0]->Fork());
  auto shadow = std::make_unique<LiveRequest>();
  shadow->id = kFirstShadowId + next_shadow_++;
  shadow->request = std::move(request);
  shadow->arrival = live.admitted_at;
  shadow->is_shadow = true;
  shadow->expected = expected;
  shadow->open_choices = 1;
  shadow->choices = std::vector<Sequence>(1);
  shadow->choices[0].request = shadow.get();
  if (live.epoch.rank >= 0) PinEpoch(*shadow, live.epoch.rank, live.epoch.slot);  // else nothing would agree
  ++shadows_;
  ++queued_shadows_;
  queue_.Push(shadow.get(), static_cast<int32_t>(original.prompt_tokens.size()) > config_.long_prompt_tokens);
  const RequestId id = shadow->id;
  requests_.emplace(id, std::move(shadow));
}

}  // namespace k3
