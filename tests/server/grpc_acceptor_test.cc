#include "server/grpc_acceptor.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/grpc_harness.h"

namespace k3 {
namespace {

using testing::GrpcHarness;
using ::testing::HasSubstr;
using testing::kSlowdown;
using testing::TokenSpec;
namespace pb = testing::pb;
using namespace std::chrono_literals;

GrpcServerOptions Limit(int connections) {
  GrpcServerOptions options;
  options.max_connections = connections;
  return options;
}

grpc::Status Generate(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 30s);
  pb::GenerateRequest request;
  *request.mutable_spec() = TokenSpec(5, 2);
  pb::GenerateResponse response;
  return pb::GenerationService::NewStub(channel)->Generate(&context, request, &response);
}

// New connections until one is served.
::testing::AssertionResult ServedAgain(const GrpcHarness& harness, int port) {
  grpc::Status status;
  for (const auto until = Clock::now() + 10s * kSlowdown; Clock::now() < until;) {
    status = Generate(harness.Connect(port));
    if (status.ok()) return ::testing::AssertionSuccess();
    std::this_thread::sleep_for(10ms);
  }
  return ::testing::AssertionFailure() << status.error_code() << ": " << status.error_message();
}

int ConnectTo(int fd, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

TEST(GrpcAcceptorTest, MoreConnectionsThanTheLimitAreUnavailableAndPlacesComeBack) {
  GrpcHarness harness({}, Limit(3));
  const int port = harness.server().port();
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < 3; ++i) {
    channels.push_back(harness.Connect(port));
    EXPECT_TRUE(Generate(channels.back()).ok()) << i;
  }
  EXPECT_EQ(Generate(harness.Connect(port)).error_code(), grpc::StatusCode::UNAVAILABLE);
  for (const auto& channel : channels) EXPECT_TRUE(Generate(channel).ok()) << "a connection that was there";
  channels.pop_back();
  EXPECT_TRUE(ServedAgain(harness, port));
  EXPECT_TRUE(Generate(harness.Connect(harness.server().admin_port())).error_code() == grpc::StatusCode::UNIMPLEMENTED)
      << "AdminService has places of its own";
}

TEST(GrpcAcceptorTest, ListensOnAfterARunOutOfDescriptors) {
  GrpcHarness harness;
  const int port = harness.server().port();
  EXPECT_TRUE(Generate(harness.channel).ok());
  std::vector<int> sockets;
  for (int i = 0; i < 20; ++i) sockets.push_back(socket(AF_INET, SOCK_STREAM, 0));
  // No number below the limit is free from here on.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  std::vector<int> fillers;
  for (int fd = dup(0); fd < sockets.back(); fd = dup(0)) fillers.push_back(fd);
  rlimit low = before;
  low.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  for (const int fd : sockets) EXPECT_EQ(ConnectTo(fd, port), 0) << "the backlog takes it";
  std::this_thread::sleep_for(200ms);
  EXPECT_TRUE(Generate(harness.channel).ok()) << "a connection that was there";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int fd : sockets) close(fd);
  for (const int fd : fillers) close(fd);
  EXPECT_TRUE(ServedAgain(harness, port));
}

TEST(GrpcAcceptorTest, BindsWhatTheHostNames) {
  for (const char* host : {"127.0.0.1", "localhost", "0.0.0.0"}) {
    const auto acceptor = GrpcAcceptor::Listen(host, 0, 10);
    ASSERT_TRUE(acceptor.ok()) << acceptor.status();
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(ConnectTo(fd, (*acceptor)->port()), 0) << host;
    const auto second = GrpcAcceptor::Listen(host, (*acceptor)->port(), 10);
    EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << host;
    (*acceptor)->Stop();
    const int late = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_NE(ConnectTo(late, (*acceptor)->port()), 0) << host;
    close(late);
    close(fd);
  }
  const auto unknown = GrpcAcceptor::Listen("no-such-host.invalid", 1234, 10);
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(unknown.status().message()), HasSubstr("no-such-host.invalid:1234"));
}

}  // namespace
}  // namespace k3
