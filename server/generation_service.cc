#include "server/generation_service.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine_refusal.h"
#include "server/error_details.h"
#include "server/grammar/answer_grammar.h"
#include "server/request_validation.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

// Text up to this size is encoded on the caller's thread: about a millisecond.
constexpr size_t kInlineTextBytes = 32 << 10;

absl::Status GrammarRefusal(const absl::Status& status, const std::string& path) {
  if (status.code() == absl::StatusCode::kInvalidArgument) {
    return WithClientPath(FieldError(path, Excerpt(std::string(status.message()), 1000)));
  }
  if (status.code() != absl::StatusCode::kResourceExhausted) return status;
  ErrorDetails details;
  details.reason = "queue_full";
  details.quotas.push_back({"grammars", std::string(status.message())});
  details.retry_after = absl::Seconds(2);
  return WithDetails(status, details);
}

// Nothing is asked of the answer's form but that it calls no tools.
bool ForbidsToolsOnly(const GenerationRequest& request) {
  const auto* chat = std::get_if<ChatRequest>(&request.input);
  return request.constraint.kind == RequestedConstraint::Kind::kNone && chat != nullptr &&
         chat->options.tool_choice == ToolChoice::kNone;
}

}  // namespace

std::string MakeRequestId(const std::string& prefix) {
  static thread_local std::mt19937_64 generator{std::random_device{}()};
  return absl::StrFormat("%s%016x%08x", prefix, generator(), static_cast<uint32_t>(generator()));
}

GenerationService::GenerationService(Options options, ServerHealth* health, Metrics* metrics)
    : options_(std::move(options)), health_(health), metrics_(metrics), text_pool_(options_.text_threads) {}

GenerationService::~GenerationService() {
  const std::shared_ptr<const ServedModel> model = this->model();
  if (model != nullptr && model->grammars != nullptr) model->grammars->Stop();  // what waits there comes back here
}

void GenerationService::Install(std::shared_ptr<const ServedModel> model) {
  std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

std::shared_ptr<const ServedModel> GenerationService::model() const {
  std::lock_guard lock(mutex_);
  return model_;
}

absl::StatusOr<std::shared_ptr<const ServedModel>> GenerationService::ModelFor(const std::string& name) const {
  std::shared_ptr<const ServedModel> model = this->model();
  if (model == nullptr) {
    absl::Status status = health_->Admission();
    if (status.ok()) status = UnavailableFor("loading", "the model is loading", absl::Seconds(2));
    return status;
  }
  if (name.empty() || std::find(model->names.begin(), model->names.end(), name) != model->names.end()) return model;
  ErrorDetails details;
  details.reason = "model_not_found";
  details.fields.push_back({"model", "names no served model"});
  details.resource = ErrorDetails::Resource{"model", Excerpt(name)};
  return WithDetails(absl::NotFoundError(absl::StrCat("the model \"", Excerpt(name), "\" is not served here")),
                     details);
}

void GenerationService::RunTextWork(size_t bytes, std::function<void()> work,
                                    const std::function<void(absl::Status)>& refuse) {
  if (bytes <= kInlineTextBytes) return work();
  // One is taken whatever its size; front ends have limits for that.
  const size_t held = queued_bytes_.fetch_add(bytes);
  const std::shared_ptr<void> count(nullptr, [this, bytes](void*) { queued_bytes_.fetch_sub(bytes); });
  const bool fits = held == 0 || held + bytes <= options_.max_queued_bytes;
  if (fits && text_pool_.TryPost([work = std::move(work), count] { work(); }, options_.max_queued_prompts)) return;
  ErrorDetails details;
  details.reason = "queue_full";
  details.quotas.push_back({"text", "too many large prompts wait to be encoded"});
  details.retry_after = absl::Seconds(2);
  refuse(WithDetails(absl::ResourceExhaustedError("too many large prompts wait to be encoded"), details));
}

// All that is known before the request goes to the engine.
struct GenerationService::Prepared {
  std::shared_ptr<const ServedModel> model;
  EffectiveSampling effective;
  RequestPrompt prompt;
  std::optional<AnswerGrammar> grammar;
};

absl::StatusOr<GenerationService::Prepared> GenerationService::Prepare(GenerationRequest& request,
                                                                       const CancelFlag& cancelled,
                                                                       const Origin& origin) const {
  if (cancelled->load()) return absl::CancelledError("the client has gone");
  // What a batch brings later belongs to a request that is let in already.
  absl::Status status = origin.batch == nullptr ? health_->Admission() : absl::OkStatus();
  if (!status.ok()) return status;
  absl::StatusOr<std::shared_ptr<const ServedModel>> found = ModelFor(request.model);
  if (!found.ok()) return found.status();
  const ServedModel& model = **found;
  if (options_.request_timeout.has_value()) {
    const Clock::time_point begin = origin.batch == nullptr ? origin.arrival : origin.batch->arrival;
    const Clock::time_point limit = begin + *options_.request_timeout;
    request.deadline = request.deadline.has_value() ? std::min(*request.deadline, limit) : limit;
  }
  if (request.deadline.has_value() && *request.deadline <= Clock::now()) {
    return absl::DeadlineExceededError("the deadline had passed before the request was started");
  }
  status = CheckImplemented(request);
  if (!status.ok()) return status;
  const EngineLimits limits = model.engine->Limits();
  absl::StatusOr<EffectiveSampling> effective =
      ResolveSampling(request, model, limits, {.vendor_strict = options_.vendor_strict});
  if (!effective.ok()) return effective.status();
  absl::StatusOr<RequestPrompt> prompt = PromptOf(model, request, prompt_defaults());
  if (!prompt.ok()) return prompt.status();
  status = ResolveLength(request, static_cast<int64_t>(prompt->ids.size()), limits, &*effective);
  if (!status.ok()) return status;
  ChatPrompt opening;
  opening.open_channel = prompt->open_channel;
  absl::StatusOr<std::optional<AnswerGrammar>> grammar =
      BuildAnswerGrammar(request, *model.tokenizer, model.renderer->format(), prompt->is_chat ? &opening : nullptr);
  if (!grammar.ok()) return WithClientPath(grammar.status());
  if (grammar->has_value() && model.grammars == nullptr) {
    // Without a grammar engine a forbidden call is only told to the model, as it always is.
    if (ForbidsToolsOnly(request)) {
      grammar->reset();
    } else {
      return UnimplementedFeature((*grammar)->path, "this server was built without structured output");
    }
  }
  return Prepared{*std::move(found), *std::move(effective), *std::move(prompt), *std::move(grammar)};
}

void GenerationService::StartNow(const std::shared_ptr<GenerationRequest>& request, const CancelFlag& cancelled,
                                 const Origin& origin, const StartDone& done) {
  absl::StatusOr<Prepared> ready = Prepare(*request, cancelled, origin);
  if (!ready.ok()) return done(ready.status());
  auto prepared = std::make_shared<Prepared>(*std::move(ready));
  const auto submit = [this, request, origin, prepared,
                       done](std::vector<std::unique_ptr<TokenConstraint>> constraints) {
    done(Submit(*prepared->model, *request, std::move(prepared->effective), std::move(prepared->prompt),
                std::move(constraints), origin));
  };
  if (!prepared->grammar.has_value()) return submit({});
  // The pool outlives its callbacks, so they need not hold it.
  GrammarPool* const pool = prepared->model->grammars.get();
  const auto compiled = [this, request, cancelled, prepared, submit, done](GrammarPool::Result result) {
    if (cancelled->load()) return done(absl::CancelledError("the client has gone"));
    if (request->deadline.has_value() && *request->deadline <= Clock::now()) {
      return done(absl::DeadlineExceededError("the deadline passed while the grammar was compiled"));
    }
    const AnswerGrammar& grammar = *prepared->grammar;
    if (!result.ok()) return done(GrammarRefusal(result.status(), grammar.path));
    std::vector<std::unique_ptr<TokenConstraint>> constraints;
    for (int32_t i = 0; i < prepared->effective.num_choices; ++i) {
      constraints.push_back((*result)->NewConstraint(grammar.begun));
      if (constraints.back() == nullptr) {
        return done(InvalidField("chat.messages", "the text to continue does not fit what the answer must look like"));
      }
    }
    submit(std::move(constraints));
  };
  pool->Get(prepared->grammar->root, [pool, prepared, compiled](GrammarPool::Result result) {
    const bool refused = !result.ok() && result.status().code() == absl::StatusCode::kInvalidArgument;
    if (!refused || !prepared->grammar->relaxed.has_value()) return compiled(std::move(result));
    pool->Get(*prepared->grammar->relaxed, compiled);
  });
}

std::shared_ptr<RequestBatch> GenerationService::OpenBatch(Clock::time_point arrival) {
  if (!health_->Admission().ok()) return nullptr;
  open_batches_.fetch_add(1);
  // Released without the lock, which may be held by who lets go of it.
  return {new RequestBatch(arrival), [this](RequestBatch* batch) {
            delete batch;
            open_batches_.fetch_sub(1);
          }};
}

absl::StatusOr<uint64_t> GenerationService::OpenStream(uint64_t caller, const Origin& origin,
                                                       std::shared_ptr<void>* lease) {
  std::lock_guard lock(mutex_);
  if (caller != 0) {
    int64_t& count = streams_per_caller_[caller];
    const int64_t limit = options_.max_streams_per_key.value_or(std::numeric_limits<int64_t>::max());
    if (count >= limit) {
      ErrorDetails details;
      details.reason = "too_many_streams";
      details.numbers = {{"max_streams_per_key", absl::StrCat(limit)}};
      const std::string message = absl::StrCat("this API key has ", count, " requests in progress, its limit");
      details.quotas.push_back({"streams_per_key", message});
      details.retry_after = absl::Seconds(1);
      return WithDetails(absl::ResourceExhaustedError(message), details);
    }
    ++count;
  }
  const uint64_t key = next_stream_++;
  streams_[key].origin = origin;
  *lease = std::shared_ptr<void>(this, [this, key, caller](void*) {
    std::lock_guard lock(mutex_);
    streams_.erase(key);
    const auto it = streams_per_caller_.find(caller);
    if (it != streams_per_caller_.end() && --it->second == 0) streams_per_caller_.erase(it);
  });
  return key;
}

RequestSpan GenerationService::SpanOf(const GenerationRequest& request, Clock::time_point arrival) const {
  RequestSpan span;
  span.context = request.trace;
  span.name = std::holds_alternative<ChatRequest>(request.input) ? "chat" : "text_completion";
  span.request_id = request.request_id;
  if (const auto model = this->model()) span.model = model->names.front();
  span.end = std::chrono::system_clock::now();
  span.start = span.end - std::chrono::duration_cast<std::chrono::system_clock::duration>(Clock::now() - arrival);
  return span;
}

absl::StatusOr<std::shared_ptr<ResponseStream>> GenerationService::Submit(
    const ServedModel& model, GenerationRequest& request, EffectiveSampling effective, RequestPrompt prompt,
    std::vector<std::unique_ptr<TokenConstraint>> constraints, const Origin& origin) {
  const auto prompt_tokens = static_cast<int32_t>(prompt.ids.size());
  const int32_t num_choices = effective.num_choices;
  ResponseStream::Options stream_options;
  stream_options.accepted.request_id = request.request_id;
  stream_options.accepted.model = model.names.front();
  stream_options.accepted.weights_version = model.weights_version;
  stream_options.accepted.prompt_tokens = prompt_tokens;
  stream_options.accepted.opening_tokens = prompt.opening_ids;
  stream_options.accepted.effective = effective;
  stream_options.eos_token_ids = model.eos_token_ids;
  if (effective.params.prompt_logprobs) stream_options.prompt_tokens = prompt.ids;
  if (effective.params.prompt_logprobs || request.output.token_ids) stream_options.accepted.prompt_ids = prompt.ids;
  stream_options.token_ids = request.output.token_ids;
  stream_options.coalesce_tokens = static_cast<int32_t>(std::min<uint32_t>(request.output.coalesce_tokens, 1 << 20));
  stream_options.drain_eagerly = !request.stopping.stop.empty() || !request.parallel_tool_calls;
  ChoiceReader::Options reader;
  reader.tokenizer = model.tokenizer;
  reader.stop_strings = request.stopping.stop;
  reader.parallel_tool_calls = request.parallel_tool_calls;
  if (prompt.is_chat) {
    reader.format = model.renderer->format();
    reader.open_channel = prompt.open_channel;
    reader.history_calls = prompt.history_calls;
  }
  for (int32_t i = 0; i < num_choices; ++i) stream_options.readers.push_back(std::make_unique<ChoiceReader>(reader));
  const absl::StatusOr<uint64_t> key = OpenStream(request.caller, origin, &stream_options.lease);
  if (!key.ok()) return key.status();
  if (options_.spans != nullptr && request.trace.sampled) {
    stream_options.on_end = [exporter = options_.spans, span = SpanOf(request, origin.arrival)](
                                Outcome outcome, const absl::Status& status, const RequestUsage& usage) mutable {
      span.end = std::chrono::system_clock::now();
      span.ok = status.ok();
      span.outcome = OutcomeName(outcome);
      span.prompt_tokens = usage.prompt_tokens;
      span.cached_tokens = usage.cached_tokens;
      span.completion_tokens = usage.completion_tokens;
      span.queue_seconds = usage.queue_seconds;
      span.prefill_seconds = usage.prefill_seconds;
      span.decode_seconds = usage.decode_seconds;
      exporter->Add(std::move(span));
    };
  }
  auto stream = std::make_shared<ResponseStream>(model.engine, std::move(stream_options));
  {
    std::lock_guard lock(mutex_);
    streams_[*key].stream = stream;
  }

  auto engine_request = std::make_unique<Request>();
  engine_request->external_id = request.request_id;
  engine_request->prompt_tokens = std::move(prompt.ids);
  engine_request->sampling = std::move(effective.params);
  engine_request->num_choices = num_choices;
  engine_request->priority = request.priority;
  engine_request->session_id = std::move(request.session_id);
  engine_request->cache_salt = std::move(request.cache.salt);
  engine_request->bypass_prefix_cache = request.cache.bypass;
  engine_request->deadline = request.deadline;
  engine_request->constraints = std::move(constraints);
  engine_request->sink = stream;
  const absl::StatusOr<RequestId> id = model.engine->Submit(std::move(engine_request));
  if (!id.ok()) return EngineRefusal(id.status(), *model.engine, request.deadline.has_value());
  stream->SetAccepted(*id,
                      metrics_ == nullptr ? nullptr : metrics_->OnAccepted(prompt_tokens, num_choices, origin.arrival));
  return stream;
}

void GenerationService::Start(GenerationRequest request, const CancelFlag& cancelled, StartDone done,
                              std::shared_ptr<RequestBatch> batch) {
  const Origin origin{Clock::now(), std::move(batch)};
  const size_t bytes = TextBytes(request);
  auto shared = std::make_shared<GenerationRequest>(std::move(request));
  const auto finish = [this, shared, arrival = origin.arrival,
                       done = std::move(done)](absl::StatusOr<std::shared_ptr<ResponseStream>> stream) {
    if (!stream.ok() && !(shared->comes_again && absl::IsResourceExhausted(stream.status()))) {
      CountRefusal(stream.status());
      if (options_.spans != nullptr && shared->trace.sampled) {
        RequestSpan span = SpanOf(*shared, arrival);
        span.ok = false;
        span.outcome = absl::StatusCodeToString(stream.status().code());
        options_.spans->Add(std::move(span));
      }
    }
    done(std::move(stream));
  };
  RunTextWork(
      bytes, [this, shared, cancelled, origin, finish] { StartNow(shared, cancelled, origin, finish); },
      [finish](const absl::Status& status) { finish(status); });
}

void GenerationService::CountRefusal(const absl::Status& status) {
  if (metrics_ != nullptr) metrics_->OnRejected(status.code());
}

void GenerationService::Render(GenerationRequest request, IdsDone done) {
  const size_t bytes = TextBytes(request);
  auto shared = std::make_shared<GenerationRequest>(std::move(request));
  RunTextWork(
      bytes,
      [this, shared, done] {
        const auto model = ModelFor(shared->model);
        if (!model.ok()) return done(model.status());
        absl::StatusOr<RequestPrompt> prompt = PromptOf(**model, *shared, prompt_defaults());
        if (!prompt.ok()) return done(prompt.status());
        done(std::move(prompt->ids));
      },
      [done](const absl::Status& status) { done(status); });
}

void GenerationService::Tokenize(std::string model_name, std::string text, bool control_tokens, IdsDone done) {
  auto shared = std::make_shared<std::string>(std::move(text));
  RunTextWork(
      shared->size(),
      [this, model_name = std::move(model_name), shared, control_tokens, done] {
        const auto model = ModelFor(model_name);
        if (!model.ok()) return done(model.status());
        auto ids = (*model)->tokenizer->Encode(*shared, control_tokens ? EncodeMode::kControl : EncodeMode::kOrdinary);
        if (!ids.ok()) return done(InvalidField("text", std::string(ids.status().message())));
        done(std::move(ids));
      },
      [done](const absl::Status& status) { done(status); });
}

absl::StatusOr<std::string> GenerationService::Detokenize(const std::string& model_name,
                                                          const std::vector<uint32_t>& ids,
                                                          bool skip_control_tokens) const {
  const auto model = ModelFor(model_name);
  if (!model.ok()) return model.status();
  const Tokenizer& tokenizer = *(*model)->tokenizer;
  const absl::Status status = CheckTokenIds(ids, tokenizer.vocab_size(), "token_ids");
  if (!status.ok()) return status;
  std::vector<int32_t> kept;
  kept.reserve(ids.size());
  for (const uint32_t id : ids) {
    const auto token = static_cast<int32_t>(id);
    if (!skip_control_tokens || !tokenizer.IsSpecial(token)) kept.push_back(token);
  }
  return tokenizer.Decode(kept);
}

size_t GenerationService::active() const {
  std::lock_guard lock(mutex_);
  return streams_.size() + open_batches_.load();
}

void GenerationService::AbortAll(const absl::Status& status) {
  std::vector<std::shared_ptr<ResponseStream>> streams;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : streams_) {
      if (auto stream = entry.stream.lock()) streams.push_back(std::move(stream));
    }
  }
  for (const auto& stream : streams) stream->Abort(status);
}

void GenerationService::EndOverdue() {
  if (!options_.queue_timeout.has_value()) return;
  const Clock::time_point begin = Clock::now() - *options_.queue_timeout;
  // Held here when their clients have left: they must end outside the lock, which the end of a stream takes.
  std::vector<std::pair<std::shared_ptr<ResponseStream>, std::shared_ptr<RequestBatch>>> overdue;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : streams_) {
      const std::shared_ptr<RequestBatch>& batch = entry.origin.batch;
      if ((batch == nullptr ? entry.origin.arrival : batch->arrival) > begin) continue;
      if (auto stream = entry.stream.lock()) overdue.emplace_back(std::move(stream), batch);
    }
  }
  // A batch waits from its start until the first of its prompts has had a slot.
  for (const auto& [stream, batch] : overdue) {
    if (batch != nullptr && stream->HasLeftQueue()) batch->left_queue = true;
  }
  for (const auto& [stream, batch] : overdue) {
    if (stream->HasLeftQueue() || (batch != nullptr && batch->left_queue)) continue;
    const double seconds = std::chrono::duration<double>(*options_.queue_timeout).count();
    const std::string message = absl::StrFormat("the request has waited in the queue for %g s, the limit", seconds);
    ErrorDetails details;
    details.reason = "queue_timeout";
    details.quotas.push_back({"queue", message});
    details.retry_after = absl::Seconds(std::clamp<int64_t>(static_cast<int64_t>(seconds), 1, 60));
    stream->Abort(WithDetails(absl::ResourceExhaustedError(message), details));
  }
}

}  // namespace k3
