#include "server/span_exporter.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/descriptor.h"
#include "server/tcp_connect.h"

namespace k3 {
namespace {

using Json = nlohmann::ordered_json;

Json TextAttribute(const char* key, const std::string& value) {
  return {{"key", key}, {"value", {{"stringValue", value}}}};
}
// 64-bit numbers are strings in this encoding.
Json IntAttribute(const char* key, int64_t value) {
  return {{"key", key}, {"value", {{"intValue", absl::StrCat(value)}}}};
}
Json NumberAttribute(const char* key, double value) { return {{"key", key}, {"value", {{"doubleValue", value}}}}; }

std::string Nanos(std::chrono::system_clock::time_point time) {
  return absl::StrCat(std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

Json SpanJson(const RequestSpan& span) {
  constexpr int kServer = 2;  // SPAN_KIND_SERVER
  constexpr int kOk = 1;
  constexpr int kError = 2;
  Json json = {{"traceId", span.context.trace_id}, {"spanId", span.context.span_id}};
  if (!span.context.parent_id.empty()) json["parentSpanId"] = span.context.parent_id;
  json["name"] = span.name;
  json["kind"] = kServer;
  json["startTimeUnixNano"] = Nanos(span.start);
  json["endTimeUnixNano"] = Nanos(span.end);
  json["attributes"] = {TextAttribute("gen_ai.operation.name", span.name),
                        TextAttribute("gen_ai.request.model", span.model),
                        TextAttribute("k3serve.request_id", span.request_id),
                        TextAttribute("k3serve.outcome", span.outcome),
                        IntAttribute("gen_ai.usage.input_tokens", span.prompt_tokens),
                        IntAttribute("gen_ai.usage.output_tokens", span.completion_tokens),
                        IntAttribute("k3serve.cached_tokens", span.cached_tokens),
                        NumberAttribute("k3serve.queue_seconds", span.queue_seconds),
                        NumberAttribute("k3serve.prefill_seconds", span.prefill_seconds),
                        NumberAttribute("k3serve.decode_seconds", span.decode_seconds)};
  json["status"] = {{"code", span.ok ? kOk : kError}};
  return json;
}

absl::Status SocketError(const std::string& what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::generic_category().message(errno)));
}

}  // namespace

std::string SpansToOtlpJson(const std::vector<RequestSpan>& spans, const std::string& version) {
  Json list = Json::array();
  for (const RequestSpan& span : spans) list.push_back(SpanJson(span));
  const Json resource = {
      {"attributes", {TextAttribute("service.name", "k3serve"), TextAttribute("service.version", version)}}};
  const Json scope = {{"scope", {{"name", "k3serve"}, {"version", version}}}, {"spans", std::move(list)}};
  const Json body = {{"resourceSpans", Json::array({{{"resource", resource}, {"scopeSpans", Json::array({scope})}}})}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<std::unique_ptr<SpanExporter>> SpanExporter::Start(Options options) {
  constexpr std::string_view kScheme = "http://";
  const auto bad = [&](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("--otlp-endpoint must be http://HOST[:PORT][/PATH], ", why, ", not \"", options.endpoint, "\""));
  };
  if (!std::string_view(options.endpoint).starts_with(kScheme))
    return bad("plain HTTP (a collector beside the server)");
  std::string rest = options.endpoint.substr(kScheme.size());
  Target target{"", "4318", "/v1/traces"};
  if (const size_t slash = rest.find('/'); slash != std::string::npos) {
    if (slash + 1 < rest.size()) target.path = rest.substr(slash);
    rest.resize(slash);
  }
  const size_t bracket = rest.find(']');  // [IPv6]
  const size_t colon = rest.find(':', bracket == std::string::npos ? 0 : bracket);
  if (colon != std::string::npos) {
    target.port = rest.substr(colon + 1);
    rest.resize(colon);
  }
  if (bracket != std::string::npos && rest.front() == '[') rest = rest.substr(1, bracket - 1);
  target.host = rest;
  const bool digits = !target.port.empty() && target.port.size() <= 5 &&
                      std::all_of(target.port.begin(), target.port.end(), [](char c) { return c >= '0' && c <= '9'; });
  const auto printable = [](char c) { return c > ' ' && c < 0x7F; };
  if (target.host.empty() || !digits || !std::all_of(target.path.begin(), target.path.end(), printable)) {
    return bad("with a host and a port");
  }
  return std::unique_ptr<SpanExporter>(new SpanExporter(std::move(options), std::move(target)));
}

SpanExporter::SpanExporter(Options options, Target target)
    : options_(std::move(options)), target_(std::move(target)), thread_([this] { Run(); }) {}

SpanExporter::~SpanExporter() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void SpanExporter::Add(RequestSpan span) {
  std::lock_guard lock(mutex_);
  if (queue_.size() >= options_.max_queue) {
    dropped_.fetch_add(1);
    return;
  }
  queue_.push_back(std::move(span));
  if (queue_.size() == options_.max_batch) wake_.notify_one();
}

void SpanExporter::Run() {
  bool failing = false;  // one line when the collector goes, one when it is back
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait_for(lock, options_.interval, [this] { return stop_ || queue_.size() >= options_.max_batch; });
    const bool last = stop_;
    while (!queue_.empty()) {
      const auto count = static_cast<std::ptrdiff_t>(std::min(queue_.size(), options_.max_batch));
      std::vector<RequestSpan> batch(std::make_move_iterator(queue_.begin()),
                                     std::make_move_iterator(queue_.begin() + count));
      queue_.erase(queue_.begin(), queue_.begin() + count);
      lock.unlock();
      const absl::Status status = Send(SpansToOtlpJson(batch, options_.version));
      (status.ok() ? exported_ : dropped_).fetch_add(batch.size());
      if (status.ok() == failing) {
        failing = !status.ok();
        if (failing) {
          spdlog::warn("traces: {}: {}; spans are dropped until it answers", options_.endpoint,
                       std::string(status.message()));
        } else {
          spdlog::info("traces: {} answers again", options_.endpoint);
        }
      }
      lock.lock();
      if (last && failing) return;
    }
    if (last) return;
  }
}

absl::Status SpanExporter::Send(const std::string& body) const {
  const absl::StatusOr<int> fd = ConnectTcp(target_.host, target_.port, options_.timeout);
  if (!fd.ok()) return absl::UnavailableError(absl::StrCat("cannot connect: ", fd.status().message()));
  const Descriptor socket(*fd);
  std::string request = absl::StrCat("POST ", target_.path, " HTTP/1.1\r\nHost: ", target_.host, ":", target_.port,
                                     "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                                     "\r\nConnection: close\r\n\r\n", body);
  for (size_t sent = 0; sent < request.size();) {
    const ssize_t n = send(socket.get(), request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return SocketError("cannot send");
    sent += static_cast<size_t>(n);
  }
  // "HTTP/1.1 200": more is not needed.
  constexpr size_t kStatusEnd = 12;
  std::string reply;
  while (reply.size() < kStatusEnd) {
    char buffer[256];
    const ssize_t n = recv(socket.get(), buffer, sizeof(buffer), 0);
    if (n <= 0) return n == 0 ? absl::UnavailableError("closed without a reply") : SocketError("no reply");
    reply.append(buffer, static_cast<size_t>(n));
  }
  if (reply.compare(8, 2, " 2") == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("answered ", reply.substr(9, 3)));
}

}  // namespace k3
