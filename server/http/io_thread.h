#pragma once

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "engine/request.h"
#include "server/http/http_handler.h"

namespace k3 {

class HttpConnection;

class HttpWakeQueue;

// The wake of one exchange.
class HttpWakeSlot : public HttpWakeTarget, public std::enable_shared_from_this<HttpWakeSlot> {
 public:
  HttpWakeSlot(std::shared_ptr<HttpWakeQueue> queue, std::weak_ptr<HttpConnection> connection)
      : queue_(std::move(queue)), connection_(std::move(connection)) {}
  void PostWake() override;
  // From here on the next PostWake goes through again. On the connection's thread.
  void Rearm() { posted_.store(false, std::memory_order_seq_cst); }
  std::shared_ptr<HttpConnection> connection() const { return connection_.lock(); }

 private:
  const std::shared_ptr<HttpWakeQueue> queue_;
  const std::weak_ptr<HttpConnection> connection_;
  std::atomic<bool> posted_{false};
};

// Wakes that wait for one event loop: a burst from the engine thread (one step, many streams) costs one post.
class HttpWakeQueue {
 public:
  explicit HttpWakeQueue(boost::asio::io_context* context) : context_(context) {}
  // No wake is accepted after this.
  void Close();

  void Push(std::shared_ptr<HttpWakeSlot> slot);

 private:
  void Deliver();

  std::mutex mutex_;
  boost::asio::io_context* context_;                  // guarded by mutex_; null once closed
  std::vector<std::shared_ptr<HttpWakeSlot>> slots_;  // guarded by mutex_
  std::vector<std::shared_ptr<HttpWakeSlot>> batch_;  // event loop only; keeps its capacity
};

// One event loop and the connections that live on it for their whole life, so that they need no locks.
class HttpIoThread {
 public:
  explicit HttpIoThread(Clock::duration sweep_interval);
  ~HttpIoThread();

  boost::asio::io_context& context() { return context_; }
  const std::shared_ptr<HttpWakeQueue>& wakes() const { return wakes_; }

  void Start();
  // Lets the loop end once its connections are closed, and waits for that.
  void Join();

  // The rest: on the loop's thread only.
  void Add(std::shared_ptr<HttpConnection> connection);
  void Remove(const std::shared_ptr<HttpConnection>& connection) { connections_.erase(connection); }
  void CloseIdle();
  void CloseAll();
  // The value of the Date field.
  const std::string& date() const { return date_; }

 private:
  void Run();
  void Sweep();
  void UpdateDate();

  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
  boost::asio::steady_timer timer_;
  const Clock::duration sweep_interval_;
  const std::shared_ptr<HttpWakeQueue> wakes_;
  std::unordered_set<std::shared_ptr<HttpConnection>> connections_;
  std::string date_;
  bool stopping_ = false;  // set by Join, in the loop
  std::thread thread_;
};

}  // namespace k3
