#include "engine/admission_queue.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

namespace k3 {
namespace {

class AdmissionQueueTest : public ::testing::Test {
 protected:
  LiveRequest* Push(const std::string& session, int32_t priority = 0, size_t prompt = 10, bool long_prompt = false) {
    auto live = std::make_unique<LiveRequest>();
    live->request = std::make_unique<Request>();
    live->request->session_id = session;
    live->request->priority = priority;
    live->request->prompt_tokens.assign(prompt, 1);
    live->request->sampling.max_new_tokens = 10;
    live->arrival = now_;
    queue_.Push(live.get(), long_prompt);
    requests_.push_back(std::move(live));
    return requests_.back().get();
  }
  LiveRequest* Admit(bool allow_long = true) {
    LiveRequest* next = queue_.Next(now_, allow_long);
    if (next != nullptr) queue_.Remove(next, true);
    return next;
  }
  void Wait(double seconds) {
    now_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  AdmissionQueue queue_{10.0};
  Clock::time_point now_{};
  std::deque<std::unique_ptr<LiveRequest>> requests_;
};

TEST_F(AdmissionQueueTest, FirstComeFirstServedAmongEquals) {
  std::vector<LiveRequest*> pushed;
  for (int i = 0; i < 10; ++i) pushed.push_back(Push(""));
  for (LiveRequest* expected : pushed) EXPECT_EQ(Admit(), expected);
  EXPECT_EQ(Admit(), nullptr);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(AdmissionQueueTest, HigherPriorityRunsSooner) {
  LiveRequest* low = Push("", -1);
  LiveRequest* plain = Push("");
  LiveRequest* high = Push("", 5);
  EXPECT_EQ(Admit(), high);
  EXPECT_EQ(Admit(), plain);
  EXPECT_EQ(Admit(), low);
}

TEST_F(AdmissionQueueTest, WaitingRaisesPriority) {
  LiveRequest* old = Push("", 0);
  Wait(25);  // worth two and a half steps
  LiveRequest* urgent = Push("", 3);
  EXPECT_EQ(queue_.Next(now_, true), urgent);
  Wait(100);  // both age alike
  EXPECT_EQ(queue_.Next(now_, true), urgent);
  LiveRequest* later = Push("", 3);
  queue_.Remove(urgent, true);
  EXPECT_EQ(queue_.Next(now_, true), old);
  queue_.Remove(old, true);
  EXPECT_EQ(Admit(), later);
}

TEST_F(AdmissionQueueTest, AFloodDoesNotStarveAnotherSession) {
  for (int i = 0; i < 1000; ++i) Push("flood");
  Admit();
  Admit();
  LiveRequest* single = Push("polite");
  LiveRequest* anonymous = Push("");
  EXPECT_EQ(Admit(), single);
  // The next of the polite session waits its turn: one against one of the flood, not after all of it.
  EXPECT_EQ(Admit(), anonymous);
  LiveRequest* second = Push("polite");
  int before = 0;
  while (Admit() != second) ++before;
  EXPECT_LE(before, 2);
}

TEST_F(AdmissionQueueTest, SessionsShareByTokensNotByRequests) {
  for (int i = 0; i < 200; ++i) {
    Push("small", 0, 90);   // cost 100
    Push("large", 0, 390);  // cost 400
  }
  int small = 0, large = 0;
  for (int i = 0; i < 100; ++i) (Admit()->request->session_id == "small" ? small : large)++;
  EXPECT_NEAR(small, 80, 2);
  EXPECT_NEAR(large, 20, 2);
}

TEST_F(AdmissionQueueTest, CancelledRequestsDoNotCountAgainstTheirSession) {
  Push("other", 0, 100);
  std::vector<LiveRequest*> cancelled;
  for (int i = 0; i < 100; ++i) cancelled.push_back(Push("mine", 0, 1000));
  for (LiveRequest* live : cancelled) queue_.Remove(live, false);
  for (int i = 0; i < 5; ++i) Push("other", 0, 100);
  LiveRequest* wanted = Push("mine", 0, 100);
  int before = 0;
  while (Admit() != wanted) ++before;
  EXPECT_LE(before, 1);
}

TEST_F(AdmissionQueueTest, LongPromptsCanBePassedOver) {
  LiveRequest* long_one = Push("", 0, 5000, true);
  LiveRequest* brief = Push("");
  EXPECT_EQ(queue_.Next(now_, true), long_one);
  EXPECT_EQ(queue_.Next(now_, false), brief);
  queue_.Remove(brief, true);
  EXPECT_EQ(queue_.Next(now_, false), nullptr);
  EXPECT_EQ(Admit(), long_one);
}

TEST_F(AdmissionQueueTest, ExtremePrioritiesAreCut) {
  LiveRequest* least = Push("", INT32_MIN);
  LiveRequest* most = Push("", INT32_MAX);
  EXPECT_EQ(Admit(), most);
  EXPECT_EQ(Admit(), least);
}

TEST_F(AdmissionQueueTest, EverySessionIsServedAndForgotten) {
  std::mt19937 random(1);
  size_t admitted = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string session = std::to_string(random() % 3000);
    Push(session, static_cast<int32_t>(random() % 3));
    if (random() % 3 == 0) {
      LiveRequest* live = requests_[random() % requests_.size()].get();
      if (live->ticket.queued) queue_.Remove(live, false);
    }
    if (random() % 2 == 0) admitted += Admit() != nullptr;
  }
  while (Admit() != nullptr) ++admitted;
  EXPECT_TRUE(queue_.empty());
  EXPECT_GT(admitted, 10000u);
  for (const auto& live : requests_) EXPECT_FALSE(live->ticket.queued);
}

}  // namespace
}  // namespace k3
