#include "engine/step_wire.h"

#include <cstring>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

class Writer {
 public:
  template <typename T>
  void operator()(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    (*this)(static_cast<uint64_t>(values.size()));
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  template <typename T>
  requires std::is_arithmetic_v<T>
  void operator()(const T& value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  void operator()(std::vector<T>& values) {
    uint64_t count = 0;
    (*this)(count);
    if (!good_ || count > bytes_.size() / sizeof(T)) return Fail();
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_.remove_prefix(count * sizeof(T));
  }
  template <typename T>
  requires std::is_arithmetic_v<T>
  void operator()(T& value) {
    if (!good_ || bytes_.size() < sizeof value) return Fail();
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
  }
  absl::Status Done(const char* what) const {
    if (good_ && bytes_.empty()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("a message with ", what, " has the wrong length"));
  }

 private:
  void Fail() { good_ = false; }
  std::string_view bytes_;
  bool good_ = true;
};

// One list of members for both directions.
template <typename Archive, typename Plan>
void Visit(Archive& archive, Plan& plan) {
  archive(plan.zero_slots);
  archive(plan.state_copies);
  archive(plan.page_copies);
  archive(plan.tokens);
  archive(plan.token_begin);
  archive(plan.context);
  archive(plan.state_slot);
  archive(plan.page_table);
  archive(plan.page_table_stride);
  archive(plan.sequence_of_token);
  archive(plan.position);
  archive(plan.snapshots);
  archive(plan.logits_row);
  archive(plan.sample_rows);
  archive(plan.logit_edits);
  archive(plan.allowed_mask);
  archive(plan.max_top_logprobs);
}

template <typename Archive, typename Result>
void VisitResult(Archive& archive, Result& result) {
  archive(result.token);
  archive(result.status);
  archive(result.logprob);
  archive(result.top_ids);
  archive(result.top_logprobs);
}

}  // namespace

std::string EncodePlan(const StepPlan& plan) {
  Writer writer;
  writer(static_cast<uint64_t>(plan.ranks.size()));
  for (const RankPlan& rank : plan.ranks) Visit(writer, rank);
  return writer.Take();
}

absl::Status DecodePlan(std::string_view bytes, StepPlan* plan) {
  Reader reader(bytes);
  uint64_t ranks = 0;
  reader(ranks);
  if (ranks > bytes.size()) return absl::DataLossError("a message with a step has the wrong length");
  plan->ranks.resize(ranks);
  for (RankPlan& rank : plan->ranks) Visit(reader, rank);
  return reader.Done("a step");
}

std::string EncodeResult(const StepResult& result) {
  Writer writer;
  writer(static_cast<uint64_t>(result.ranks.size()));
  for (const RankResult& rank : result.ranks) VisitResult(writer, rank);
  return writer.Take();
}

absl::Status DecodeResult(std::string_view bytes, StepResult* result) {
  Reader reader(bytes);
  uint64_t ranks = 0;
  reader(ranks);
  if (ranks > bytes.size()) return absl::DataLossError("a message with results has the wrong length");
  if (result->ranks.size() < ranks) result->ranks.resize(ranks);
  for (uint64_t r = 0; r < ranks; ++r) {
    RankResult rank;
    VisitResult(reader, rank);
    if (!rank.token.empty()) result->ranks[r] = std::move(rank);
  }
  return reader.Done("results");
}

std::string EncodeScrub(const ScrubOrder& order) {
  Writer writer;
  writer(order.data_rank);
  writer(order.pages);
  writer(order.slots);
  return writer.Take();
}

absl::Status DecodeScrub(std::string_view bytes, ScrubOrder* order) {
  Reader reader(bytes);
  reader(order->data_rank);
  reader(order->pages);
  reader(order->slots);
  return reader.Done("an order to scrub");
}

}  // namespace k3
