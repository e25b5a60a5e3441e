#include "server/engine_refusal.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/error_details.h"

namespace k3 {
namespace {

absl::Status QueueRefusal(const absl::Status& status, const EngineInterface& engine, bool has_deadline) {
  const EngineLimits limits = engine.Limits();
  const EngineLoad load = engine.Load();
  const bool full = !has_deadline || load.waiting >= limits.max_queue;
  ErrorDetails details;
  details.reason = full ? "queue_full" : "deadline_unreachable";
  details.numbers = {{"waiting", absl::StrCat(load.waiting)},
                     {"running", absl::StrCat(load.running)},
                     {"max_queue", absl::StrCat(limits.max_queue)}};
  details.quotas.push_back({"queue", std::string(status.message())});
  // Longer queues drain later; clients honour at most two minutes.
  details.retry_after = absl::Seconds(std::clamp(1 + load.waiting / 32, 1, 60));
  // The engine knows better where it has seen steps go by.
  int64_t retry_ms = 0;
  const auto payload = status.GetPayload(kRetryAfterPayload);
  if (payload.has_value() && absl::SimpleAtoi(std::string(*payload), &retry_ms)) {
    details.retry_after = absl::Milliseconds(retry_ms);
  }
  return WithDetails(status, details);
}

}  // namespace

absl::Status EngineRefusal(const absl::Status& status, const EngineInterface& engine, bool has_deadline) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return QueueRefusal(status, engine, has_deadline);
    case absl::StatusCode::kUnavailable:
      return UnavailableFor("draining", std::string(status.message()), absl::Seconds(1));
    case absl::StatusCode::kFailedPrecondition: {
      const EngineLimits limits = engine.Limits();
      ErrorDetails details;
      details.reason = "capacity_exceeded";
      details.numbers = {{"latent_pages", absl::StrCat(limits.latent_pages)},
                         {"page_size", absl::StrCat(limits.page_size)},
                         {"state_slots", absl::StrCat(limits.state_slots)}};
      details.preconditions.push_back({"pools", "k3serve", std::string(status.message())});
      return WithDetails(status, details);
    }
    default:
      return status;
  }
}

}  // namespace k3
