#include "server/response_stream.h"

#include <algorithm>
#include <utility>

namespace k3 {
namespace {

// What waits for a late reader is merged into one event up to here: each becomes one message, and clients of gRPC take
// 4 MiB unless told otherwise. A log-probability and its token are 6 to 9 bytes on the wire.
constexpr size_t kMostLogprobs = size_t{1} << 16;
constexpr size_t kMostText = size_t{1} << 20;

bool IsFull(const LogprobRows& rows) { return rows.logprobs.size() + rows.top.size() >= kMostLogprobs; }

}  // namespace

ResponseStream::ResponseStream(EngineInterface* engine, Options options)
    : engine_(engine),
      options_(std::move(options)),
      top_per_token_(std::max(options_.accepted.effective.params.top_logprobs, 0)),
      logprobs_(options_.accepted.effective.params.top_logprobs >= 0) {
  choices_.resize(options_.readers.size());
  for (size_t i = 0; i < choices_.size(); ++i) choices_[i].reader = std::move(options_.readers[i]);
}

ResponseStream::~ResponseStream() {
  if (!finished_ && closed_) ReportMetrics(/*tool_calls=*/false);  // nobody drained to the end
}

void ResponseStream::SetAccepted(RequestId id, std::unique_ptr<RequestMetrics> metrics) {
  bool cancel = false;
  {
    std::lock_guard lock(mutex_);
    engine_id_ = id;
    metrics_ = std::move(metrics);
    if (metrics_ != nullptr) {
      for (const auto& [choice, time] : early_tokens_) metrics_->OnToken(choice, time);
    }
    early_tokens_ = {};
    cancel = cancel_requested_;
  }
  if (cancel) engine_->Cancel(id);
}

void ResponseStream::SetNotify(std::function<void()> notify) {
  bool call = false;
  {
    std::lock_guard lock(mutex_);
    notify_ = notify;
    call = notify && !raw_.events.empty();
    if (call) notified_ = true;
  }
  if (call) notify();
}

void ResponseStream::Cancel() {
  std::optional<RequestId> id;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    cancel_requested_ = true;
    id = engine_id_;
  }
  if (id.has_value()) engine_->Cancel(*id);
}

void ResponseStream::Abort(const absl::Status& status) {
  Cancel();
  OnFinished(status, UsageSoFar());
}

RequestUsage ResponseStream::UsageSoFar() const {
  std::lock_guard lock(mutex_);
  if (closed_) return usage_;
  RequestUsage usage;
  usage.prompt_tokens = options_.accepted.prompt_tokens;
  usage.cached_tokens = cached_tokens_;
  usage.completion_tokens = pushed_tokens_;
  return usage;
}

bool ResponseStream::HasLeftQueue() const {
  std::lock_guard lock(mutex_);
  return admitted_ || closed_;
}

// Engine thread.

void ResponseStream::AppendLogprob(const TokenLogprob& logprob) {
  raw_.logprobs.push_back(logprob.logprob);
  for (int32_t i = 0; i < top_per_token_; ++i) {
    raw_.tops.push_back(static_cast<size_t>(i) < logprob.top.size() ? logprob.top[static_cast<size_t>(i)]
                                                                    : TopLogprob{-1, 0});
  }
}

void ResponseStream::Push(RawEvent event, const TokenLogprob* logprob) {
  std::function<void()> notify;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (event.kind == RawKind::kFinished) closed_ = true;
    if (event.kind == RawKind::kChoiceFinished) last_reason_ = event.reason;
    if (event.kind == RawKind::kAdmitted) {
      admitted_ = true;
      cached_tokens_ = event.value;
    }
    if (event.kind == RawKind::kToken) {
      ++pushed_tokens_;
      if (metrics_ != nullptr) {
        metrics_->OnToken(event.choice);
      } else if (!engine_id_.has_value()) {
        early_tokens_.emplace_back(event.choice, Clock::now());
      }
    }
    if (event.kind == RawKind::kPrefill && !raw_.events.empty() && raw_.events.back().kind == RawKind::kPrefill) {
      raw_.events.back() = event;
    } else {
      raw_.events.push_back(event);
    }
    if (logprob != nullptr) AppendLogprob(*logprob);
    if (!notified_ && notify_) {
      notified_ = true;
      notify = notify_;
    }
  }
  if (notify) notify();
}

void ResponseStream::OnAdmitted(int32_t cached_tokens) {
  Push({RawKind::kAdmitted, FinishReason::kStop, 0, cached_tokens}, nullptr);
}

void ResponseStream::OnPrefillProgress(int32_t done, int32_t total) {
  if (done < total) Push({RawKind::kPrefill, FinishReason::kStop, 0, done}, nullptr);
}

void ResponseStream::OnPromptLogprob(int32_t index, const TokenLogprob& logprob) {
  Push({RawKind::kPromptLogprob, FinishReason::kStop, 0, index}, &logprob);
}

void ResponseStream::OnToken(int32_t choice, int32_t token, const TokenLogprob* logprob) {
  Push({RawKind::kToken, FinishReason::kStop, static_cast<uint16_t>(choice), token}, logprobs_ ? logprob : nullptr);
}

void ResponseStream::OnChoiceFinished(int32_t choice, FinishReason reason, int32_t stop_token) {
  Push({RawKind::kChoiceFinished, reason, static_cast<uint16_t>(choice), stop_token}, nullptr);
}

void ResponseStream::OnFinished(const absl::Status& status, const RequestUsage& usage) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    final_status_ = status;
    usage_ = usage;
  }
  Push({RawKind::kFinished, FinishReason::kStop, 0, 0}, nullptr);
}

// Draining thread.

void ResponseStream::Drain() {
  reading_.Clear();
  {
    std::lock_guard lock(mutex_);
    std::swap(raw_, reading_);
    notified_ = false;
  }
  size_t logprob_index = 0;
  for (const RawEvent& event : reading_.events) Read(event, &logprob_index);
}

void ResponseStream::Read(const RawEvent& event, size_t* logprob_index) {
  const float* logprob = nullptr;
  const TopLogprob* top = nullptr;
  if (event.kind == RawKind::kPromptLogprob || (event.kind == RawKind::kToken && logprobs_)) {
    logprob = &reading_.logprobs[*logprob_index];
    top = reading_.tops.data() + *logprob_index * static_cast<size_t>(top_per_token_);
    ++*logprob_index;
  }
  switch (event.kind) {
    case RawKind::kAdmitted:
      options_.accepted.cached_tokens = event.value;
      events_.emplace_back(options_.accepted);
      break;
    case RawKind::kPrefill: {
      const PrefillEvent progress{event.value, options_.accepted.prompt_tokens};
      auto* last = events_.empty() ? nullptr : std::get_if<PrefillEvent>(&events_.back());
      if (last != nullptr) {
        *last = progress;
      } else {
        events_.emplace_back(progress);
      }
      break;
    }
    case RawKind::kPromptLogprob: {
      auto* last = events_.empty() ? nullptr : std::get_if<PromptLogprobsEvent>(&events_.back());
      if (last == nullptr || IsFull(last->rows))
        last = &std::get<PromptLogprobsEvent>(events_.emplace_back(PromptLogprobsEvent{}));
      AppendRow(&last->rows, options_.prompt_tokens[static_cast<size_t>(event.value)], *logprob, top);
      break;
    }
    case RawKind::kToken:
      ReadToken(event.choice, event.value, logprob, top);
      break;
    case RawKind::kChoiceFinished:
      ReadChoiceFinished(event.choice, event.reason, event.value);
      break;
    case RawKind::kFinished:
      ReadFinished();
      break;
  }
}

void ResponseStream::AppendRow(LogprobRows* rows, int32_t token, float logprob, const TopLogprob* top) const {
  rows->top_per_token = top_per_token_;
  rows->token_ids.push_back(token);
  rows->logprobs.push_back(logprob);
  rows->top.insert(rows->top.end(), top, top + top_per_token_);
}

DeltaEvent& ResponseStream::OpenDelta(int32_t index, OutputChannel channel) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (choice.last_event >= first_sequence_) {
    auto* delta = std::get_if<DeltaEvent>(&events_[choice.last_event - first_sequence_]);
    const bool fits = delta != nullptr && !IsFull(delta->logprobs) && delta->text.size() < kMostText;
    if (fits && delta->channel == channel) return *delta;
  }
  choice.last_event = first_sequence_ + events_.size();
  DeltaEvent delta;
  delta.choice = index;
  delta.channel = channel;
  return std::get<DeltaEvent>(events_.emplace_back(std::move(delta)));
}

void ResponseStream::AppendPieces(int32_t index, std::vector<OutputPiece>& pieces) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  for (OutputPiece& piece : pieces) {
    if (!piece.is_tool_call) {
      if (piece.text.empty()) continue;
      choice.has_content |= piece.channel == OutputChannel::kContent;
      OpenDelta(index, piece.channel).text += piece.text;
      continue;
    }
    piece.call.choice = index;
    ToolCallEvent* open = nullptr;
    if (choice.last_event >= first_sequence_) {
      open = std::get_if<ToolCallEvent>(&events_[choice.last_event - first_sequence_]);
    }
    // Arguments join on; an id and name start a new event.
    const bool fits = open != nullptr && open->index == piece.call.index && open->arguments.size() < kMostText;
    if (fits && piece.call.name.empty() && piece.call.id.empty()) {
      open->arguments += piece.call.arguments;
    } else {
      choice.last_event = first_sequence_ + events_.size();
      events_.emplace_back(std::move(piece.call));
    }
  }
  pieces.clear();
}

void ResponseStream::ReadToken(int32_t index, int32_t token, const float* logprob, const TopLogprob* top) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (choice.finished) return;  // generated before the engine heard of the stop
  ++choice.tokens;
  const SamplingParams& params = options_.accepted.effective.params;
  const bool is_end =
      (!params.ignore_eos && std::find(options_.eos_token_ids.begin(), options_.eos_token_ids.end(), token) !=
                                 options_.eos_token_ids.end()) ||
      std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) != params.stop_token_ids.end();
  OutputChannel channel = OutputChannel::kFormat;
  if (!is_end) channel = choice.reader->Push(token, &pieces_);
  if (channel == OutputChannel::kReasoning) ++choice.reasoning_tokens;
  if (options_.token_ids || logprobs_) {
    DeltaEvent& delta = OpenDelta(index, channel);
    ++delta.tokens;
    if (options_.token_ids) delta.token_ids.push_back(token);
    if (logprobs_) AppendRow(&delta.logprobs, token, *logprob, top);
    AppendPieces(index, pieces_);
  } else {
    AppendPieces(index, pieces_);
    if (choice.last_event >= first_sequence_) {
      auto* delta = std::get_if<DeltaEvent>(&events_[choice.last_event - first_sequence_]);
      if (delta != nullptr) ++delta->tokens;
    }
  }
  if (!choice.reader->stopped()) return;
  std::optional<RequestId> id;
  {
    std::lock_guard lock(mutex_);
    id = engine_id_;
  }
  if (id.has_value()) engine_->StopChoice(*id, index);
  const std::string& matched = choice.reader->stop_string();
  FinishChoice(index, StopKind::kStop, matched.empty() ? Matched(MatchedNothing{}) : Matched(MatchedString{matched}));
}

void ResponseStream::FinishChoice(int32_t index, StopKind reason, Matched matched) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  std::string undecoded;
  choice.reader->Finish(&pieces_, &undecoded);
  AppendPieces(index, pieces_);
  if (!undecoded.empty()) OpenDelta(index, OutputChannel::kContent).undecoded = std::move(undecoded);
  if (reason == StopKind::kStop && choice.reader->complete_calls() > 0) reason = StopKind::kToolCalls;
  only_reasoning_ |= reason == StopKind::kLength && choice.reasoning_tokens > 0 && !choice.has_content;
  choice.finished = true;
  choice.last_event = first_sequence_ + events_.size();
  events_.emplace_back(ChoiceFinishedEvent{index, reason, std::move(matched), choice.tokens});
}

void ResponseStream::ReadChoiceFinished(int32_t index, FinishReason reason, int32_t stop_token) {
  if (choices_[static_cast<size_t>(index)].finished) return;
  switch (reason) {
    case FinishReason::kStop: {
      Matched matched = MatchedNothing{};
      if (stop_token >= 0) {
        const auto& eos = options_.eos_token_ids;
        const bool is_eos = std::find(eos.begin(), eos.end(), stop_token) != eos.end();
        matched = is_eos ? Matched(MatchedEos{}) : Matched(MatchedToken{stop_token});
      }
      FinishChoice(index, StopKind::kStop, std::move(matched));
      break;
    }
    case FinishReason::kLength:
      FinishChoice(index, StopKind::kLength, MatchedNothing{});
      break;
    case FinishReason::kRepetition:
      FinishChoice(index, StopKind::kRepetition, MatchedNothing{});
      break;
    case FinishReason::kCancelled:
    case FinishReason::kError:
      break;  // the final status says why
  }
}

void ResponseStream::ReadFinished() {
  FinishedEvent event;
  {
    std::lock_guard lock(mutex_);
    event.status = final_status_;
    event.usage = usage_;
  }
  int32_t tokens = 0;
  bool tool_calls = false;
  for (const Choice& choice : choices_) {
    tokens += choice.tokens;
    event.reasoning_tokens += choice.reasoning_tokens;
    tool_calls |= choice.reader->complete_calls() > 0;
  }
  // What the client got: tokens that the engine made after a stop string do not count.
  event.usage.completion_tokens = tokens;
  ReportMetrics(tool_calls);
  finished_ = true;
  events_.emplace_back(std::move(event));
}

bool ResponseStream::Ready() const {
  if (events_.empty()) return false;
  const auto* delta = std::get_if<DeltaEvent>(&events_.front());
  if (delta == nullptr || finished_ || delta->tokens >= options_.coalesce_tokens) return true;
  const Choice& choice = choices_[static_cast<size_t>(delta->choice)];
  return choice.finished || choice.last_event != first_sequence_;  // nothing can be added to it any more
}

bool ResponseStream::Next(StreamEvent* event) {
  if (!Ready()) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  ++first_sequence_;
  if (std::holds_alternative<FinishedEvent>(*event)) options_.lease.reset();
  return true;
}

void ResponseStream::ReportMetrics(bool tool_calls) {
  Outcome outcome = OutcomeOf(final_status_, last_reason_);
  if (outcome == Outcome::kStop && tool_calls) outcome = Outcome::kToolCalls;
  if (options_.on_end) options_.on_end(outcome, final_status_, usage_);
  if (metrics_ == nullptr) return;
  if (only_reasoning_) metrics_->OnNoContent();
  metrics_->OnFinished(outcome, usage_);
}

}  // namespace k3
