#include "server/span_exporter.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <nlohmann/json.hpp>

namespace k3 {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

// A collector that answers every request with one status, or not at all.
class Collector {
 public:
  explicit Collector(std::string reply) : reply_(std::move(reply)) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    listen(fd_, 16);
    thread_ = std::thread([this] { Run(); });
  }
  ~Collector() {
    shutdown(fd_, SHUT_RDWR);
    close(fd_);
    thread_.join();
    for (const int client : silent_) close(client);
  }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  std::vector<std::string> requests() {
    std::lock_guard lock(mutex_);
    return requests_;
  }

 private:
  void Run() {
    for (int client; (client = accept(fd_, nullptr, nullptr)) >= 0;) {
      if (reply_.empty()) {
        silent_.push_back(client);
        continue;
      }
      std::string text;
      char buffer[4096];
      while (true) {
        const ssize_t n = recv(client, buffer, sizeof(buffer), 0);
        if (n <= 0) break;
        text.append(buffer, static_cast<size_t>(n));
        const size_t head = text.find("\r\n\r\n");
        const size_t length = text.find("Content-Length: ");
        if (head != std::string::npos && length != std::string::npos &&
            text.size() >= head + 4 + std::stoul(text.substr(length + 16))) {
          break;
        }
      }
      {
        std::lock_guard lock(mutex_);
        requests_.push_back(text);  // before the reply, after which the test looks
      }
      send(client, reply_.data(), reply_.size(), MSG_NOSIGNAL);
      close(client);
    }
  }

  const std::string reply_;
  int fd_ = -1;
  int port_ = 0;
  std::mutex mutex_;
  std::vector<std::string> requests_;  // guarded by mutex_
  std::vector<int> silent_;
  std::thread thread_;
};

RequestSpan Span(int i) {
  RequestSpan span;
  span.context = ContinueTrace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", false);
  span.name = "chat";
  span.request_id = "req-" + std::to_string(i);
  span.model = "tiny-k3";
  span.start = std::chrono::system_clock::time_point(1700000000123456789ns);
  span.end = span.start + 2s;
  span.outcome = "stop";
  span.prompt_tokens = 7;
  span.completion_tokens = 9;
  return span;
}

TEST(SpanExporterTest, SpansArriveAsOtlpJson) {
  Collector collector("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
  {
    auto exporter = SpanExporter::Start({.endpoint = collector.url(), .version = "1.2"});
    ASSERT_TRUE(exporter.ok()) << exporter.status();
    (*exporter)->Add(Span(0));
    RequestSpan failed = Span(1);
    failed.ok = false;
    failed.context.parent_id.clear();
    (*exporter)->Add(failed);
  }  // sends what waits
  const std::vector<std::string> requests = collector.requests();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].rfind("POST /v1/traces HTTP/1.1\r\n", 0), 0u);
  const auto body = nlohmann::json::parse(requests[0].substr(requests[0].find("\r\n\r\n") + 4));
  const auto& resource = body["resourceSpans"][0];
  EXPECT_EQ(resource["resource"]["attributes"][0]["value"]["stringValue"], "k3serve");
  const auto& spans = resource["scopeSpans"][0]["spans"];
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0]["traceId"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(spans[0]["parentSpanId"], "b7ad6b7169203331");
  EXPECT_EQ(spans[0]["spanId"].get<std::string>().size(), 16u);
  EXPECT_EQ(spans[0]["startTimeUnixNano"], "1700000000123456789");
  EXPECT_EQ(spans[0]["endTimeUnixNano"], "1700000002123456789");
  EXPECT_EQ(spans[0]["status"]["code"], 1);
  EXPECT_EQ(spans[1]["status"]["code"], 2);
  EXPECT_FALSE(spans[1].contains("parentSpanId"));
  bool found = false;
  for (const auto& attribute : spans[0]["attributes"]) {
    found |= attribute["key"] == "gen_ai.usage.output_tokens" && attribute["value"]["intValue"] == "9";
  }
  EXPECT_TRUE(found);
}

TEST(SpanExporterTest, ACollectorThatIsAwayOrSilentCostsSpansAndNoTime) {
  Collector silent("");
  Collector angry("HTTP/1.1 500 no\r\n\r\n");
  for (const std::string& url : {std::string("http://127.0.0.1:1"), silent.url(), angry.url()}) {
    const auto begin = std::chrono::steady_clock::now();
    {
      auto exporter = SpanExporter::Start(
          {.endpoint = url, .version = "", .max_queue = 16, .max_batch = 8, .interval = 5ms, .timeout = 200ms});
      ASSERT_TRUE(exporter.ok()) << exporter.status();
      const auto before = std::chrono::steady_clock::now();
      for (int i = 0; i < 10000; ++i) (*exporter)->Add(Span(i));
      EXPECT_LT(std::chrono::steady_clock::now() - before, 2s);
      EXPECT_GE((*exporter)->dropped(), 9000u) << url;
      EXPECT_EQ((*exporter)->exported(), 0u);
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 4s) << url;
  }
}

TEST(SpanExporterTest, BadEndpointsAreNamed) {
  for (const char* bad : {"", "collector:4318", "https://collector", "http://", "http://:4318", "http://a:b",
                          "http://a:123456", "http://a/x\r\ny"}) {
    const auto exporter = SpanExporter::Start({.endpoint = bad, .version = ""});
    ASSERT_FALSE(exporter.ok()) << bad;
    EXPECT_THAT(std::string(exporter.status().message()), HasSubstr("--otlp-endpoint"));
  }
  EXPECT_TRUE(SpanExporter::Start({.endpoint = "http://[::1]:4318/custom", .version = ""}).ok());
}

}  // namespace
}  // namespace k3
