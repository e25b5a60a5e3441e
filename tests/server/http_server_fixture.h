#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/http_server.h"
#include "tests/testing/http_client.h"

namespace k3::testing {

// A stream whose pieces the test hands over from its own thread.
class TestJob : public HttpJob {
 public:
  TestJob(HttpWaker waker, std::string hold_head) : waker_(std::move(waker)), hold_head_(!hold_head.empty()) {}

  void Push(std::string piece) {
    {
      std::lock_guard lock(mutex_);
      pieces_ += piece;
    }
    waker_.Wake();
  }
  void End() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    waker_.Wake();
  }
  bool WaitAborted(std::chrono::milliseconds limit = std::chrono::seconds(5)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return aborted_.has_value(); });
  }
  std::optional<HttpAbort> aborted() {
    std::lock_guard lock(mutex_);
    return aborted_;
  }
  int calls() {
    std::lock_guard lock(mutex_);
    return calls_;
  }

  void OnReady(HttpWriter& writer) override {
    std::lock_guard lock(mutex_);
    ++calls_;
    if (!writer.started() && (!pieces_.empty() || !hold_head_)) {
      HttpResponse head;
      head.content_type = "text/event-stream";
      writer.StartStream(std::move(head));
    }
    writer.body() += pieces_;
    pieces_.clear();
    if (end_) writer.Finish();
  }
  void OnSilence(HttpWriter& writer) override {
    std::lock_guard lock(mutex_);
    if (writer.started()) writer.body() += ": still here\n\n";
  }
  void OnAbort(HttpAbort why) override {
    std::lock_guard lock(mutex_);
    aborted_ = why;
    changed_.notify_all();
  }

 private:
  HttpWaker waker_;
  const bool hold_head_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string pieces_;
  bool end_ = false;
  int calls_ = 0;
  std::optional<HttpAbort> aborted_;
};

// One thread a task.
class Workers {
 public:
  ~Workers() {
    for (std::thread& thread : threads_) thread.join();
  }
  void Run(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    threads_.emplace_back(std::move(task));
  }

 private:
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

class TestHandler : public HttpHandler {
 public:
  std::optional<HttpResponse> CheckHead(const HttpRequest& request) override {
    if (request.path == "/nowhere") return Error(404, "no such route");
    if (request.path == "/throw-head") throw std::runtime_error("on purpose");
    return std::nullopt;
  }

  HttpReply Handle(HttpRequest request, HttpWaker waker) override {
    if (request.path == "/echo") {
      HttpResponse response;
      response.content_type = "text/plain";
      response.body = request.method + " " + request.query + " " + request.body;
      return response;
    }
    if (request.path == "/size") return HttpResponse{.body = std::to_string(request.body.size())};
    if (request.path == "/throw") throw std::runtime_error("on purpose");
    if (request.path == "/sleep") {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      return HttpResponse{};
    }
    if (request.path == "/path") return HttpResponse{.body = request.path};
    auto job = std::make_shared<TestJob>(std::move(waker), request.query);
    std::lock_guard lock(mutex_);
    jobs_[request.path] = job;
    added_.notify_all();
    return job;
  }

  HttpResponse Error(int status, std::string_view message) override {
    return HttpResponse{.status = status, .body = "{\"error\":\"" + std::string(message) + "\"}"};
  }

  std::shared_ptr<TestJob> WaitJob(const std::string& path) {
    std::unique_lock lock(mutex_);
    added_.wait_for(lock, std::chrono::seconds(5), [&] { return jobs_.contains(path); });
    return jobs_[path];
  }

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::unordered_map<std::string, std::shared_ptr<TestJob>> jobs_;
};

// A server on a real socket whose routes the test drives.
class HttpServerTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }

  void Start(HttpServerOptions options) {
    server_.reset();
    options.port = 0;
    auto server =
        HttpServer::Start(options, handler_, [this](std::function<void()> task) { workers_.Run(std::move(task)); });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }
  uint16_t port() const { return server_->port(); }
  bool WaitConnections(int count) {
    for (int i = 0; i < 500 && server_->connections() != count; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return server_->connections() == count;
  }

  TestHandler handler_;
  Workers workers_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace k3::testing
