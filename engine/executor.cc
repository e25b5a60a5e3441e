#include "engine/executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/request.h"
#include "kernels/core/check.h"

namespace k3 {
namespace {

// Log-probabilities a row for which there is room.
constexpr size_t kMostTop = kMaxTopLogprobs;
// Room in the block of a decode step for logit edits and masks; steps with more are not padded.
constexpr size_t kDecodeExtraBytes = size_t{4} << 20;

// Output arrays one behind the other: token, status, logprob, top ids, top log-probabilities.
size_t OutputBytes(size_t rows, size_t top) { return rows * (12 + 8 * top); }

// Pages of the longest sequence.
int64_t TableStride(const StepBounds& bounds, int32_t page_size) {
  return (bounds.context + page_size - 1) / page_size;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(const Model& model, Ops& ops, const StepBounds& bounds,
                                                           const CacheGeometry& geometry, ExecutorOptions options) {
  try {
    return std::unique_ptr<Executor>(new Executor(model, ops, bounds, geometry, std::move(options)));
  } catch (const DeviceError& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for workspace (", Workspace::Bytes(model.config(), bounds, ops, model.workspace_ranks()),
        " bytes), ", geometry.pages, " latent pages (", CacheStorage::PageBytes(model.config(), geometry),
        " bytes each) and ", geometry.slots, " state slots (", CacheStorage::SlotBytes(model.config(), geometry),
        " bytes each): ", error.what()));
  }
}

std::vector<int32_t> Executor::DecodeSizes(int64_t most_sequences) {
  std::vector<int32_t> sizes;
  for (int64_t size = 1; size < most_sequences;) {
    sizes.push_back(static_cast<int32_t>(size));
    // Padding costs little: a few rows of products that read the same weights.
    size += size < 4 ? 1 : size < 16 ? 4 : size < 64 ? 8 : size < 256 ? 32 : 128;
  }
  if (most_sequences > 0) sizes.push_back(static_cast<int32_t>(most_sequences));
  return sizes;
}

Executor::StagingSizes Executor::Sizes(int64_t vocab_size, const StepBounds& bounds, int32_t page_size,
                                       const std::vector<int32_t>& decode_sizes) {
  StagingSizes sizes;
  const int64_t stride = TableStride(bounds, page_size);
  // Every token may be scored, and every sequence may have its prompt end with the first tokens of all its choices.
  const auto rows = static_cast<size_t>(bounds.tokens + kMaxChoices * bounds.sequences);
  sizes.input = static_cast<size_t>(bounds.tokens * 16 + bounds.sequences * (stride * 4 + 256)) +
                rows * (sizeof(SampleRow) + 4) + MostExtrasOfRow(vocab_size) + 65536;
  for (int32_t size : decode_sizes) {
    if (size > std::min(bounds.sequences, bounds.tokens)) break;
    sizes.largest_decode = size;
  }
  const size_t largest = static_cast<size_t>(sizes.largest_decode);
  sizes.output = OutputBytes(rows, kMostTop) + 4096;
  if (largest > 0) {
    sizes.decode_table = largest * static_cast<size_t>(stride) * sizeof(int32_t);
    sizes.decode_input = largest * 256 + sizes.decode_table + kDecodeExtraBytes;
  }
  return sizes;
}

size_t Executor::StagingBytes(int64_t vocab_size, const StepBounds& bounds, int32_t page_size,
                              const std::vector<int32_t>& decode_sizes) {
  const StagingSizes sizes = Sizes(vocab_size, bounds, page_size, decode_sizes);
  return sizes.input + sizes.output + sizes.decode_input + sizes.decode_table;
}

Executor::Executor(const Model& model, Ops& ops, const StepBounds& bounds, const CacheGeometry& geometry,
                   ExecutorOptions options)
    : model_(model),
      ops_(ops),
      options_(std::move(options)),
      workspace_(model.config(), bounds, ops, model.workspace_ranks()),
      cache_(model.config(), geometry, ops) {
  if (options_.balance.has_value()) {
    const ParallelContext& parallel = model.parallel();
    balance_ = std::make_unique<ExpertBalance>(model.config(), ops, *options_.balance,
                                               parallel.tensor_size() * parallel.data_size(), parallel.data_rank(),
                                               bounds.tokens, bounds.sequences);
  }
  table_stride_ = TableStride(bounds, geometry.page_size);
  const StagingSizes sizes = Sizes(vocab_size(), bounds, geometry.page_size, options_.decode_sizes);
  Reserve(input_, sizes.input);
  for (int32_t size : options_.decode_sizes) {
    if (size > sizes.largest_decode) continue;
    decode_sizes_.push_back({PaddedInputs(size, vocab_size(), balance_ != nullptr), nullptr});
  }
  Reserve(output_, sizes.output);
  if (sizes.largest_decode > 0) {
    Reserve(decode_input_, sizes.decode_input);
    decode_table_ = static_cast<int32_t*>(ops_.Allocate(sizes.decode_table));
    // No pages; a step spreads only as many columns as it has.
    ops_.Fill(decode_table_, 0xFF, sizes.decode_table, ops_.stream());
  }
  for (int mark = 0; mark < kMarks; ++mark) {
    begun_[mark] = ops_.MakeEvent();
    ended_[mark] = ops_.MakeEvent();
  }
}

Executor::~Executor() {
  try {
    ops_.Synchronize(ops_.stream());
  } catch (const DeviceError&) {
    // The device is lost; its memory goes with it.
  }
  for (Staging* staging : {&input_, &output_, &decode_input_}) Free(*staging);
  if (decode_table_ != nullptr) ops_.Free(decode_table_);
  for (int mark = 0; mark < kMarks; ++mark) {
    ops_.FreeEvent(begun_[mark]);
    ops_.FreeEvent(ended_[mark]);
  }
}

void Executor::Free(Staging& staging) {
  for (void*& host : staging.host) {
    if (host != nullptr) ops_.FreeHost(host);
    host = nullptr;
  }
  if (staging.device != nullptr) ops_.Free(staging.device);
  staging.device = nullptr;
}

void Executor::Reserve(Staging& staging, size_t bytes) {
  try {
    for (void*& host : staging.host) host = ops_.AllocateHost(bytes);
    staging.device = ops_.Allocate(bytes);
  } catch (...) {
    Free(staging);
    throw;
  }
  staging.capacity = bytes;
}

absl::Status Executor::Submit(const StepPlan& plan) {
  K3_CHECK(plan.ranks.size() == static_cast<size_t>(model_.parallel().data_size()));
  K3_CHECK(submitted_ - waited_ < kFlights);
  const int place = static_cast<int>(submitted_ % kFlights);
  const size_t mark = submitted_ % kMarks;
  if (options_.profile != nullptr && submitted_ == waited_ && options_.profile->TakeRequest() && options_.on_profile) {
    options_.on_profile(*options_.profile);
  }
  try {
    ops_.BindThread();
    ops_.BeginRange("step");
    ops_.RecordEvent(begun_[mark], ops_.stream());
    SubmitRank(plan, place, &flights_[place]);
    if (balance_ != nullptr) CountStep(plan, place, &flights_[place]);
    ops_.RecordEvent(ended_[mark], ops_.stream());
    ops_.EndRange();
  } catch (const DeviceError& error) {
    return absl::InternalError(error.what());
  }
  ++submitted_;
  return absl::OkStatus();
}

absl::Status Executor::Wait(StepResult* result) {
  K3_CHECK(waited_ < submitted_);
  const int place = static_cast<int>(waited_ % kFlights);
  const size_t mark = waited_ % kMarks;
  result->ranks.resize(static_cast<size_t>(model_.parallel().data_size()));
  try {
    ops_.WaitEvent(ended_[mark]);
    times_.busy_ms += ops_.Milliseconds(begun_[mark], ended_[mark]);
    if (waited_ > 0) times_.idle_ms += ops_.Milliseconds(ended_[(waited_ - 1) % kMarks], begun_[mark]);
  } catch (const DeviceError& error) {
    return absl::InternalError(error.what());
  }
  ++times_.steps;
  ++waited_;
  if (profiling() && options_.profile->EndStep() && options_.on_profile) options_.on_profile(*options_.profile);
  RankResult& own = result->ranks[static_cast<size_t>(model_.parallel().data_rank())];
  Unpack(flights_[place], static_cast<const char*>(output_.host[place]), &own);
  own.routing.updated = 0;
  if (flights_[place].balance_update) balance_->Take(place, &own.routing);
  return absl::OkStatus();
}

absl::Status Executor::Run(const StepPlan& plan, StepResult* result) {
  if (absl::Status status = Submit(plan); !status.ok()) return status;
  return Wait(result);
}

void Executor::CountStep(const StepPlan& step, int place, Flight* flight) {
  const RankPlan& plan = step.ranks[static_cast<size_t>(model_.parallel().data_rank())];
  if (plan.tokens.empty()) return;
  const DecodeSize* size = CommonSize(step);
  const int64_t rows = size != nullptr ? size->inputs.size() : plan.num_tokens();
  flight->balance_update = balance_->Fetch(rows, plan.num_tokens(), plan.num_tokens() > plan.num_sequences(), place);
}

void Executor::SubmitRank(const StepPlan& step, int place, Flight* flight) {
  const RankPlan& plan = step.ranks[static_cast<size_t>(model_.parallel().data_rank())];
  const Stream stream = ops_.stream();
  if (balance_ != nullptr) balance_->Upload(plan.epoch_uploads);
  for (StateSlot slot : plan.zero_slots) cache_.ZeroSlot(slot);
  for (const StateCopy& copy : plan.state_copies) cache_.CopySlot(copy.from, copy.to);
  for (const PageCopy& copy : plan.page_copies) cache_.CopyPage(copy.from, copy.to);

  const size_t rows = plan.logits_row.size();
  const size_t top = static_cast<size_t>(plan.max_top_logprobs);
  *flight = {.rows = rows, .top = top, .out_rows = rows, .out_top = top};
  int64_t dispatch_rows = 0;  // the most tokens of any group
  for (const RankPlan& other : step.ranks) dispatch_rows = std::max<int64_t>(dispatch_rows, other.num_tokens());
  if (dispatch_rows == 0) return;
  if (const DecodeSize* size = CommonSize(step); size != nullptr) return SubmitDecode(plan, *size, place, flight);
  if (plan.tokens.empty()) {
    model_.Forward(SequenceBatch(), nullptr, workspace_, cache_, nullptr, dispatch_rows);
    return;
  }

  const auto extras = PackedBytes(plan) <= input_.capacity ? ExtrasPlace::kWithin : ExtrasPlace::kApart;
  const size_t used = PackedBytes(plan, extras);
  K3_CHECK(used <= input_.capacity && OutputBytes(rows, top) <= output_.capacity);
  const DeviceInputs in = Pack(plan, input_.host[place], input_.device, extras);
  ops_.CopyToDevice(input_.device, input_.host[place], used, stream);
  const bool unknown = std::any_of(plan.tokens.begin(), plan.tokens.end(), [](int32_t token) { return token < 0; });
  if (unknown) {
    ops_.BeginStep(
        {.tokens = in.tokens, .num_tokens = in.batch.num_tokens, .drawn = static_cast<const int32_t*>(output_.device)},
        stream);
  }
  const MatrixView hidden =
      model_.Forward(in.batch, in.tokens, workspace_, cache_, nullptr, dispatch_rows, balance_.get());
  if (rows == 0) return;
  if (extras == ExtrasPlace::kApart) {
    SampleInPasses(plan, in, hidden, place, used);
  } else {
    Sample(in, hidden, 0, rows, rows, top);
  }
  ops_.CopyToHost(output_.host[place], output_.device, OutputBytes(rows, top), stream);
}

const Executor::DecodeSize* Executor::CommonSize(const StepPlan& step) const {
  size_t count = 0;
  for (const RankPlan& plan : step.ranks) count = std::max(count, plan.context.size());
  const auto size = std::find_if(decode_sizes_.begin(), decode_sizes_.end(), [count](const DecodeSize& candidate) {
    return static_cast<size_t>(candidate.inputs.size()) >= count;
  });
  if (size == decode_sizes_.end()) return nullptr;
  for (const RankPlan& plan : step.ranks) {
    if (plan.tokens.empty()) continue;
    if (!size->inputs.Takes(plan) || plan.page_table_stride > table_stride_ ||
        static_cast<size_t>(plan.max_top_logprobs) > kMostTop ||
        size->inputs.PackedBytes(plan) > decode_input_.capacity) {
      return nullptr;
    }
  }
  return &*size;
}

void Executor::SubmitDecode(const RankPlan& plan, const DecodeSize& size, int place, Flight* flight) {
  const std::optional<size_t> bytes = size.inputs.Pack(plan, decode_input_.host[place], decode_input_.capacity);
  K3_CHECK(bytes.has_value());
  ops_.CopyToDevice(decode_input_.device, decode_input_.host[place], *bytes, ops_.stream());
  if (size.work != nullptr && !profiling()) {
    ops_.Launch(*size.work, ops_.stream());
  } else {
    RunDecode(size);
  }
  flight->out_rows = static_cast<size_t>(size.inputs.size());
  flight->out_top = kMostTop;
  ops_.CopyToHost(output_.host[place], output_.device, OutputBytes(flight->out_rows, flight->top > 0 ? kMostTop : 0),
                  ops_.stream());
}

void Executor::RunDecode(const DecodeSize& size) {
  const DeviceInputs in = size.inputs.At(decode_input_.device, decode_table_, table_stride_);
  ops_.BeginStep({.tokens = in.tokens,
                  .num_tokens = in.batch.num_tokens,
                  .drawn = static_cast<const int32_t*>(output_.device),
                  .packed_table = in.packed_table,
                  .packed_stride = in.packed_stride,
                  .sequences = in.batch.num_sequences,
                  .table = decode_table_,
                  .table_stride = table_stride_},
                 ops_.stream());
  const MatrixView hidden =
      model_.Forward(in.batch, in.tokens, workspace_, cache_, nullptr, /*dispatch_rows=*/0, balance_.get());
  const auto rows = static_cast<size_t>(size.inputs.size());
  Sample(in, hidden, 0, rows, rows, kMostTop);
}

void Executor::SampleInPasses(const RankPlan& plan, DeviceInputs in, const MatrixView& hidden, int place, size_t used) {
  char* host = static_cast<char*>(input_.host[place]) + used;
  char* device = static_cast<char*>(input_.device) + used;
  const size_t rows = plan.sample_rows.size();
  for (size_t begin = 0; begin < rows;) {
    if (begin > 0) ops_.Synchronize(ops_.stream());  // `host` is read until then
    const PackedExtras packed = PackExtras(plan, vocab_size(), begin, input_.capacity - used, host, device, &in);
    ops_.CopyToDevice(device, host, packed.bytes, ops_.stream());
    Sample(in, hidden, begin, packed.end_row, rows, static_cast<size_t>(plan.max_top_logprobs));
    begin = packed.end_row;
  }
}

void Executor::Sample(const DeviceInputs& in, const MatrixView& hidden, size_t first, size_t end, size_t rows,
                      size_t top) {
  char* out = static_cast<char*>(output_.device);
  auto* token = reinterpret_cast<int32_t*>(out);
  auto* status = reinterpret_cast<int32_t*>(out + rows * 4);
  auto* logprob = reinterpret_cast<float*>(out + rows * 8);
  auto* top_ids = reinterpret_cast<int32_t*>(out + rows * 12);
  auto* top_logprobs = reinterpret_cast<float*>(out + rows * (12 + 4 * top));
  const size_t pass = static_cast<size_t>(workspace_.bounds().logits_rows);
  for (size_t begin = first; begin < end; begin += pass) {
    const size_t count = std::min(pass, end - begin);
    SampleParams sample;
    sample.logits = model_.Logits(hidden, in.logits_row + begin, static_cast<int64_t>(count), workspace_);
    sample.rows = in.sample_rows + begin;
    sample.edits = in.logit_edits;
    sample.allowed_mask = in.allowed_mask;
    sample.max_top_logprobs = static_cast<int32_t>(top);
    sample.token = token + begin;
    sample.status = status + begin;
    sample.logprob = logprob + begin;
    sample.top_ids = top_ids + begin * top;
    sample.top_logprobs = top_logprobs + begin * top;
    sample.scratch = workspace_.scratch;
    ops_.Sample(sample, ops_.stream());
  }
}

void Executor::Unpack(const Flight& flight, const char* host, RankResult* result) const {
  const size_t rows = flight.rows, top = flight.top, out_rows = flight.out_rows, out_top = flight.out_top;
  result->token.resize(rows);
  result->status.resize(rows);
  result->logprob.resize(rows);
  result->top_ids.resize(rows * top);
  result->top_logprobs.resize(rows * top);
  if (rows == 0) return;
  std::memcpy(result->token.data(), host, rows * 4);
  std::memcpy(result->status.data(), host + out_rows * 4, rows * 4);
  std::memcpy(result->logprob.data(), host + out_rows * 8, rows * 4);
  for (size_t row = 0; row < rows && top > 0; ++row) {
    std::memcpy(result->top_ids.data() + row * top, host + out_rows * 12 + row * out_top * 4, top * 4);
    std::memcpy(result->top_logprobs.data() + row * top, host + out_rows * (12 + 4 * out_top) + row * out_top * 4,
                top * 4);
  }
}

absl::StatusOr<WarmUpReport> Executor::WarmUp() {
  K3_CHECK(submitted_ == 0);
  const auto start = std::chrono::steady_clock::now();
  WarmUpReport report;
  try {
    const size_t before = ops_.FreeMemory();
    DoWarmUp(&report);
    report.bytes = static_cast<int64_t>(before) - static_cast<int64_t>(ops_.FreeMemory());
  } catch (const DeviceError& error) {
    return absl::InternalError(absl::StrCat("warm-up failed: ", error.what()));
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

void Executor::DoWarmUp(WarmUpReport* report) {
  const Stream stream = ops_.stream();
  // A prompt that fills a step, without memory of its own: every op of the largest size runs once.
  StepPlan step;
  step.ranks.resize(static_cast<size_t>(model_.parallel().data_size()));
  RankPlan& prompt = step.ranks[0];
  const int64_t length = std::min(workspace_.bounds().tokens, workspace_.bounds().context);
  prompt.tokens.assign(static_cast<size_t>(length), 0);
  prompt.token_begin = {0, static_cast<int32_t>(length)};
  prompt.context = {0};
  prompt.state_slot = {-1};
  prompt.page_table_stride = static_cast<int32_t>(table_stride_);
  prompt.page_table.assign(static_cast<size_t>(table_stride_), -1);
  prompt.sequence_of_token.assign(static_cast<size_t>(length), 0);
  for (int32_t t = 0; t < length; ++t) prompt.position.push_back(t);
  prompt.logits_row = {static_cast<int32_t>(length) - 1};
  prompt.sample_rows.resize(1);
  for (RankPlan& other : step.ranks) other = prompt;
  Flight flight;
  SubmitRank(step, 0, &flight);
  ops_.Synchronize(stream);

  for (auto size = decode_sizes_.rbegin(); size != decode_sizes_.rend(); ++size) {
    RankPlan empty;
    const std::optional<size_t> bytes = size->inputs.Pack(empty, decode_input_.host[0], decode_input_.capacity);
    K3_CHECK(bytes.has_value());
    ops_.CopyToDevice(decode_input_.device, decode_input_.host[0], *bytes, stream);
    RunDecode(*size);
    ops_.Synchronize(stream);
    if (!options_.capture || !ops_.can_capture()) continue;
    size->work = ops_.Capture([&] { RunDecode(*size); }, stream);
    ++report->graphs;
    report->smallest = size->inputs.size();
    report->largest = std::max(report->largest, size->inputs.size());
    report->nodes += static_cast<int64_t>(size->work->nodes);
  }
  if (balance_ != nullptr) balance_->Reset();
  ops_.Synchronize(stream);
}

void Executor::Scrub(int32_t rank, const std::vector<PageId>& pages, const std::vector<StateSlot>& slots) {
  K3_CHECK(rank == model_.parallel().data_rank());
  for (PageId page : pages) cache_.FillPage(page, 0);
  for (StateSlot slot : slots) cache_.ZeroSlot(slot);
}

}  // namespace k3
