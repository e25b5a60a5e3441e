#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/forwarding_ops.h"

namespace k3 {

// One kind of op over all profiled steps. Products are told apart by their shape.
struct ProfileLine {
  std::string name;
  uint64_t calls = 0;
  double milliseconds = 0;
};
struct ProfileTable {
  int64_t steps = 0;
  double milliseconds = 0;         // of the steps, from their first op to their last
  std::vector<ProfileLine> lines;  // slowest first
  std::string Text() const;
};

// Starts and ends profiles of a ProfiledOps, whose steps run meanwhile, from any thread.
class ProfileSwitch {
 public:
  static constexpr int64_t kUntilStopped = INT64_MAX;

  // A profile of `steps` steps, from the next one on. One that runs already is given up.
  void Start(int64_t steps);
  // None from the next step on. What the profile's ended steps took, also of one that has seen its last step; nothing
  // if there was no Start since the last Stop.
  std::optional<ProfileTable> Stop();

 private:
  friend class ProfiledOps;

  std::atomic<bool> asked_{false};
  std::mutex mutex_;
  int64_t steps_ = 0;  // asked for; 0: none. Guarded by mutex_, as the next two.
  bool started_ = false;
  ProfileTable ended_;  // steps since Start
};

// An Ops that measures how long each model op of another one takes: between events on the stream, or by the clock on
// the CPU. While it is active every step ends with a synchronization and must be launched op by op (captured work shows
// as one piece). Inactive it hands everything through.
class ProfiledOps final : public ForwardingOps {
 public:
  // `asked` may be null.
  explicit ProfiledOps(std::unique_ptr<Ops> inner, std::shared_ptr<ProfileSwitch> asked = nullptr);
  ~ProfiledOps() override;

  // Active from now on for `steps` steps.
  void Start(int64_t steps);

  bool active() const { return steps_left_ > 0; }
  // The switch was used and TakeRequest has not seen it.
  bool requested() const { return asked_ != nullptr && asked_->asked_.load(); }
  // Whether steps run one at a time, or are to.
  bool one_by_one() const { return active() || requested(); }
  // While no step runs: does what the switch asks for. True if that ends a profile that has seen a step.
  bool TakeRequest();
  // The device has finished a step: takes the measurements over. True when it was the last one to be profiled.
  bool EndStep();
  ProfileTable Result() const;

  // What is measured runs alone.
  Stream Fork(Stream stream) override { return measures() ? stream : inner_->Fork(stream); }
  void Join(Stream side, Stream stream) override {
    if (side != stream) inner_->Join(side, stream);
  }
  std::unique_ptr<CapturedWork> Capture(const std::function<void()>& record, Stream stream) override;
  void Measure(const char* name, Stream stream, const std::function<void()>& work) override;

  void BeginStep(const BeginStepParams& params, Stream stream) override;
  void Embed(const EmbedParams& params, Stream stream) override;
  void Linear(const LinearParams& params, Stream stream) override;
  void LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) override;
  void GatherRows(const GatherRowsParams& params, Stream stream) override;
  void CopyMatrix(const CopyMatrixParams& params, Stream stream) override;
  void TreeSum(const TreeSumParams& params, Stream stream) override;
  void PackSlots(const PackSlotsParams& params, Stream stream) override;
  void SumSlots(const SumSlotsParams& params, Stream stream) override;
  void RmsNorm(const RmsNormParams& params, Stream stream) override;
  void AddRmsNorm(const AddRmsNormParams& params, Stream stream) override;
  void AttnResMix(const AttnResMixParams& params, Stream stream) override;
  void AttnResClosed(const AttnResClosedParams& params, Stream stream) override;
  void Kda(const KdaParams& params, Stream stream) override;
  void MlaAppend(const MlaAppendParams& params, Stream stream) override;
  void MlaAttention(const MlaAttentionParams& params, Stream stream) override;
  void GatedActivation(const GatedActivationParams& params, Stream stream) override;
  void RouterTopK(const RouterTopKParams& params, Stream stream) override;
  void RouterSoftCap(const RouterSoftCapParams& params, Stream stream) override;
  void MoeExperts(const MoeExpertsParams& params, Stream stream) override;
  void Sample(const SampleParams& params, Stream stream) override;

 private:
  struct Measured {
    size_t line;
    Event from;
    Event to;
  };
  bool measures() const { return active() && !recording_; }
  template <typename Call>
  void Time(const std::string& name, Stream stream, Call&& call);
  Event TakeEvent();

  const std::shared_ptr<ProfileSwitch> asked_;
  int64_t steps_left_ = 0;
  bool recording_ = false;  // a capture: nothing runs, so nothing is measured
  ProfileTable table_;
  std::map<std::string, size_t> line_of_;
  std::vector<Measured> open_;  // of the step that runs
  std::vector<Event> events_;   // all that were made; the first used_ are in use
  size_t used_ = 0;
};

}  // namespace k3
