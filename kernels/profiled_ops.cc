#include "kernels/profiled_ops.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace k3 {
namespace {

// Decode steps and prompts use different kernels: their rows are told apart.
const char* Kind(const SequenceBatch* batch) {
  return batch != nullptr && batch->num_tokens == batch->num_sequences ? " decode" : " prefill";
}

std::string Shape(const LinearParams& params) {
  if (params.weight == nullptr) return {};
  return " " + std::to_string(params.weight->out) + " x " + std::to_string(params.weight->in);
}

}  // namespace

void ProfileSwitch::Start(int64_t steps) {
  std::lock_guard lock(mutex_);
  steps_ = steps;
  started_ = true;
  ended_ = {};
  asked_.store(true);
}

std::optional<ProfileTable> ProfileSwitch::Stop() {
  std::lock_guard lock(mutex_);
  if (!started_) return std::nullopt;
  started_ = false;
  steps_ = 0;
  asked_.store(true);
  return std::move(ended_);
}

ProfiledOps::ProfiledOps(std::unique_ptr<Ops> inner, std::shared_ptr<ProfileSwitch> asked)
    : ForwardingOps(std::move(inner)), asked_(std::move(asked)) {}

ProfiledOps::~ProfiledOps() {
  for (Event event : events_) inner_->FreeEvent(event);
}

void ProfiledOps::Start(int64_t steps) {
  steps_left_ = steps;
  table_ = {};
  line_of_.clear();
  open_.clear();
  used_ = 0;
}

bool ProfiledOps::TakeRequest() {
  if (!requested()) return false;
  int64_t steps;
  {
    std::lock_guard lock(asked_->mutex_);
    asked_->asked_.store(false);
    steps = asked_->steps_;
  }
  if (steps > 0) {
    Start(steps);
    return false;
  }
  const bool ends = active() && table_.steps > 0;
  steps_left_ = 0;
  return ends;
}

Event ProfiledOps::TakeEvent() {
  if (used_ == events_.size()) events_.push_back(inner_->MakeEvent());
  return events_[used_++];
}

template <typename Call>
void ProfiledOps::Time(const std::string& name, Stream stream, Call&& call) {
  if (!measures()) return call();
  const auto [place, fresh] = line_of_.try_emplace(name, table_.lines.size());
  if (fresh) table_.lines.push_back({name, 0, 0});
  ProfileLine& line = table_.lines[place->second];
  ++line.calls;
  inner_->BeginRange(name.c_str());
  if (inner_->is_cpu()) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const double took = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    line.milliseconds += took;
    table_.milliseconds += took;
  } else {
    const Event from = TakeEvent(), to = TakeEvent();
    inner_->RecordEvent(from, stream);
    call();
    inner_->RecordEvent(to, stream);
    open_.push_back({place->second, from, to});
  }
  inner_->EndRange();
}

bool ProfiledOps::EndStep() {
  if (!active()) return false;
  if (!open_.empty()) {
    inner_->Synchronize(inner_->stream());
    table_.milliseconds += inner_->Milliseconds(open_.front().from, open_.back().to);
    for (const Measured& measured : open_) {
      table_.lines[measured.line].milliseconds += inner_->Milliseconds(measured.from, measured.to);
    }
  }
  open_.clear();
  used_ = 0;
  ++table_.steps;
  if (asked_ != nullptr) {
    std::lock_guard lock(asked_->mutex_);
    // What was asked for meanwhile is another profile.
    if (!asked_->asked_.load()) asked_->ended_ = Result();
  }
  return --steps_left_ == 0;
}

ProfileTable ProfiledOps::Result() const {
  ProfileTable table = table_;
  std::sort(table.lines.begin(), table.lines.end(),
            [](const ProfileLine& a, const ProfileLine& b) { return a.milliseconds > b.milliseconds; });
  return table;
}

std::string ProfileTable::Text() const {
  char row[160];
  const double count = static_cast<double>(std::max<int64_t>(steps, 1));
  std::snprintf(row, sizeof(row), "%ld steps, %.3f ms a step\n%-36s %10s %12s %7s\n", static_cast<long>(steps),
                milliseconds / count, "op", "calls/step", "ms/step", "share");
  std::string text = row;
  double sum = 0;
  for (const ProfileLine& line : lines) {
    sum += line.milliseconds;
    std::snprintf(row, sizeof(row), "%-36s %10.1f %12.4f %6.1f%%\n", line.name.c_str(),
                  static_cast<double>(line.calls) / count, line.milliseconds / count,
                  milliseconds > 0 ? 100 * line.milliseconds / milliseconds : 0.0);
    text += row;
  }
  std::snprintf(row, sizeof(row), "%-36s %10s %12.4f %6.1f%%\n", "between ops", "", (milliseconds - sum) / count,
                milliseconds > 0 ? 100 * (milliseconds - sum) / milliseconds : 0.0);
  return text + row;
}

void ProfiledOps::Measure(const char* name, Stream stream, const std::function<void()>& work) {
  Time(name, stream, work);
}

std::unique_ptr<CapturedWork> ProfiledOps::Capture(const std::function<void()>& record, Stream stream) {
  recording_ = true;
  try {
    auto work = inner_->Capture(record, stream);
    recording_ = false;
    return work;
  } catch (...) {
    recording_ = false;
    throw;
  }
}

void ProfiledOps::Linear(const LinearParams& params, Stream stream) {
  if (!measures()) return inner_->Linear(params, stream);
  Time("Linear" + Shape(params), stream, [&] { inner_->Linear(params, stream); });
}
void ProfiledOps::LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) {
  if (!measures()) return inner_->LinearPair(first, second, stream);
  Time("LinearPair" + Shape(first), stream, [&] { inner_->LinearPair(first, second, stream); });
}
void ProfiledOps::Kda(const KdaParams& params, Stream stream) {
  Time(std::string("Kda") + Kind(params.batch), stream, [&] { inner_->Kda(params, stream); });
}
void ProfiledOps::MlaAttention(const MlaAttentionParams& params, Stream stream) {
  Time(std::string("MlaAttention") + Kind(params.batch), stream, [&] { inner_->MlaAttention(params, stream); });
}
void ProfiledOps::MoeExperts(const MoeExpertsParams& params, Stream stream) {
  Time("MoeExperts", stream, [&] { inner_->MoeExperts(params, stream); });
}
void ProfiledOps::Embed(const EmbedParams& params, Stream stream) {
  Time("Embed", stream, [&] { inner_->Embed(params, stream); });
}
void ProfiledOps::GatherRows(const GatherRowsParams& params, Stream stream) {
  Time("GatherRows", stream, [&] { inner_->GatherRows(params, stream); });
}
void ProfiledOps::CopyMatrix(const CopyMatrixParams& params, Stream stream) {
  Time("CopyMatrix", stream, [&] { inner_->CopyMatrix(params, stream); });
}
void ProfiledOps::TreeSum(const TreeSumParams& params, Stream stream) {
  Time("TreeSum", stream, [&] { inner_->TreeSum(params, stream); });
}
void ProfiledOps::PackSlots(const PackSlotsParams& params, Stream stream) {
  Time("PackSlots", stream, [&] { inner_->PackSlots(params, stream); });
}
void ProfiledOps::SumSlots(const SumSlotsParams& params, Stream stream) {
  Time("SumSlots", stream, [&] { inner_->SumSlots(params, stream); });
}
void ProfiledOps::RmsNorm(const RmsNormParams& params, Stream stream) {
  Time("RmsNorm", stream, [&] { inner_->RmsNorm(params, stream); });
}
void ProfiledOps::AddRmsNorm(const AddRmsNormParams& params, Stream stream) {
  Time("AddRmsNorm", stream, [&] { inner_->AddRmsNorm(params, stream); });
}
void ProfiledOps::AttnResMix(const AttnResMixParams& params, Stream stream) {
  // The two forms are told apart.
  Time(params.mixes == nullptr ? "AttnResMix" : "AttnResMix phase 2", stream,
       [&] { inner_->AttnResMix(params, stream); });
}
void ProfiledOps::AttnResClosed(const AttnResClosedParams& params, Stream stream) {
  Time("AttnResClosed", stream, [&] { inner_->AttnResClosed(params, stream); });
}
void ProfiledOps::MlaAppend(const MlaAppendParams& params, Stream stream) {
  Time("MlaAppend", stream, [&] { inner_->MlaAppend(params, stream); });
}
void ProfiledOps::GatedActivation(const GatedActivationParams& params, Stream stream) {
  Time("GatedActivation", stream, [&] { inner_->GatedActivation(params, stream); });
}
void ProfiledOps::RouterTopK(const RouterTopKParams& params, Stream stream) {
  Time("RouterTopK", stream, [&] { inner_->RouterTopK(params, stream); });
}
void ProfiledOps::RouterSoftCap(const RouterSoftCapParams& params, Stream stream) {
  Measure("RouterSoftCap", stream, [&] { inner_->RouterSoftCap(params, stream); });
}
void ProfiledOps::Sample(const SampleParams& params, Stream stream) {
  Time("Sample", stream, [&] { inner_->Sample(params, stream); });
}
void ProfiledOps::BeginStep(const BeginStepParams& params, Stream stream) {
  Time("BeginStep", stream, [&] { inner_->BeginStep(params, stream); });
}

}  // namespace k3
