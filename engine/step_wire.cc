#include "engine/step_wire.h"

#include <concepts>
#include <cstring>
#include <type_traits>
#include <utility>
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

// T or const T: each kind of message has one list of members for both directions.
template <typename Given, typename T>
concept Either = std::same_as<std::remove_const_t<Given>, T>;

template <typename Archive, Either<RankPlan> Plan>
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
  archive(plan.epoch_uploads);
  archive(plan.epoch_slot);
  archive(plan.logits_row);
  archive(plan.sample_rows);
  archive(plan.logit_edits);
  archive(plan.allowed_mask);
  archive(plan.max_top_logprobs);
}

template <typename Archive, Either<RankResult> Result>
void Visit(Archive& archive, Result& result) {
  archive(result.token);
  archive(result.status);
  archive(result.logprob);
  archive(result.top_ids);
  archive(result.top_logprobs);
  auto& routing = result.routing;
  archive(routing.updated);
  archive(routing.groups);
  archive(routing.load);
  archive(routing.swaps);
  archive(routing.newest_epoch);
  archive(routing.override_share);
  archive(routing.worst_override_share);
  archive(routing.mean_delta);
  archive(routing.sign_changes);
  archive(routing.halvings);
  archive(routing.alarms);
  archive(routing.dampings);
}

template <typename Archive, Either<ScrubOrder> Order>
void Visit(Archive& archive, Order& order) {
  archive(order.data_rank);
  archive(order.pages);
  archive(order.slots);
}

template <typename Rank>
std::string EncodeRanks(const std::vector<Rank>& ranks) {
  Writer writer;
  writer(static_cast<uint64_t>(ranks.size()));
  for (const Rank& rank : ranks) Visit(writer, rank);
  return writer.Take();
}

// `ranks` becomes as long as the message, `keep(reader, rank)` reads one rank's part.
template <typename Rank, typename Keep>
absl::Status DecodeRanks(std::string_view bytes, const char* what, std::vector<Rank>* ranks, const Keep& keep) {
  Reader reader(bytes);
  uint64_t count = 0;
  reader(count);
  if (count > bytes.size()) return absl::DataLossError(absl::StrCat("a message with ", what, " has the wrong length"));
  ranks->resize(count);
  for (uint64_t r = 0; r < count; ++r) keep(reader, (*ranks)[r]);
  return reader.Done(what);
}

}  // namespace

std::string EncodePlan(const StepPlan& plan) { return EncodeRanks(plan.ranks); }

absl::Status DecodePlan(std::string_view bytes, StepPlan* plan) {
  return DecodeRanks(bytes, "a step", &plan->ranks, [](Reader& reader, RankPlan& rank) { Visit(reader, rank); });
}

std::string EncodeResult(const StepResult& result) { return EncodeRanks(result.ranks); }

absl::Status DecodeResult(std::string_view bytes, StepResult* result) {
  return DecodeRanks(bytes, "results", &result->ranks, [](Reader& reader, RankResult& rank) {
    RankResult sent;
    Visit(reader, sent);
    // Else another process's: what one has neither drawn nor counted it leaves out.
    if (!sent.token.empty() || sent.routing.updated != 0) rank = std::move(sent);
  });
}

std::string EncodeScrub(const ScrubOrder& order) {
  Writer writer;
  Visit(writer, order);
  return writer.Take();
}

absl::Status DecodeScrub(std::string_view bytes, ScrubOrder* order) {
  Reader reader(bytes);
  Visit(reader, *order);
  return reader.Done("an order to scrub");
}

}  // namespace k3
