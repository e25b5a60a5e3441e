#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/generation_service.h"
#include "server/http/http_handler.h"
#include "server/openai/openai_request.h"
#include "server/openai/reply_writer.h"

namespace k3 {

// One request to a completion route, from its start to its last byte: starts the prompts, drains their streams, writes
// the reply. Errors up to the moment when the model begins are ordinary replies; later ones are events of the stream.
// All of it runs on the connection's thread; only starts may end elsewhere, and hand their result over.
class GenerationJob final : public HttpJob, public std::enable_shared_from_this<GenerationJob> {
 public:
  // Starts the request. `request_id` is the client's or made for it.
  static std::shared_ptr<GenerationJob> Start(GenerationService* service, OpenAiRequest request, ReplyHeader header,
                                              std::string request_id, HttpWaker waker);

  void OnReady(HttpWriter& writer) override;
  bool WantsBlockedWakes() const override { return eager_; }
  void OnBlocked() override;
  void OnSilence(HttpWriter& writer) override;
  void OnAbort(HttpAbort why) override;

 private:
  // A batch is fed to the engine in pieces, so that it does not fill the queue by itself.
  static constexpr size_t kMaxRunning = 64;

  struct Prompt {
    std::optional<GenerationRequest::Input> input;  // until it has started; it may have to be started again
    std::shared_ptr<ResponseStream> stream;
    bool finished = false;
    size_t finished_before = 0;  // prompts of the batch when it was started
  };
  using Arrival = std::pair<size_t, absl::StatusOr<std::shared_ptr<ResponseStream>>>;

  GenerationJob(GenerationService* service, OpenAiRequest request, ReplyHeader header, std::string request_id,
                HttpWaker waker);

  void StartMore();
  void StartPrompt(size_t index);
  void TakeArrivals();
  // Reads the events that wait in a prompt's stream.
  void ReadEvents(size_t index);
  void StartStream(HttpWriter& writer);
  void Fail(size_t index, const absl::Status& status);
  void Finish(HttpWriter& writer);
  void CancelAll();
  void Log(int status) const;
  RequestUsage UsageSoFar() const;
  void AddIdHeaders(HttpResponse& response) const;

  GenerationService* const service_;
  const OpenAiReplyOptions reply_;
  const std::string max_tokens_field_;
  const std::string request_id_;
  const TraceContext trace_;
  const HttpWaker waker_;
  const GenerationService::CancelFlag cancelled_;
  const Clock::time_point arrival_ = Clock::now();
  std::unique_ptr<ReplyWriter> writer_;

  std::shared_ptr<RequestBatch> batch_;  // of several prompts, until the answer is made
  GenerationRequest common_;             // of all prompts, but for the input
  std::vector<Prompt> prompts_;
  size_t next_ = 0;            // first prompt that was not yet started
  std::vector<size_t> retry_;  // refused while others of the batch ran
  size_t running_ = 0;         // started, not finished
  size_t finished_ = 0;
  // The queue is full: wait for one of ours to finish. Set wherever a start ends.
  std::atomic<bool> hold_starts_{false};
  bool accepted_ = false;  // a prompt has left the queue
  bool eager_ = false;
  RequestUsage usage_;  // of prompts that have ended, for the log
  std::string out_;     // body text that waits
  absl::Status failure_;
  size_t failed_prompt_ = 0;

  std::mutex mutex_;
  std::vector<Arrival> arrivals_;  // guarded by mutex_
};

}  // namespace k3
