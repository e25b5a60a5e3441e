#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace k3 {

// Where a request stands in a distributed trace (W3C Trace Context). Empty ids: the request belongs to no trace.
struct TraceContext {
  std::string trace_id;   // 32 hex digits
  std::string parent_id;  // the caller's span, 16 hex digits; empty when the trace begins here
  std::string span_id;    // this request's span
  bool sampled = false;

  bool active() const { return !trace_id.empty(); }
  // The `traceparent` header that names this request's span; empty when inactive.
  std::string Header() const;
  // " trace=..." for a log line; empty when inactive.
  std::string LogField() const;
};

// Continues the trace that a `traceparent` header names, with a span id of its own. Without a valid header: a new,
// sampled trace when `begin`, else none.
TraceContext ContinueTrace(std::string_view traceparent, bool begin);

}  // namespace k3
