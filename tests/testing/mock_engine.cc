#include "tests/testing/mock_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace k3::testing {

struct MockEngine::Live {
  struct Choice {
    int32_t generated = 0;
    bool stop_asked = false;
    bool finished = false;
  };
  std::unique_ptr<Request> request;
  std::vector<Choice> choices;
  int32_t prefilled = 0;
  bool admitted = false;
  bool cancelled = false;
  bool done = false;
  Clock::time_point submitted = Clock::now();
  Clock::time_point started;
  Clock::time_point first_token;
  RequestUsage usage;
};

MockEngine::MockEngine(Options options) : options_(std::move(options)) {
  load_.pages_total = options_.limits.latent_pages;
  load_.state_slots_total = options_.limits.state_slots;
  load_.snapshots_total = options_.limits.snapshot_slots;
  if (!options_.manual) thread_ = std::thread([this] { Run(); });
}

MockEngine::~MockEngine() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  for (auto& [id, live] : live_) {
    if (!live->done) Finish(*live, absl::UnavailableError("the engine ended"));
  }
}

absl::StatusOr<RequestId> MockEngine::Submit(std::unique_ptr<Request> request) {
  std::lock_guard lock(mutex_);
  if (!admitting_ || !load_.healthy) return absl::UnavailableError("the engine takes no more requests");
  const EngineLimits& limits = options_.limits;
  const int64_t need = static_cast<int64_t>(request->prompt_tokens.size()) + request->sampling.max_new_tokens;
  if (need > limits.max_model_len) {
    return absl::InvalidArgumentError(absl::StrCat(need, " tokens are more than ", limits.max_model_len));
  }
  if (need > limits.latent_pages * limits.page_size) {
    return absl::FailedPreconditionError(
        absl::StrCat(need, " tokens never fit into ", limits.latent_pages * limits.page_size));
  }
  if (request->deadline.has_value() && *request->deadline <= Clock::now()) {
    return absl::ResourceExhaustedError("the deadline cannot be met");
  }
  if (load_.waiting >= limits.max_queue) return absl::ResourceExhaustedError("the queue is full");
  auto live = std::make_unique<Live>();
  live->choices.resize(static_cast<size_t>(request->num_choices));
  live->usage.prompt_tokens = static_cast<int32_t>(request->prompt_tokens.size());
  last_request_ = Request();
  last_request_.external_id = request->external_id;
  last_request_.prompt_tokens = request->prompt_tokens;
  last_request_.sampling = request->sampling;
  last_request_.num_choices = request->num_choices;
  last_request_.priority = request->priority;
  last_request_.session_id = request->session_id;
  last_request_.cache_salt = request->cache_salt;
  last_request_.bypass_prefix_cache = request->bypass_prefix_cache;
  last_request_.deadline = request->deadline;
  live->request = std::move(request);
  const RequestId id = next_id_++;
  live_.emplace(id, std::move(live));
  ++load_.waiting;
  wake_.notify_all();
  return id;
}

void MockEngine::Cancel(RequestId id) {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(id);
  if (it != live_.end()) it->second->cancelled = true;
  ++cancels_;
  wake_.notify_all();
}

void MockEngine::StopChoice(RequestId id, int32_t choice) {
  std::lock_guard lock(mutex_);
  const auto it = live_.find(id);
  if (it != live_.end()) it->second->choices[static_cast<size_t>(choice)].stop_asked = true;
}

EngineLoad MockEngine::Load() const {
  std::lock_guard lock(mutex_);
  EngineLoad load = load_;
  if (load.running + load.waiting > 0) {
    load.seconds_since_step = std::chrono::duration<double>(Clock::now() - last_step_).count();
  }
  return load;
}

void MockEngine::FlushCache() {
  std::lock_guard lock(mutex_);
  ++flushes_;
}

int MockEngine::flushes() const {
  std::lock_guard lock(mutex_);
  return flushes_;
}

int MockEngine::cancels() const {
  std::lock_guard lock(mutex_);
  return cancels_;
}

void MockEngine::StopAdmission() {
  std::lock_guard lock(mutex_);
  admitting_ = false;
}

Request MockEngine::LastRequest() const {
  std::lock_guard lock(mutex_);
  Request copy;
  copy.external_id = last_request_.external_id;
  copy.prompt_tokens = last_request_.prompt_tokens;
  copy.sampling = last_request_.sampling;
  copy.num_choices = last_request_.num_choices;
  copy.priority = last_request_.priority;
  copy.session_id = last_request_.session_id;
  copy.cache_salt = last_request_.cache_salt;
  copy.bypass_prefix_cache = last_request_.bypass_prefix_cache;
  copy.deadline = last_request_.deadline;
  return copy;
}

void MockEngine::Pause() {
  std::lock_guard lock(mutex_);
  paused_ = true;
}

void MockEngine::Resume() {
  std::lock_guard lock(mutex_);
  paused_ = false;
  wake_.notify_all();
}

void MockEngine::Fail() {
  std::lock_guard lock(mutex_);
  load_.healthy = false;
  for (auto& [id, live] : live_) Finish(*live, absl::InternalError("device fault"));
  live_.clear();
}

void MockEngine::Step() {
  std::lock_guard lock(mutex_);
  StepLocked();
}

void MockEngine::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (paused_ || live_.empty()) {
      if (live_.empty()) last_step_ = Clock::now();
      wake_.wait_for(lock, std::chrono::milliseconds(50));
      continue;
    }
    StepLocked();
    lock.unlock();
    if (options_.step_time > Clock::duration::zero()) {
      std::this_thread::sleep_for(options_.step_time);
    } else {
      std::this_thread::yield();
    }
    lock.lock();
  }
}

int64_t MockEngine::PagesOf(const Live& live) const {
  const int64_t page = options_.limits.page_size;
  int64_t pages = 0;
  for (const Live::Choice& choice : live.choices) {
    if (!choice.finished) pages += (live.usage.prompt_tokens + choice.generated + page - 1) / page;
  }
  return pages;
}

void MockEngine::Finish(Live& live, const absl::Status& status) {
  live.done = true;
  live.admitted ? --load_.running : --load_.waiting;
  const Clock::time_point now = Clock::now();
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  if (live.admitted) {
    live.usage.queue_seconds = seconds(live.started - live.submitted);
    const bool has_tokens = live.usage.completion_tokens > 0;
    live.usage.prefill_seconds = seconds((has_tokens ? live.first_token : now) - live.started);
    if (has_tokens) live.usage.decode_seconds = seconds(now - live.first_token);
  } else {
    live.usage.queue_seconds = seconds(now - live.submitted);
  }
  TokenSink& sink = *live.request->sink;
  for (size_t i = 0; i < live.choices.size(); ++i) {
    if (live.choices[i].finished) continue;
    live.choices[i].finished = true;
    sink.OnChoiceFinished(
        static_cast<int32_t>(i),
        status.code() == absl::StatusCode::kInternal ? FinishReason::kError : FinishReason::kCancelled, -1);
  }
  sink.OnFinished(status, live.usage);
}

void MockEngine::StepLocked() {
  const Clock::time_point now = Clock::now();
  for (auto& [id, live] : live_) {
    TokenSink& sink = *live->request->sink;
    const SamplingParams& sampling = live->request->sampling;
    if (live->cancelled) {
      Finish(*live, absl::CancelledError("cancelled"));
      continue;
    }
    if (live->request->deadline.has_value() && *live->request->deadline <= now) {
      Finish(*live, absl::DeadlineExceededError("the deadline has passed"));
      continue;
    }
    if (!live->admitted) {
      if (load_.running >= options_.limits.max_num_seqs) continue;
      live->admitted = true;
      live->started = now;
      --load_.waiting;
      ++load_.running;
      sink.OnAdmitted(0);
    }
    const int32_t total = live->usage.prompt_tokens;
    if (live->prefilled < total) {
      const int32_t chunk = std::min(options_.prefill_chunk, total - live->prefilled);
      live->prefilled += chunk;
      load_.prompt_tokens += static_cast<uint64_t>(chunk);
      sink.OnPrefillProgress(live->prefilled, total);
      if (live->prefilled < total) continue;
      if (sampling.prompt_logprobs) {
        for (int32_t i = 1; i < total; ++i) sink.OnPromptLogprob(i, TokenLogprob{-0.5f * static_cast<float>(i), {}});
      }
    }
    bool all_finished = true;
    for (size_t i = 0; i < live->choices.size(); ++i) {
      Live::Choice& choice = live->choices[i];
      const auto index = static_cast<int32_t>(i);
      if (choice.finished) continue;
      const auto finish = [&](FinishReason reason, int32_t token) {
        choice.finished = true;
        sink.OnChoiceFinished(index, reason, token);
      };
      if (choice.stop_asked) {
        finish(FinishReason::kStop, -1);
        continue;
      }
      if (choice.generated >= sampling.max_new_tokens) {
        finish(FinishReason::kLength, -1);
        continue;
      }
      const int32_t token =
          options_.script ? options_.script(*live->request, index, choice.generated) : 100 + choice.generated % 1000;
      if (live->usage.completion_tokens == 0) live->first_token = Clock::now();
      ++choice.generated;
      ++live->usage.completion_tokens;
      ++load_.generated_tokens;
      if (sampling.top_logprobs >= 0) {
        std::vector<TopLogprob> top;
        for (int32_t k = 0; k < sampling.top_logprobs; ++k) top.push_back({token + k, -0.25f - static_cast<float>(k)});
        const TokenLogprob logprob{-0.25f, top};
        sink.OnToken(index, token, &logprob);
      } else {
        sink.OnToken(index, token, nullptr);
      }
      const auto contains = [token](const std::vector<int32_t>& ids) {
        return std::find(ids.begin(), ids.end(), token) != ids.end();
      };
      if (choice.generated >= sampling.min_new_tokens &&
          (contains(sampling.stop_token_ids) || (!sampling.ignore_eos && contains(options_.eos_token_ids)))) {
        finish(FinishReason::kStop, token);
      } else if (choice.generated >= sampling.max_new_tokens) {
        finish(FinishReason::kLength, -1);
      } else {
        all_finished = false;
      }
    }
    if (all_finished) Finish(*live, absl::OkStatus());
  }
  std::erase_if(live_, [](const auto& entry) { return entry.second->done; });
  load_.pages_used = 0;
  load_.state_slots_used = 0;
  for (const auto& [id, live] : live_) {
    if (!live->admitted) continue;
    load_.pages_used += PagesOf(*live);
    for (const Live::Choice& choice : live->choices) load_.state_slots_used += choice.finished ? 0 : 1;
  }
  load_.pages_peak = std::max(load_.pages_peak, load_.pages_used);
  load_.state_slots_peak = std::max(load_.state_slots_peak, load_.state_slots_used);
  ++load_.steps;
  last_step_ = Clock::now();
}

}  // namespace k3::testing
