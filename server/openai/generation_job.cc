#include "server/openai/generation_job.h"

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/openai/openai_errors.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

std::unique_ptr<ReplyWriter> MakeWriter(ReplyHeader header, const OpenAiReplyOptions& reply, size_t prompts) {
  if (reply.route == OpenAiRoute::kChat) {
    return reply.stream ? MakeChatStreamWriter(std::move(header), reply)
                        : MakeChatReplyWriter(std::move(header), reply);
  }
  const auto count = static_cast<int32_t>(prompts);
  return reply.stream ? MakeCompletionStreamWriter(std::move(header), reply, count)
                      : MakeCompletionReplyWriter(std::move(header), reply, count);
}

}  // namespace

std::shared_ptr<GenerationJob> GenerationJob::Start(GenerationService* service, OpenAiRequest request,
                                                    ReplyHeader header, std::string request_id, HttpWaker waker) {
  std::shared_ptr<GenerationJob> job(
      new GenerationJob(service, std::move(request), std::move(header), std::move(request_id), std::move(waker)));
  job->StartMore();
  return job;
}

GenerationJob::GenerationJob(GenerationService* service, OpenAiRequest request, ReplyHeader header,
                             std::string request_id, HttpWaker waker)
    : service_(service),
      reply_(request.reply),
      max_tokens_field_(std::move(request.max_tokens_field)),
      request_id_(std::move(request_id)),
      trace_(request.common.trace),
      waker_(std::move(waker)),
      cancelled_(std::make_shared<std::atomic<bool>>(false)),
      writer_(MakeWriter(std::move(header), reply_, request.prompts.size())),
      common_(std::move(request.common)) {
  common_.request_id = request_id_;
  if (request.prompts.size() > 1) batch_ = service_->OpenBatch(arrival_);
  prompts_.resize(request.prompts.size());
  for (size_t i = 0; i < prompts_.size(); ++i) prompts_[i].input = std::move(request.prompts[i]);
}

void GenerationJob::StartMore() {
  while (running_ < kMaxRunning && (!hold_starts_ || running_ == 0) && failure_.ok()) {
    if (!retry_.empty()) {
      const size_t index = retry_.back();
      retry_.pop_back();
      StartPrompt(index);
    } else if (next_ < prompts_.size()) {
      StartPrompt(next_++);
    } else {
      break;
    }
  }
}

void GenerationJob::StartPrompt(size_t index) {
  Prompt& prompt = prompts_[index];
  ++running_;
  prompt.finished_before = finished_;
  // Only a batch needs its parts again, and only then is a copy worth its memory.
  const bool batch = prompts_.size() > 1;
  GenerationRequest request = batch ? common_ : std::move(common_);
  request.input = batch ? *prompt.input : std::move(*prompt.input);
  request.comes_again = batch;
  // The prompts of a batch are spans below the request's.
  if (index > 0) request.trace = ContinueTrace(trace_.Header(), false);
  service_->Start(
      std::move(request), cancelled_,
      [self = shared_from_this(), index](absl::StatusOr<std::shared_ptr<ResponseStream>> stream) {
        if (absl::IsResourceExhausted(stream.status())) self->hold_starts_ = true;
        {
          std::lock_guard lock(self->mutex_);
          self->arrivals_.emplace_back(index, std::move(stream));
        }
        self->waker_.Wake();
      },
      batch_);
}

void GenerationJob::TakeArrivals() {
  std::vector<Arrival> arrivals;
  {
    std::lock_guard lock(mutex_);
    arrivals.swap(arrivals_);
  }
  for (auto& [index, stream] : arrivals) {
    Prompt& prompt = prompts_[index];
    if (!stream.ok()) {
      --running_;
      // A batch waits for room that it takes up itself, or took up when this one asked; a lone request is told to come
      // back.
      const bool full = absl::IsResourceExhausted(stream.status()) && prompts_.size() > 1;
      if (full && (running_ > 0 || finished_ > prompt.finished_before)) {
        retry_.push_back(index);
        continue;
      }
      if (full) service_->CountRefusal(stream.status());
      Fail(index, stream.status());
      continue;
    }
    prompt.input.reset();
    prompt.stream = *std::move(stream);
    eager_ |= prompt.stream->drain_eagerly();
    if (cancelled_->load()) prompt.stream->Cancel();
    prompt.stream->SetNotify([waker = waker_] { waker.Wake(); });
  }
}

void GenerationJob::ReadEvents(size_t index) {
  Prompt& prompt = prompts_[index];
  const auto number = static_cast<int32_t>(index);
  StreamEvent event;
  while (failure_.ok() && prompt.stream->Next(&event)) {
    if (auto* delta = std::get_if<DeltaEvent>(&event)) {
      writer_->OnDelta(number, std::move(*delta), &out_);
    } else if (auto* call = std::get_if<ToolCallEvent>(&event)) {
      writer_->OnToolCall(number, std::move(*call), &out_);
    } else if (auto* accepted = std::get_if<AcceptedEvent>(&event)) {
      accepted_ = true;
      if (batch_ != nullptr) batch_->left_queue = true;
      writer_->OnAccepted(number, std::move(*accepted), &out_);
    } else if (auto* rows = std::get_if<PromptLogprobsEvent>(&event)) {
      writer_->OnPromptLogprobs(number, std::move(*rows), &out_);
    } else if (auto* choice = std::get_if<ChoiceFinishedEvent>(&event)) {
      writer_->OnChoiceFinished(number, std::move(*choice), &out_);
    } else if (auto* finished = std::get_if<FinishedEvent>(&event)) {
      prompt.finished = true;
      --running_;
      ++finished_;
      hold_starts_ = false;
      usage_.prompt_tokens += finished->usage.prompt_tokens;
      usage_.completion_tokens += finished->usage.completion_tokens;
      usage_.cached_tokens += finished->usage.cached_tokens;
      usage_.routing_rank = finished->usage.routing_rank;  // of several prompts the last one's
      usage_.routing_epoch = finished->usage.routing_epoch;
      if (finished->status.ok()) {
        writer_->OnFinished(number, std::move(*finished), &out_);
      } else {
        Fail(index, finished->status);
      }
      return;
    }
  }
}

void GenerationJob::OnReady(HttpWriter& writer) {
  TakeArrivals();
  for (size_t i = 0; i < prompts_.size() && failure_.ok(); ++i) {
    Prompt& prompt = prompts_[i];
    if (!prompt.stream || prompt.finished) continue;
    prompt.stream->Drain();
    ReadEvents(i);
    if (prompt.finished) prompt.stream.reset();
  }
  if (!failure_.ok() || finished_ == prompts_.size()) return Finish(writer);
  StartMore();
  if (!reply_.stream) return;
  if (accepted_) StartStream(writer);
  if (writer.started() && !out_.empty()) {
    writer.body().append(out_);
    out_.clear();
  }
}

void GenerationJob::OnBlocked() {
  for (Prompt& prompt : prompts_) {
    if (prompt.stream) prompt.stream->Drain();
  }
}

void GenerationJob::OnSilence(HttpWriter& writer) {
  // All is checked and in the queue: the header may go out, and tells proxies that somebody is there.
  const bool all_started = next_ == prompts_.size() && running_ == prompts_.size() - finished_;
  if (!reply_.stream || !reply_.heartbeat || !(accepted_ || all_started)) return;
  StartStream(writer);
  writer.body().append(": waiting\n\n");
}

void GenerationJob::OnAbort(HttpAbort why) {
  CancelAll();
  batch_.reset();
  if (why == HttpAbort::kStalled) spdlog::warn("http request={} ended: its reader took nothing", request_id_);
  Log(499);
}

void GenerationJob::StartStream(HttpWriter& writer) {
  if (writer.started()) return;
  HttpResponse head;
  head.content_type = "text/event-stream";
  head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  AddIdHeaders(head);
  writer.StartStream(std::move(head));
}

void GenerationJob::Fail(size_t index, const absl::Status& status) {
  if (!failure_.ok()) return;
  failure_ = status;
  failed_prompt_ = index;
  CancelAll();
}

void GenerationJob::CancelAll() {
  cancelled_->store(true);
  for (Prompt& prompt : prompts_) {
    if (prompt.stream && !prompt.finished) prompt.stream->Cancel();
  }
  std::lock_guard lock(mutex_);
  for (auto& [index, stream] : arrivals_) {
    if (stream.ok()) (*stream)->Cancel();
  }
}

void GenerationJob::Finish(HttpWriter& writer) {
  batch_.reset();
  if (!failure_.ok()) {
    const std::string prompt = prompts_.size() > 1 ? absl::StrCat("prompt[", failed_prompt_, "]") : "prompt";
    const OpenAiError error = ErrorOf(failure_, reply_.route, max_tokens_field_, request_id_, prompt);
    if (error.status == 500) spdlog::error("http request={} failed: {}", request_id_, failure_.ToString());
    Log(error.status);
    if (writer.started()) {
      writer.body().append(out_).append("data: ").append(ErrorBody(error)).append("\n\n").append(kStreamEnd);
      return writer.Finish();
    }
    HttpResponse response = ErrorResponse(error);
    AddIdHeaders(response);
    return writer.Respond(std::move(response));
  }
  Log(200);
  if (reply_.stream) {
    StartStream(writer);
    writer_->OnEnd(&out_);
    writer.body().append(out_);
    return writer.Finish();
  }
  HttpResponse response;
  AddIdHeaders(response);
  writer_->OnEnd(&response.body);
  writer.Respond(std::move(response));
}

void GenerationJob::AddIdHeaders(HttpResponse& response) const {
  response.headers.emplace_back("x-request-id", request_id_);
  if (trace_.active()) response.headers.emplace_back("traceparent", trace_.Header());
}

RequestUsage GenerationJob::UsageSoFar() const {
  RequestUsage sum = usage_;
  for (const Prompt& prompt : prompts_) {
    if (prompt.stream == nullptr || prompt.finished) continue;
    const RequestUsage usage = prompt.stream->UsageSoFar();
    sum.prompt_tokens += usage.prompt_tokens;
    sum.cached_tokens += usage.cached_tokens;
    sum.completion_tokens += usage.completion_tokens;
  }
  return sum;
}

void GenerationJob::Log(int status) const {
  const RequestUsage usage = UsageSoFar();
  spdlog::info(
      "http request={} route={} status={} stream={} prompt_tokens={} cached_tokens={} completion_tokens={} "
      "seconds={:.3f}{}{}",
      request_id_, reply_.route == OpenAiRoute::kChat ? "chat" : "completions", status, reply_.stream,
      usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens,
      std::chrono::duration<double>(Clock::now() - arrival_).count(),
      usage.routing_rank >= 0 ? absl::StrCat(" routing_epoch=", usage.routing_rank, ".", usage.routing_epoch)
                              : std::string(),
      trace_.LogField());
}

}  // namespace k3
