#include "server/http/io_thread.h"

#include <boost/asio/post.hpp>
#include <ctime>
#include <exception>

#include "server/http/http_connection.h"
#include "spdlog/spdlog.h"

namespace k3 {

void HttpWakeSlot::PostWake() {
  if (posted_.exchange(true, std::memory_order_seq_cst)) return;
  queue_->Push(shared_from_this());
}

void HttpWakeQueue::Push(std::shared_ptr<HttpWakeSlot> slot) {
  std::lock_guard lock(mutex_);
  if (context_ == nullptr) return;
  slots_.push_back(std::move(slot));
  if (slots_.size() == 1) boost::asio::post(*context_, [this] { Deliver(); });
}

void HttpWakeQueue::Deliver() {
  {
    std::lock_guard lock(mutex_);
    batch_.swap(slots_);
  }
  for (const std::shared_ptr<HttpWakeSlot>& slot : batch_) {
    if (std::shared_ptr<HttpConnection> connection = slot->connection()) connection->OnWake(slot.get());
  }
  batch_.clear();
}

void HttpWakeQueue::Close() {
  std::lock_guard lock(mutex_);
  context_ = nullptr;
  slots_.clear();
}

HttpIoThread::HttpIoThread(Clock::duration sweep_interval)
    : guard_(context_.get_executor()),
      timer_(context_),
      sweep_interval_(sweep_interval),
      wakes_(std::make_shared<HttpWakeQueue>(&context_)) {}

HttpIoThread::~HttpIoThread() { Join(); }

void HttpIoThread::Start() {
  UpdateDate();
  timer_.expires_after(sweep_interval_);
  timer_.async_wait([this](boost::system::error_code ec) {
    if (!ec) Sweep();
  });
  thread_ = std::thread([this] { Run(); });
}

void HttpIoThread::Run() {
  for (;;) {
    try {
      context_.run();
      return;
    } catch (const std::exception& e) {
      // Nothing of ours throws out of a handler except for want of memory; the other connections go on.
      spdlog::error("http: {}", e.what());
    }
  }
}

void HttpIoThread::Join() {
  if (!thread_.joinable()) return;
  boost::asio::post(context_, [this] {
    // A sweep that is due already cannot be cancelled, and a connection may still be on its way to Add: neither may
    // start work that would keep the loop running.
    stopping_ = true;
    CloseAll();
    timer_.cancel();
    guard_.reset();
  });
  thread_.join();
  wakes_->Close();
}

void HttpIoThread::Add(std::shared_ptr<HttpConnection> connection) {
  if (stopping_) return;  // its socket closes with it
  connections_.insert(connection);
  connection->Start();
}

void HttpIoThread::CloseIdle() {
  const std::vector<std::shared_ptr<HttpConnection>> all(connections_.begin(), connections_.end());
  for (const auto& connection : all) connection->CloseIfIdle();
}

void HttpIoThread::CloseAll() {
  const std::vector<std::shared_ptr<HttpConnection>> all(connections_.begin(), connections_.end());
  for (const auto& connection : all) connection->Close(HttpAbort::kStopping);
}

void HttpIoThread::Sweep() {
  if (stopping_) return;
  UpdateDate();
  const Clock::time_point now = Clock::now();
  const std::vector<std::shared_ptr<HttpConnection>> all(connections_.begin(), connections_.end());
  for (const auto& connection : all) connection->Sweep(now);
  timer_.expires_after(sweep_interval_);
  timer_.async_wait([this](boost::system::error_code ec) {
    if (!ec) Sweep();
  });
}

void HttpIoThread::UpdateDate() {
  const std::time_t now = std::time(nullptr);
  std::tm parts;
  gmtime_r(&now, &parts);
  char text[40];
  const size_t size = std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &parts);
  date_.assign(text, size);
}

}  // namespace k3
