#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "server/tcp_connect.h"
#include "server/tcp_listen.h"
#include "server/text_file.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TempDir;

TEST(TextFileTest, ReadsAllOfAFile) {
  const TempDir dir;
  const std::string text = std::string(200'000, 'x') + std::string("\0\n", 2);
  std::ofstream(dir.File("a"), std::ios::binary) << text;
  EXPECT_EQ(ReadTextFile(dir.File("a")).value(), text);
  std::ofstream(dir.File("empty"));
  EXPECT_EQ(ReadTextFile(dir.File("empty")).value(), "");
}

TEST(TextFileTest, OnlyAMissingFileIsNotFound) {
  const TempDir dir;
  const absl::Status missing = ReadTextFile(dir.File("a")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), StartsWith(dir.File("a") + ": "));
  const absl::Status folder = ReadTextFile(dir.path()).status();
  EXPECT_EQ(folder.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(folder.message()), dir.path() + ": expected a file, found a directory");
}

TEST(TextFileTest, PipesAreReadToTheirEndAndNeverWaitedFor) {
  const TempDir dir;
  const std::string path = dir.File("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(ReadTextFile(path).value(), "");  // nobody writes
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::thread writer([&] {  // as a shell's <(...) does
    for (int i = 0; i < 3; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      EXPECT_EQ(write(ends[1], "abc", 3), 3);
    }
    close(ends[1]);
  });
  EXPECT_EQ(ReadTextFile("/dev/fd/" + std::to_string(ends[0])).value(), "abcabcabc");
  writer.join();
  close(ends[0]);
}

// An entry for 127.0.0.1 as getaddrinfo makes them.
struct Loopback {
  explicit Loopback(int port) {
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    info.ai_family = AF_INET;
    info.ai_socktype = SOCK_STREAM;
    info.ai_addr = reinterpret_cast<sockaddr*>(&address);
    info.ai_addrlen = sizeof(address);
  }
  sockaddr_in address{};
  addrinfo info{};
};

TEST(TcpTest, TheNextAddressIsTriedWhereOneRefuses) {
  TcpListeners listeners = ListenTcp("127.0.0.1", 0).value();
  // Bound, so that nobody else gets the port, but not listening.
  const int deaf = socket(AF_INET, SOCK_STREAM, 0);
  Loopback refuses(0), answers(listeners.port);
  ASSERT_EQ(bind(deaf, refuses.info.ai_addr, refuses.info.ai_addrlen), 0);
  ASSERT_EQ(getsockname(deaf, refuses.info.ai_addr, &refuses.info.ai_addrlen), 0);
  refuses.info.ai_next = &answers.info;
  const absl::StatusOr<int> fd = ConnectToAny(&refuses.info, std::chrono::seconds(10));
  ASSERT_TRUE(fd.ok()) << fd.status();
  close(*fd);
  refuses.info.ai_next = nullptr;
  const absl::Status refused = ConnectToAny(&refuses.info, std::chrono::seconds(10)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string(refused.message()), "Connection refused");
  close(deaf);
  for (const int socket : listeners.sockets) close(socket);
}

TEST(TcpTest, ListensWhereTheNameLeads) {
  TcpListeners listeners = ListenTcp("localhost", 0).value();
  ASSERT_FALSE(listeners.sockets.empty());
  EXPECT_GT(listeners.port, 0);
  const absl::StatusOr<int> fd = ConnectTcp("localhost", std::to_string(listeners.port), std::chrono::seconds(10));
  ASSERT_TRUE(fd.ok()) << fd.status();
  close(*fd);
  EXPECT_EQ(std::string(ListenTcp("localhost", listeners.port).status().message()), "Address already in use");
  for (const int socket : listeners.sockets) close(socket);
  EXPECT_EQ(ListenTcp("no.such.host.invalid", 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ConnectTcp("no.such.host.invalid", "1", std::chrono::seconds(10)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(TcpTest, AnIpv6AddressMayStandInBrackets) {
  absl::StatusOr<TcpListeners> plain = ListenTcp("::1", 0);
  if (!plain.ok()) GTEST_SKIP() << "this machine has no IPv6";
  for (const int fd : plain->sockets) close(fd);
  absl::StatusOr<TcpListeners> brackets = ListenTcp("[::1]", 0);
  ASSERT_TRUE(brackets.ok()) << brackets.status();
  const absl::StatusOr<int> fd = ConnectTcp("::1", std::to_string(brackets->port), std::chrono::seconds(10));
  ASSERT_TRUE(fd.ok()) << fd.status();
  close(*fd);
  for (const int socket : brackets->sockets) close(socket);
}

}  // namespace
}  // namespace k3
