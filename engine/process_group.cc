#include "engine/process_group.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/step_wire.h"
#include "kernels/core/check.h"

namespace k3 {
namespace {

// Several words as one.
std::string Join(const std::vector<std::string>& words) {
  std::string bytes;
  for (const std::string& word : words) {
    const uint64_t size = word.size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
    bytes += word;
  }
  return bytes;
}

std::vector<std::string> Part(std::string_view bytes) {
  std::vector<std::string> words;
  while (bytes.size() >= sizeof(uint64_t)) {
    uint64_t size = 0;
    std::memcpy(&size, bytes.data(), sizeof size);
    bytes.remove_prefix(sizeof size);
    size = std::min<uint64_t>(size, bytes.size());
    words.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return words;
}

std::string NumberAnd(int number, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&number), sizeof number) + text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProcessGroup>> ProcessGroup::Join(const ProcessPlace& place,
                                                                 const std::string& agreement,
                                                                 std::chrono::milliseconds patience) {
  std::unique_ptr<ProcessGroup> group(new ProcessGroup(place));
  if (!group->leads()) {
    auto link = ProcessLink::Connect(place.master_host, place.master_port, patience);
    if (!link.ok()) return link.status();
    group->peers_.resize(1);
    group->peers_[0].link = *std::move(link);
    if (absl::Status sent = group->Send(kWord, NumberAnd(place.process, agreement)); !sent.ok()) return sent;
    const auto welcome = group->peers_[0].link->Receive(patience);
    if (!welcome.ok()) {
      return absl::UnavailableError(
          absl::StrCat("the first process does not answer: ", std::string(welcome.status().message())));
    }
    if (!welcome->bytes.empty()) return absl::FailedPreconditionError(welcome->bytes);
    return group;
  }
  auto listener = ProcessListener::Listen(place.master_port);
  if (!listener.ok()) return listener.status();
  group->peers_ = std::vector<Peer>(static_cast<size_t>(place.processes - 1));
  const auto deadline = std::chrono::steady_clock::now() + patience;
  std::string problem;
  for (int joined = 1; joined < place.processes;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    auto link = (*listener)->Accept(std::max(left, std::chrono::milliseconds(0)));
    if (!link.ok()) {
      return absl::UnavailableError(absl::StrCat("only ", joined, " of ", place.processes, " processes came within ",
                                                 patience.count() / 1000, " s"));
    }
    const auto hello = (*link)->Receive(std::chrono::seconds(5));
    int number = 0;
    if (!hello.ok() || hello->kind != kWord || hello->bytes.size() < sizeof number) continue;  // a stray connection
    std::memcpy(&number, hello->bytes.data(), sizeof number);
    if (number < 1 || number >= place.processes || group->peer(number).link != nullptr) continue;
    const std::string theirs = hello->bytes.substr(sizeof number);
    if (theirs != agreement) {
      problem = absl::StrCat("process ", number, " was started for something else: \"", theirs,
                             "\", the first one for \"", agreement, "\"");
    }
    group->peer(number).link = *std::move(link);
    ++joined;
  }
  // Empty: welcome.
  static_cast<void>(group->Send(kWord, problem));
  if (!problem.empty()) return absl::FailedPreconditionError(problem);
  return group;
}

ProcessGroup::~ProcessGroup() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  for (Peer& peer : peers_) {
    if (peer.link != nullptr) peer.link->Close();
  }
  for (Peer& peer : peers_) {
    if (peer.reader.joinable()) peer.reader.join();
  }
}

absl::StatusOr<std::vector<std::string>> ProcessGroup::Exchange(std::string_view own) {
  if (!leads()) {
    if (absl::Status sent = Send(kWord, own); !sent.ok()) return sent;
    auto all = peers_[0].link->Receive();
    if (!all.ok()) {
      return absl::UnavailableError(absl::StrCat("the first process: ", std::string(all.status().message())));
    }
    return Part(all->bytes);
  }
  std::vector<std::string> words = {std::string(own)};
  for (int process = 1; process < place_.processes; ++process) {
    auto word = peer(process).link->Receive();
    if (!word.ok()) {
      return absl::UnavailableError(absl::StrCat("process ", process, ": ", std::string(word.status().message())));
    }
    words.push_back(std::move(word->bytes));
  }
  if (absl::Status sent = Send(kWord, k3::Join(words)); !sent.ok()) return sent;
  return words;
}

void ProcessGroup::Watch(std::function<void(const std::string&)> on_lost) {
  on_lost_ = std::move(on_lost);
  for (size_t i = 0; i < peers_.size(); ++i) peers_[i].reader = std::thread([this, i] { Read(i); });
}

void ProcessGroup::Read(size_t index) {
  Peer& peer = peers_[index];
  const int process = leads() ? static_cast<int>(index) + 1 : 0;
  while (true) {
    auto message = peer.link->Receive();
    std::string why;
    {
      std::lock_guard lock(mutex_);
      if (ending_) return;
      if (message.ok() && message->kind != kFailure) {
        const bool last = message->kind == kEnd;
        peer.inbox.push_back(*std::move(message));
        wake_.notify_all();
        if (last) return;
        continue;
      }
      why = absl::StrCat("process ", process, " of ", place_.processes,
                         message.ok() ? absl::StrCat(" failed: ", message->bytes)
                                      : absl::StrCat(" is lost: ", std::string(message.status().message())));
      peer.lost = absl::UnavailableError(why);
      wake_.notify_all();
    }
    if (on_lost_) on_lost_(why);
    return;
  }
}

absl::Status ProcessGroup::Send(Kind kind, std::string_view bytes) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (absl::Status sent = peers_[i].link->Send(kind, bytes); !sent.ok()) {
      return absl::UnavailableError(absl::StrCat("process ", leads() ? i + 1 : 0, ": ", std::string(sent.message())));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ProcessLink::Message> ProcessGroup::Next(int process) {
  std::unique_lock lock(mutex_);
  Peer& from = peer(process);
  wake_.wait(lock, [&] { return !from.inbox.empty() || !from.lost.ok(); });
  if (from.inbox.empty()) return from.lost;
  ProcessLink::Message message = std::move(from.inbox.front());
  from.inbox.pop_front();
  return message;
}

bool ProcessGroup::Waits(int process) {
  std::lock_guard lock(mutex_);
  return !peer(process).inbox.empty();
}

absl::Status ProcessRunner::Submit(const StepPlan& plan) {
  if (absl::Status sent = group_.Send(ProcessGroup::kPlan, EncodePlan(plan)); !sent.ok()) return sent;
  return own_.Submit(plan);
}

absl::Status ProcessRunner::Wait(StepResult* result) {
  for (RankResult& rank : result->ranks) rank.routing = {};  // of the step before, where a process has nothing to tell
  if (absl::Status status = own_.Wait(result); !status.ok()) return status;
  for (int process = 1; process < group_.place().processes; ++process) {
    const auto message = group_.Next(process);
    if (!message.ok()) return message.status();
    if (absl::Status status = DecodeResult(message->bytes, result); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ProcessRunner::Run(const StepPlan& plan, StepResult* result) {
  if (absl::Status status = Submit(plan); !status.ok()) return status;
  return Wait(result);
}

void ProcessRunner::Scrub(int32_t data_rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) {
  if (absl::Status sent = group_.Send(ProcessGroup::kScrub, EncodeScrub({data_rank, pages, slots})); !sent.ok()) {
    throw DeviceError(std::string(sent.message()));
  }
  own_.Scrub(data_rank, pages, slots);
}

absl::Status FollowLeader(RankGroup& own, ProcessGroup& group) {
  constexpr size_t kPlans = 4;
  StepPlan plans[kPlans];
  uint64_t submitted = 0, waited = 0;
  StepResult result;
  const auto fail = [&](const absl::Status& status) {
    static_cast<void>(group.Send(ProcessGroup::kFailure, std::string(status.message())));
    return status;
  };
  while (true) {
    // Results go out when they are there and nothing new is to be started first.
    const uint64_t room = static_cast<uint64_t>(own.max_in_flight());
    while (submitted > waited && (submitted - waited >= room || !group.Waits(0))) {
      for (RankResult& rank : result.ranks) rank = {};
      if (absl::Status status = own.Wait(&result); !status.ok()) return fail(status);
      ++waited;
      // Only what this process has drawn.
      std::vector<bool> local(result.ranks.size());
      for (int i = 0; i < own.local_ranks(); ++i) {
        if (own.tensor_rank_of(i) == 0) local[static_cast<size_t>(own.data_rank_of(i))] = true;
      }
      for (size_t r = 0; r < result.ranks.size(); ++r) {
        if (!local[r]) result.ranks[r] = {};
      }
      if (absl::Status sent = group.Send(ProcessGroup::kResult, EncodeResult(result)); !sent.ok()) return sent;
    }
    const auto message = group.Next(0);
    if (!message.ok()) return message.status();
    switch (message->kind) {
      case ProcessGroup::kPlan: {
        StepPlan& plan = plans[submitted % kPlans];
        if (absl::Status status = DecodePlan(message->bytes, &plan); !status.ok()) return fail(status);
        if (absl::Status status = own.Submit(plan); !status.ok()) return fail(status);
        ++submitted;
        break;
      }
      case ProcessGroup::kScrub: {
        ScrubOrder order;
        if (absl::Status status = DecodeScrub(message->bytes, &order); !status.ok()) return fail(status);
        own.Scrub(order.data_rank, order.pages, order.slots);
        break;
      }
      case ProcessGroup::kEnd:
        return absl::OkStatus();
      default:
        return fail(absl::InternalError(absl::StrCat("message ", message->kind, " is not for a follower")));
    }
  }
}

}  // namespace k3
