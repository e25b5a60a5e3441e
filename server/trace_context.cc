#include "server/trace_context.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace k3 {
namespace {

constexpr size_t kHeaderSize = 55;  // 2-32-16-2 hex digits and three dashes

bool IsLowerHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

std::string RandomHex(int words) {
  static thread_local std::mt19937_64 generator{std::random_device{}()};
  std::string text;
  for (int i = 0; i < words; ++i) absl::StrAppendFormat(&text, "%016x", generator() | 1);
  return text;
}

}  // namespace

std::string TraceContext::Header() const {
  return active() ? absl::StrCat("00-", trace_id, "-", span_id, sampled ? "-01" : "-00") : std::string();
}

std::string TraceContext::LogField() const { return active() ? absl::StrCat(" trace=", trace_id) : std::string(); }

TraceContext ContinueTrace(std::string_view traceparent, bool begin) {
  TraceContext context;
  const std::string_view version = traceparent.substr(0, 2);
  // A later version may add fields at the end, after a dash; version ff is not allowed.
  const bool shaped = traceparent.size() >= kHeaderSize && traceparent[2] == '-' && traceparent[35] == '-' &&
                      traceparent[52] == '-' && IsLowerHex(version) && version != "ff" &&
                      (traceparent.size() == kHeaderSize || (version != "00" && traceparent[kHeaderSize] == '-'));
  if (shaped) {
    const std::string_view trace = traceparent.substr(3, 32);
    const std::string_view parent = traceparent.substr(36, 16);
    const std::string_view flags = traceparent.substr(53, 2);
    if (IsLowerHex(trace) && !IsZero(trace) && IsLowerHex(parent) && !IsZero(parent) && IsLowerHex(flags)) {
      context.trace_id = trace;
      context.parent_id = parent;
      context.sampled = ((flags[1] >= 'a' ? flags[1] - 'a' + 10 : flags[1] - '0') & 1) != 0;
    }
  }
  if (!context.active() && begin) {
    context.trace_id = RandomHex(2);
    context.sampled = true;
  }
  if (context.active()) context.span_id = RandomHex(1);
  return context;
}

}  // namespace k3
