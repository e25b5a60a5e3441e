#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "engine/request.h"
#include "engine/sequence.h"

namespace k3 {

// The requests that wait for their first admission, in the order in which they should run.
//
// Priority: the highest effective priority goes first, which is the request's own plus one for every `ageing_seconds`
// it has waited, so that nothing waits for ever. Priorities are cut to [-100, 100]. Sessions: among equals, start-time
// fair queueing. A request's tag is where its session's virtual time stands (the tag before plus that request's cost in
// tokens, or the queue's virtual time if the session was idle), and the lowest tag goes first: a session that sends a
// thousand requests advances no faster than one that sends one at a time. Long prompts are kept apart, so that short
// ones can pass while too many long ones are being prefilled.
//
// Every operation is logarithmic in the number waiting. Engine thread only.
class AdmissionQueue {
 public:
  explicit AdmissionQueue(double ageing_seconds) : ageing_seconds_(ageing_seconds) {}

  void Push(LiveRequest* live, bool long_prompt);
  // Leaves the queue; `admitted` advances the queue's virtual time.
  void Remove(LiveRequest* live, bool admitted);
  // The request that should run next, or null. Without `allow_long`, long prompts are passed over.
  LiveRequest* Next(Clock::time_point now, bool allow_long) const;

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  static constexpr int32_t kMostPriority = 100;

  using Key = std::pair<double, uint64_t>;  // tag, order of arrival
  struct Session {
    double finish = 0;  // tag that its next request gets
    int32_t waiting = 0;
  };
  struct Level {
    std::map<Key, LiveRequest*> waiting[2];  // [long_prompt]
    absl::flat_hash_map<std::string, Session> sessions;
    double virtual_time = 0;
    size_t idle_sessions = 0;  // without a waiting request, remembered for their finish tag
    size_t sweep_at = 64;      // idle sessions at which those whose tag has been passed are forgotten
  };

  static double Cost(const Request& request);

  double ageing_seconds_;
  std::map<int32_t, Level> levels_;  // by priority; only those where somebody waits
  uint64_t next_order_ = 0;
  size_t size_ = 0;
};

}  // namespace k3
