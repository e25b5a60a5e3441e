#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "server/http/http_message.h"

// What stands between the HTTP server and the code that answers. Neither side sees sockets.
namespace k3 {

// How a job answers. Valid during the job's calls only; the connection sends what was put in when the call returns.
class HttpWriter {
 public:
  // A whole reply; ends the exchange.
  void Respond(HttpResponse response);
  // Status and headers of a reply whose body follows in pieces.
  void StartStream(HttpResponse head);
  bool started() const { return started_; }
  // The next piece of the body, to append to.
  std::string& body() { return body_; }
  // Ends the body properly.
  void Finish() { finished_ = true; }
  bool finished() const { return finished_; }

 private:
  friend class HttpConnection;
  std::optional<HttpResponse> head_;  // not yet sent
  std::string body_;
  bool started_ = false;
  bool whole_ = false;
  bool finished_ = false;
};

enum class HttpAbort {
  kPeerGone,  // closed, half-closed or reset by the client
  kStalled,   // the client took nothing for the stall limit
  kStopping,  // the server closes its connections
};

// The handler's side of a request that is not answered at once. All calls come from the connection's thread and must
// not block. Ends with writer.finished() or with OnAbort.
class HttpJob {
 public:
  virtual ~HttpJob() = default;
  // Called once at the start, then after each Wake, when everything written before has left for the kernel. So what
  // happens while a reader is slow is waiting in the job and can be merged.
  virtual void OnReady(HttpWriter& writer) = 0;
  // A wake came while the reader has not taken the last piece. Only for jobs that ask for it, as they then get one call
  // for each wake; nothing can be written.
  virtual bool WantsBlockedWakes() const { return false; }
  virtual void OnBlocked() {}
  // Nothing was written for the silence interval.
  virtual void OnSilence(HttpWriter& writer) { (void)writer; }
  // No reply can be delivered any more. Last call.
  virtual void OnAbort(HttpAbort why) = 0;
};

// Where wakes go: the connection's event loop.
class HttpWakeTarget {
 public:
  virtual ~HttpWakeTarget() = default;
  virtual void PostWake() = 0;
};

// Asks the connection to call OnReady. Thread-safe, cheap to call for each token: only the first call before the next
// OnReady crosses threads. May outlive connection and server.
class HttpWaker {
 public:
  explicit HttpWaker(std::shared_ptr<HttpWakeTarget> target) : target_(std::move(target)) {}
  void Wake() const { target_->PostWake(); }

 private:
  std::shared_ptr<HttpWakeTarget> target_;
};

using HttpReply = std::variant<HttpResponse, std::shared_ptr<HttpJob>>;

// Thread-safe; outlives the server.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Sees the request before its body is read: unknown routes, wrong methods, missing keys. A response ends it there.
  // `request.body` is empty.
  virtual std::optional<HttpResponse> CheckHead(const HttpRequest& request) = 0;
  // Called on a connection's thread, or on a worker for large bodies.
  virtual HttpReply Handle(HttpRequest request, HttpWaker waker) = 0;
  // The body of an error that the server itself found: too large, malformed, too slow.
  virtual HttpResponse Error(int status, std::string_view message) = 0;
};

}  // namespace k3
