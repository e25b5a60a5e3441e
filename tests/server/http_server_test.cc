#include "server/http_server.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/server/http_server_fixture.h"

namespace k3 {
namespace {

using namespace std::chrono_literals;
using testing::HttpClient;
using testing::HttpServerTest;

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
