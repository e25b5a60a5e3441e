#include "engine/admission_queue.h"

#include <algorithm>

#include "kernels/core/check.h"

namespace k3 {

double AdmissionQueue::Cost(const Request& request) {
  // Requests that do not say how much they want ask for all that fits; they rarely use it.
  constexpr int32_t kMostExpected = 1024;
  return static_cast<double>(request.prompt_tokens.size()) +
         static_cast<double>(std::min(request.sampling.max_new_tokens, kMostExpected)) * request.num_choices;
}

void AdmissionQueue::Push(LiveRequest* live, bool long_prompt) {
  LiveRequest::Ticket& ticket = live->ticket;
  K3_CHECK(!ticket.queued);
  const Request& request = *live->request;
  ticket.queued = true;
  ticket.long_prompt = long_prompt;
  ticket.level = std::clamp(request.priority, -kMostPriority, kMostPriority);
  ticket.order = next_order_++;
  Level& level = levels_[ticket.level];
  ticket.tag = level.virtual_time;
  if (!request.session_id.empty()) {
    const auto [place, fresh] = level.sessions.try_emplace(request.session_id);
    Session& session = place->second;
    if (!fresh && session.waiting == 0) --level.idle_sessions;
    ticket.tag = std::max(ticket.tag, session.finish);
    session.finish = ticket.tag + Cost(request);
    ++session.waiting;
  }
  level.waiting[long_prompt].emplace(Key{ticket.tag, ticket.order}, live);
  ++size_;
}

void AdmissionQueue::Remove(LiveRequest* live, bool admitted) {
  LiveRequest::Ticket& ticket = live->ticket;
  K3_CHECK(ticket.queued);
  ticket.queued = false;
  --size_;
  const auto place = levels_.find(ticket.level);
  K3_CHECK(place != levels_.end());
  Level& level = place->second;
  K3_CHECK(level.waiting[ticket.long_prompt].erase(Key{ticket.tag, ticket.order}) == 1);
  if (admitted) level.virtual_time = std::max(level.virtual_time, ticket.tag);
  if (level.waiting[0].empty() && level.waiting[1].empty()) {
    levels_.erase(place);  // nobody competes: what sessions used before no longer matters
    return;
  }
  const std::string& name = live->request->session_id;
  if (name.empty()) return;
  Session& session = level.sessions.at(name);
  if (!admitted) session.finish = std::max(level.virtual_time, session.finish - Cost(*live->request));
  if (--session.waiting > 0) return;
  if (++level.idle_sessions < level.sweep_at) return;
  for (auto it = level.sessions.begin(); it != level.sessions.end();) {
    const auto current = it++;
    if (current->second.waiting > 0 || current->second.finish > level.virtual_time) continue;
    level.sessions.erase(current);
    --level.idle_sessions;
  }
  level.sweep_at = 2 * level.idle_sessions + 64;
}

LiveRequest* AdmissionQueue::Next(Clock::time_point now, bool allow_long) const {
  LiveRequest* best = nullptr;
  double best_priority = 0;
  for (const auto& [priority, level] : levels_) {
    LiveRequest* head = nullptr;
    for (int kind = 0; kind < (allow_long ? 2 : 1); ++kind) {
      if (level.waiting[kind].empty()) continue;
      LiveRequest* first = level.waiting[kind].begin()->second;
      if (head == nullptr || Key{first->ticket.tag, first->ticket.order} < Key{head->ticket.tag, head->ticket.order}) {
        head = first;
      }
    }
    if (head == nullptr) continue;
    const double waited = std::chrono::duration<double>(now - head->arrival).count();
    const double effective = priority + waited / ageing_seconds_;
    if (best == nullptr || effective > best_priority ||
        (effective == best_priority && head->ticket.order < best->ticket.order)) {
      best = head;
      best_priority = effective;
    }
  }
  return best;
}

}  // namespace k3
