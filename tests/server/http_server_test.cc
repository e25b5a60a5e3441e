#include "server/http_server.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "server/http/request_parser.h"
#include "tests/testing/http_client.h"

namespace k3 {
namespace {

using namespace std::chrono_literals;
using testing::HttpClient;
using testing::HttpReplyText;

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
  bool WaitAborted(std::chrono::milliseconds limit = 5000ms) {
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
      std::this_thread::sleep_for(500ms);
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
    added_.wait_for(lock, 5s, [&] { return jobs_.contains(path); });
    return jobs_[path];
  }

 private:
  std::mutex mutex_;
  std::condition_variable added_;
  std::unordered_map<std::string, std::shared_ptr<TestJob>> jobs_;
};

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
    for (int i = 0; i < 500 && server_->connections() != count; ++i) std::this_thread::sleep_for(10ms);
    return server_->connections() == count;
  }

  TestHandler handler_;
  Workers workers_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersSeveralRequestsOnOneConnection) {
  HttpClient client(port());
  for (int i = 0; i < 5; ++i) {
    auto reply = client.Call("POST", "/echo?a=b", "body" + std::to_string(i));
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 200);
    EXPECT_EQ(reply->body, "POST a=b body" + std::to_string(i));
    EXPECT_EQ(reply->Header("connection"), "");
    EXPECT_NE(reply->Header("date"), "");
  }
  EXPECT_EQ(server_->connections(), 1);
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrder) {
  HttpClient client(port());
  std::string all;
  for (int i = 0; i < 300; ++i) {
    const std::string body = std::to_string(1000 + i);
    all += "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n";
    all += body;
  }
  ASSERT_TRUE(client.Send(all));
  for (int i = 0; i < 300; ++i) {
    auto reply = client.ReadReply();
    ASSERT_TRUE(reply) << i;
    EXPECT_EQ(reply->body, "POST  " + std::to_string(1000 + i));
  }
}

TEST_F(HttpServerTest, ARequestPipelinedBehindAStreamWaitsForItsEnd) {
  HttpClient client(port());
  client.SendRequest("POST", "/job");
  client.SendRequest("POST", "/echo", "next");
  auto job = handler_.WaitJob("/job");
  ASSERT_TRUE(job);
  job->Push("data: one\n\n");
  ASSERT_TRUE(client.ReadHead());
  EXPECT_EQ(client.ReadEvent(), "one");
  EXPECT_FALSE(job->aborted());
  job->End();
  EXPECT_EQ(client.ReadEvent(), std::nullopt);
  EXPECT_TRUE(client.ended());
  auto reply = client.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "POST  next");
}

TEST_F(HttpServerTest, RequestsMayArriveByteByByte) {
  HttpClient client(port());
  for (char c : std::string("\r\nPOST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")) {
    ASSERT_TRUE(client.Send(std::string(1, c)));
    std::this_thread::sleep_for(200us);
  }
  auto reply = client.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "POST  abc");
}

TEST_F(HttpServerTest, ChunkedBodiesAndContinue) {
  HttpClient client(port());
  client.Send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
  auto head = client.ReadHead();
  ASSERT_TRUE(head);
  EXPECT_EQ(head->status, 100);
  client.Send("3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n");
  auto reply = client.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "POST  abcde");
}

TEST_F(HttpServerTest, MalformedRequestsAreRefusedAndTheConnectionCloses) {
  const std::pair<std::string, int> cases[] = {
      {"nonsense\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\n\r\n", 400},  // no Host
      {"GET /echo HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400},
      {"GET /echo HTTP/1.0\r\nHost: a\r\nhost: a\r\n\r\n", 400},
      {"GET /echo HTTP/3.0\r\nHost: x\r\n\r\n", 505},
      {"GET /echo%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"GET /echo%2 HTTP/1.1\r\nHost: x\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost : x\r\n\r\n", 400},
      // What HTTP/1.0 does not know.
      {"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.0\r\nHost: x\r\ntransfer-encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", 400},
      // Lines that are folded, or end otherwise than with CR LF.
      {"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n\tContent-Length: 3\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\n Host: x\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\nHost: x\n\n", 400},
      {"GET /echo HTTP/1.1\nHost: x\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: x\r\n\n", 400},
      {"GET /echo HTTP/1.1\r\nHost: x\r\nA: b\rc\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc", 400},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 4\r\n\r\nabc", 400},
      {"GET /" + std::string(100000, 'a') + " HTTP/1.1\r\nHost: x\r\n\r\n", 431},
      {"GET / HTTP/1.1\r\nHost: x\r\nX: " + std::string(100000, 'a') + "\r\n\r\n", 431},
  };
  for (const auto& [text, status] : cases) {
    HttpClient client(port());
    client.Send(text);
    auto reply = client.ReadReply();
    ASSERT_TRUE(reply) << text.substr(0, 200);
    EXPECT_EQ(reply->status, status) << text.substr(0, 200) << reply->body;
    EXPECT_EQ(reply->Header("connection"), "close");
    client.HalfClose();
    EXPECT_TRUE(client.WaitForClose());
  }
}

// The bytes of a head are looked at once each, in whatever pieces they come, and those of a body never.
TEST_F(HttpServerTest, LinesOfAHeadAreCheckedInAnyPieces) {
  const std::string good = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\na\nb\r c";
  const std::string folded = "GET /echo HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n";
  for (size_t cut = 1; cut < good.size(); ++cut) {
    HttpClient client(port());
    client.Send(good.substr(0, cut));
    client.Send(good.substr(cut));
    auto reply = client.ReadReply();
    ASSERT_TRUE(reply) << cut;
    EXPECT_EQ(reply->body, "POST  a\nb\r c") << cut;
    // Once the fold has come the server closes, and a further send may take its answer away.
    if (cut > folded.find("\r\n c") + 2) continue;
    HttpClient refused(port());
    refused.Send(folded.substr(0, cut));
    refused.Send(folded.substr(cut));
    reply = refused.ReadReply();
    ASSERT_TRUE(reply) << cut;
    EXPECT_EQ(reply->status, 400) << cut;
  }
}

// The same without a network that may join pieces: what is left of a piece comes again with the next.
TEST(HttpRequestParserTest, AHeadEndsWhereverItIsCut) {
  const std::string request = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\n{\n\n  }\n";
  for (size_t first = 0; first <= request.size(); ++first) {
    for (size_t second = first; second <= request.size(); ++second) {
      BodyBudget budget(1 << 20);
      HttpRequestParser parser(4096, 2048, budget);
      std::string input;
      for (const std::string& piece :
           {request.substr(0, first), request.substr(first, second - first), request.substr(second)}) {
        input += piece;
        for (size_t used = 1; used > 0 && !input.empty();) {
          used = parser.Consume(input);
          input.erase(0, used);
        }
      }
      ASSERT_EQ(parser.state(), HttpRequestParser::State::kDone)
          << first << ", " << second << ": " << parser.error_message();
      std::shared_ptr<void> lease;
      EXPECT_EQ(parser.TakeRequest(&lease).body, "{\n\n  }\n");
    }
  }
}

TEST_F(HttpServerTest, EarlyAnswersKeepTheConnectionWhenTheBodyIsSmall) {
  HttpClient client(port());
  auto reply = client.Call("POST", "/nowhere", std::string(100000, 'x'));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 404);
  reply = client.Call("POST", "/echo", "still here");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "POST  still here");
  reply = client.Call("POST", "/throw-head", "x");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 500);
  reply = client.Call("POST", "/throw", "x");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 500);
  EXPECT_EQ(reply->body.find("on purpose"), std::string::npos);
}

TEST_F(HttpServerTest, BodiesOverTheLimitAre413AndDoNotGrowMemory) {
  HttpServerOptions options;
  options.max_body_bytes = 1 << 20;
  Start(options);
  const std::string piece(1 << 20, 'x');
  for (const bool chunked : {false, true}) {
    HttpClient client(port());
    client.Send(chunked ? "POST /size HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                        : "POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 52428800\r\n\r\n");
    for (int i = 0; i < 50; ++i) {
      if (chunked) client.Send("100000\r\n");
      ASSERT_TRUE(client.Send(piece)) << "the server must read on, or the client never sees the answer";
      if (chunked) client.Send("\r\n");
    }
    auto reply = client.ReadReply();
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->status, 413);
  }
  HttpClient client(port());
  auto reply = client.Call("POST", "/size", piece);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "1048576");
  // With Expect the client learns it before it sends anything.
  client.Send("POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\nExpect: 100-continue\r\n\r\n");
  reply = client.ReadHead();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 413);
}

TEST_F(HttpServerTest, TheSumOfBodiesIsLimitedToo) {
  HttpServerOptions options;
  options.max_buffered_bytes = 1 << 20;
  Start(options);
  std::optional<HttpReplyText> reply;
  // On a busy machine the server may read both at the same time; then either or both may be refused.
  for (int attempt = 1; attempt <= 10; ++attempt) {
    HttpClient first(port());
    first.Send("POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 800000\r\n\r\n" + std::string(700000, 'x'));
    std::this_thread::sleep_for(attempt * 100ms);
    HttpClient second(port());
    const auto refused = second.Call("POST", "/size", std::string(700000, 'x'));
    first.Send(std::string(100000, 'x'));
    reply = first.ReadReply();
    ASSERT_TRUE(refused && reply);
    ASSERT_TRUE(refused->status == 503 || reply->status == 503);
    if (refused->status == 503 && reply->status == 200) break;
  }
  EXPECT_EQ(reply->body, "800000");
  HttpClient third(port());
  reply = third.Call("POST", "/size", std::string(700000, 'x'));
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 200);
}

TEST_F(HttpServerTest, HeadHasNoBodyAndHttp10Closes) {
  HttpClient client(port());
  auto reply = client.Call("HEAD", "/echo");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->Header("content-length"), "6");
  reply = client.Call("GET", "/echo");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "GET  ");

  HttpClient old(port());
  old.Send("GET /echo HTTP/1.0\r\n\r\n");
  reply = old.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "GET  ");
  EXPECT_TRUE(old.WaitForClose());

  HttpClient old_stream(port());
  old_stream.Send("POST /old HTTP/1.0\r\nContent-Length: 0\r\n\r\n");
  auto job = handler_.WaitJob("/old");
  job->Push("data: a\n\n");
  job->Push("data: b\n\n");
  job->End();
  reply = old_stream.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->Header("transfer-encoding"), "");
  EXPECT_EQ(reply->body, "data: a\n\ndata: b\n\n");
}

TEST_F(HttpServerTest, PathsAreDecoded) {
  HttpClient client(port());
  client.Send("GET http://h/%70ath?x HTTP/1.1\r\nHost: h\r\n\r\n");
  auto reply = client.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, "/path");
}

TEST_F(HttpServerTest, StreamsAreSentPieceByPiece) {
  HttpClient client(port());
  client.SendRequest("POST", "/pieces");
  auto job = handler_.WaitJob("/pieces");
  auto head = client.ReadHead();
  ASSERT_TRUE(head);
  EXPECT_EQ(head->Header("transfer-encoding"), "chunked");
  for (int i = 0; i < 50; ++i) {
    job->Push("data: " + std::to_string(i) + "\n\n");
    EXPECT_EQ(client.ReadEvent(), std::to_string(i));
  }
  job->End();
  EXPECT_EQ(client.ReadEvent(), std::nullopt);
  EXPECT_TRUE(client.ended());
  EXPECT_FALSE(job->aborted());
}

TEST_F(HttpServerTest, AClientThatLeavesIsSeenWhileNothingIsWritten) {
  for (const std::string how : {"close", "reset", "half", "close-pipelined"}) {
    for (const bool before_head : {true, false}) {
      const std::string path = "/left-" + how + (before_head ? "?hold" : "");
      HttpClient client(port());
      client.SendRequest("POST", path);
      auto job = handler_.WaitJob("/left-" + how);
      ASSERT_TRUE(job);
      if (!before_head) {
        ASSERT_TRUE(client.ReadHead());
      }
      if (how == "close-pipelined") client.Send(std::string(150000, 'x'));
      const auto start = std::chrono::steady_clock::now();
      if (how == "reset") client.Reset();
      if (how == "half") client.HalfClose();
      if (how.starts_with("close")) client.Close();
      EXPECT_TRUE(job->WaitAborted()) << path;
      EXPECT_EQ(job->aborted(), HttpAbort::kPeerGone);
      EXPECT_LT(std::chrono::steady_clock::now() - start, how == "close-pipelined" ? 1000ms : 200ms) << path;
    }
  }
  EXPECT_TRUE(WaitConnections(0));
}

TEST_F(HttpServerTest, ASlowReaderMergesPiecesAndOthersGoOn) {
  HttpClient slow(port(), 4096);
  slow.SendRequest("POST", "/slow");
  auto job = handler_.WaitJob("/slow");
  // More than the kernel's buffers take, in many small pieces.
  std::string expected;
  for (int i = 0; i < 100000; ++i) {
    const std::string piece = "data: " + std::to_string(i) + std::string(200, '.') + "\n\n";
    expected += piece;
    job->Push(piece);
  }
  job->End();
  HttpClient other(port());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(other.Call("GET", "/echo"));
  EXPECT_LT(job->calls(), 10000);
  auto reply = slow.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body.size(), expected.size());
  EXPECT_TRUE(reply->body == expected);
}

TEST_F(HttpServerTest, AReaderThatTakesNothingIsCutOff) {
  HttpServerOptions options;
  options.stall_limit = 300ms;
  options.sweep_interval = 20ms;
  Start(options);
  HttpClient stalled(port(), 4096);
  stalled.SendRequest("POST", "/stalled");
  auto job = handler_.WaitJob("/stalled");
  job->Push(std::string(32 << 20, '.'));
  EXPECT_TRUE(job->WaitAborted());
  EXPECT_EQ(job->aborted(), HttpAbort::kStalled);
  EXPECT_TRUE(WaitConnections(0));
}

TEST_F(HttpServerTest, SilenceIsToldOnlyWhileNothingIsWritten) {
  HttpServerOptions options;
  options.silence_interval = 100ms;
  options.sweep_interval = 20ms;
  Start(options);
  HttpClient client(port());
  client.SendRequest("POST", "/silent");
  auto job = handler_.WaitJob("/silent");
  ASSERT_TRUE(client.ReadHead());
  EXPECT_EQ(client.ReadEvent(), ": still here");
  EXPECT_EQ(client.ReadEvent(), ": still here");
  for (int i = 0; i < 30; ++i) {
    job->Push("data: x\n\n");
    EXPECT_EQ(client.ReadEvent(), "x");
    std::this_thread::sleep_for(10ms);
  }
  job->End();
  EXPECT_EQ(client.ReadEvent(), std::nullopt);
}

TEST_F(HttpServerTest, SlowAndIdleClientsTimeOut) {
  HttpServerOptions options;
  options.idle_timeout = 400ms;
  options.head_timeout = 200ms;
  options.body_timeout = 200ms;
  options.sweep_interval = 20ms;
  Start(options);
  HttpClient idle(port());
  HttpClient slow_head(port());
  slow_head.Send("POST /echo HTTP/1.1\r\nHost:");
  HttpClient slow_body(port());
  slow_body.Send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc");
  auto reply = slow_head.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 408);
  reply = slow_body.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 408);
  EXPECT_TRUE(idle.WaitForClose());
}

TEST_F(HttpServerTest, LargeBodiesAreHandledOffTheEventLoop) {
  HttpServerOptions options;
  options.io_threads = 1;
  Start(options);
  HttpClient busy(port());
  busy.SendRequest("POST", "/sleep", std::string(100000, 'x'));
  std::this_thread::sleep_for(50ms);
  const auto start = std::chrono::steady_clock::now();
  HttpClient other(port());
  ASSERT_TRUE(other.Call("GET", "/echo"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 300ms);
  auto reply = busy.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 200);

  // A client that leaves while a worker has its request: the job that comes back is aborted at once.
  HttpClient gone(port());
  gone.SendRequest("POST", "/gone", std::string(100000, 'x'));
  gone.Close();
  auto job = handler_.WaitJob("/gone");
  EXPECT_TRUE(job->WaitAborted());
}

TEST_F(HttpServerTest, ManyIdleConnections) {
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 2000; ++i) {
    clients.push_back(std::make_unique<HttpClient>(port()));
    ASSERT_TRUE(clients.back()->connected()) << i;
  }
  for (int i = 0; i < 2000; i += 97) {
    auto reply = clients[i]->Call("GET", "/echo");
    ASSERT_TRUE(reply) << i;
    EXPECT_EQ(reply->status, 200);
  }
  EXPECT_TRUE(WaitConnections(2000));  // the kernel completes connections before the server accepts them
  clients.clear();
  EXPECT_TRUE(WaitConnections(0));
}

TEST_F(HttpServerTest, TooManyConnectionsGetA503) {
  HttpServerOptions options;
  options.max_connections = 2;
  Start(options);
  HttpClient a(port()), b(port());
  ASSERT_TRUE(a.Call("GET", "/echo"));
  ASSERT_TRUE(b.Call("GET", "/echo"));
  HttpClient c(port());
  auto reply = c.ReadReply();
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 503);
}

TEST_F(HttpServerTest, DrainFinishesAnswersAndStopEndsTheRest) {
  HttpClient running(port());
  running.SendRequest("POST", "/running");
  auto job = handler_.WaitJob("/running");
  ASSERT_TRUE(running.ReadHead());
  HttpClient idle(port());
  ASSERT_TRUE(idle.Call("GET", "/echo"));
  server_->StartDrain();
  EXPECT_TRUE(idle.WaitForClose());
  HttpClient late(port());
  auto reply = late.Call("GET", "/echo");
  ASSERT_TRUE(reply) << "probes are answered while draining";
  EXPECT_EQ(reply->Header("connection"), "close");
  std::thread end([&] {
    std::this_thread::sleep_for(100ms);
    job->Push("data: last\n\n");
    job->End();
  });
  server_->Stop(5s);
  end.join();
  EXPECT_EQ(running.ReadEvent(), "last");
  EXPECT_EQ(running.ReadEvent(), std::nullopt);
  EXPECT_TRUE(running.ended());

  Start({});
  HttpClient endless(port());
  endless.SendRequest("POST", "/endless");
  auto endless_job = handler_.WaitJob("/endless");
  ASSERT_TRUE(endless.ReadHead());
  server_->Stop(50ms);
  EXPECT_EQ(endless_job->aborted(), HttpAbort::kStopping);
  endless_job->Push("ignored");  // wakes may outlive the server
}

// Its head, written before the drain, said nothing of closing; left open it would hold the connection until the stop.
TEST_F(HttpServerTest, AnAnswerThatEndsDuringADrainClosesItsConnection) {
  HttpClient client(port());
  client.SendRequest("POST", "/running");
  auto job = handler_.WaitJob("/running");
  ASSERT_TRUE(client.ReadHead());
  server_->StartDrain();
  HttpClient late(port());
  ASSERT_TRUE(late.Call("GET", "/echo")) << "the loop is past the pass over idle connections";
  job->Push("data: last\n\n");
  job->End();
  EXPECT_EQ(client.ReadEvent(), "last");
  EXPECT_EQ(client.ReadEvent(), std::nullopt);
  EXPECT_TRUE(client.ended());
  EXPECT_TRUE(client.WaitForClose());
}

TEST_F(HttpServerTest, AFreshConnectionIsAnsweredAlthoughADrainBegins) {
  HttpClient probe(port());
  ASSERT_TRUE(WaitConnections(1));
  server_->StartDrain();
  HttpClient late(port());
  ASSERT_TRUE(late.Call("GET", "/echo")) << "the loop is past the pass over idle connections";
  auto reply = probe.Call("GET", "/echo");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->Header("connection"), "close");
  EXPECT_TRUE(probe.WaitForClose());
}

// A sweep that is due when the loop is told to end must not start another, nor a connection that comes at that moment.
TEST_F(HttpServerTest, EndsWhateverIsDueAtThatMoment) {
  HttpServerOptions options;
  options.sweep_interval = std::chrono::microseconds(100);
  for (int i = 0; i < 300; ++i) {
    Start(options);
    HttpClient client(port());
    std::this_thread::sleep_for(std::chrono::microseconds(i * 7));
    server_->Stop(Clock::duration::zero());
  }
}

TEST_F(HttpServerTest, AnAddressInUseIsAStatus) {
  HttpServerOptions options;
  options.port = port();
  auto second = HttpServer::Start(options, handler_, nullptr);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find(std::to_string(options.port)), absl::string_view::npos);
  options.host = "no.such.host.invalid";
  EXPECT_FALSE(HttpServer::Start(options, handler_, nullptr).ok());
}

}  // namespace
}  // namespace k3
