#include "tests/kernels/op_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "kernels/core/bfloat16.h"
#include "kernels/cpu/cpu_ops.h"

namespace k3::testing {

const std::vector<Backend>& Backends() {
  static const std::vector<Backend> backends = [] {
    std::vector<Backend> list;
    for (const auto& [name, isa] : {std::pair<const char*, CpuIsa>{"cpu_scalar", CpuIsa::kScalar},
                                    {"cpu_avx2", CpuIsa::kAvx2},
                                    {"cpu_avx512", CpuIsa::kAvx512}}) {
      if (Kernels(isa) == nullptr) continue;
      list.push_back({name, [isa = isa] { return MakeCpuOpsFor(isa, 2); }, 2e-6, 1e-5, true});
    }
    if (CudaDeviceCount() > 0) {
      const auto cuda = [&](const char* name, DType dtype, bool invariant, double tolerance, double kda_tolerance) {
        const CudaOptions options{0, dtype, invariant};
        list.push_back({name, [options] { return MakeCudaOps(options); }, tolerance, kda_tolerance, invariant});
      };
      cuda("cuda_bf16", DType::kBF16, false, 6e-3, 6e-3);
      cuda("cuda_bf16_invariant", DType::kBF16, true, 6e-3, 6e-3);
      cuda("cuda_f32", DType::kF32, false, 1e-4, 1e-3);
    }
    return list;
  }();
  return backends;
}

Ops& BackendOps(const Backend& backend) {
  static std::map<std::string, std::unique_ptr<Ops>> made;
  std::unique_ptr<Ops>& ops = made[backend.name];
  if (ops == nullptr) ops = backend.make();
  return *ops;
}

void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

DeviceBytes::DeviceBytes(Ops& ops, size_t bytes) : ops_(&ops), bytes_(bytes), block_(ops.Allocate(bytes + 2 * kGuard)) {
  ops.Fill(block_, kGuardByte, bytes + 2 * kGuard, ops.stream());
  Poison();
}

DeviceBytes::DeviceBytes(DeviceBytes&& other) noexcept
    : ops_(other.ops_), bytes_(other.bytes_), block_(std::exchange(other.block_, nullptr)) {}

DeviceBytes::~DeviceBytes() {
  if (block_ == nullptr) return;
  std::vector<uint8_t> all(bytes_ + 2 * kGuard);
  ops_->CopyToHost(all.data(), block_, all.size(), ops_->stream());
  ops_->Synchronize(ops_->stream());
  for (size_t i = 0; i < kGuard; ++i) {
    if (all[i] != kGuardByte || all[kGuard + bytes_ + i] != kGuardByte) {
      ADD_FAILURE() << "device memory was written " << (all[i] != kGuardByte ? "before" : "after") << " a buffer of "
                    << bytes_ << " bytes";
      break;
    }
  }
  ops_->Free(block_);
}

void DeviceBytes::Upload(const void* host, size_t bytes, size_t offset) {
  ASSERT_LE(offset + bytes, bytes_);
  ops_->CopyToDevice(static_cast<char*>(data()) + offset, host, bytes, ops_->stream());
  ops_->Synchronize(ops_->stream());
}

std::vector<uint8_t> DeviceBytes::Download() const {
  std::vector<uint8_t> host(bytes_);
  ops_->CopyToHost(host.data(), data(), bytes_, ops_->stream());
  ops_->Synchronize(ops_->stream());
  return host;
}

void DeviceBytes::Poison() {
  ops_->Fill(data(), 0xFF, bytes_, ops_->stream());
  ops_->Synchronize(ops_->stream());
}

DeviceMatrix::DeviceMatrix(Ops& ops, DType dtype, int64_t rows, int64_t cols, int64_t gap)
    : bytes_(ops, static_cast<size_t>(rows * (cols + gap)) * SizeOf(dtype)),
      view_{bytes_.data(), dtype, rows, cols, cols + gap} {}

DeviceMatrix::DeviceMatrix(Ops& ops, DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values,
                           int64_t gap)
    : DeviceMatrix(ops, dtype, rows, cols, gap) {
  Set(values);
}

void DeviceMatrix::Set(const std::vector<float>& values) {
  ASSERT_EQ(static_cast<int64_t>(values.size()), view_.rows * view_.cols);
  const std::vector<uint8_t> encoded = Encode(values, view_.dtype);
  const size_t row_bytes = static_cast<size_t>(view_.cols) * SizeOf(view_.dtype);
  const size_t stride = static_cast<size_t>(view_.ld) * SizeOf(view_.dtype);
  std::vector<uint8_t> all(bytes_.size(), 0xFF);
  for (int64_t r = 0; r < view_.rows; ++r) {
    if (row_bytes > 0) std::memcpy(&all[r * stride], &encoded[r * row_bytes], row_bytes);
  }
  bytes_.Upload(all.data(), all.size());
}

std::vector<float> DeviceMatrix::Get() const {
  const std::vector<uint8_t> all = bytes_.Download();
  const size_t row_bytes = static_cast<size_t>(view_.cols) * SizeOf(view_.dtype);
  const size_t stride = static_cast<size_t>(view_.ld) * SizeOf(view_.dtype);
  std::vector<uint8_t> packed;
  for (int64_t r = 0; r < view_.rows; ++r) {
    packed.insert(packed.end(), all.begin() + r * stride, all.begin() + r * stride + row_bytes);
    for (size_t i = row_bytes; i < stride; ++i) {
      if (all[r * stride + i] != 0xFF) {
        ADD_FAILURE() << "the gap after row " << r << " was written to";
        break;
      }
    }
  }
  return Decode(packed, view_.dtype);
}

std::vector<float> Round(std::vector<float> values, DType dtype) { return Decode(Encode(values, dtype), dtype); }

std::vector<uint8_t> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
    } else {
      const uint16_t half = dtype == DType::kBF16 ? FloatToBf16(values[i]) : FloatToF16(values[i]);
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

std::vector<float> Decode(const std::vector<uint8_t>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      uint16_t half;
      std::memcpy(&half, &bytes[2 * i], 2);
      values[i] = dtype == DType::kBF16 ? Bf16ToFloat(half) : F16ToFloat(half);
    }
  }
  return values;
}

OwnedTensor MakeTensor(const std::vector<float>& values, DType dtype, std::vector<int64_t> shape, std::string name) {
  OwnedTensor owned;
  owned.bytes = Encode(values, dtype);
  owned.tensor.data = owned.bytes.data();
  owned.tensor.dtype = dtype;
  owned.tensor.shape = std::move(shape);
  owned.tensor.name = std::move(name);
  return owned;
}

OwnedTensor MakeBytes(const std::vector<uint8_t>& values, std::vector<int64_t> shape, std::string name) {
  OwnedTensor owned;
  owned.bytes = values;
  owned.tensor.data = owned.bytes.data();
  owned.tensor.dtype = DType::kU8;
  owned.tensor.shape = std::move(shape);
  owned.tensor.name = std::move(name);
  return owned;
}

std::vector<float> Random::Normal(int64_t count, float stddev, float mean) {
  std::normal_distribution<float> distribution(mean, stddev);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = distribution(engine_);
  return values;
}

std::vector<float> Random::Uniform(int64_t count, float low, float high) {
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = distribution(engine_);
  return values;
}

std::vector<uint8_t> Random::Bytes(int64_t count, int low, int high) {
  std::vector<uint8_t> values(static_cast<size_t>(count));
  for (uint8_t& v : values) v = static_cast<uint8_t>(Int(low, high));
  return values;
}

int Random::Int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }

DeviceBatch::DeviceBatch(Ops& ops, const std::vector<SequenceSpec>& sequences,
                         const std::vector<SnapshotSpec>& snapshots) {
  std::vector<int32_t> slots, sequence_of_token, position, rows, snapshot_slots;
  size_t stride = 1;
  for (const SequenceSpec& s : sequences) stride = std::max(stride, s.pages.size() + 1);
  std::vector<int32_t> pages(sequences.size() * stride, std::numeric_limits<int32_t>::max() / 2);
  host_begin_.push_back(0);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SequenceSpec& s = sequences[i];
    host_begin_.push_back(host_begin_.back() + s.tokens);
    host_context_.push_back(s.context);
    slots.push_back(s.state_slot);
    for (int32_t t = 0; t < s.tokens; ++t) {
      sequence_of_token.push_back(static_cast<int32_t>(i));
      position.push_back(s.context + t);
    }
    std::copy(s.pages.begin(), s.pages.end(), pages.begin() + static_cast<int64_t>(i * stride));
  }
  for (const SnapshotSpec& s : snapshots) {
    rows.push_back(s.row);
    snapshot_slots.push_back(s.slot);
  }
  const auto upload = [&](const std::vector<int32_t>& values) {
    arrays_.push_back(std::make_unique<DeviceArray<int32_t>>(ops, values));
    return arrays_.back()->data();
  };
  batch_.num_tokens = host_begin_.back();
  batch_.num_sequences = static_cast<int32_t>(sequences.size());
  batch_.token_begin = upload(host_begin_);
  batch_.context = upload(host_context_);
  batch_.state_slot = upload(slots);
  batch_.page_table = upload(pages);
  batch_.page_table_stride = static_cast<int64_t>(stride);
  batch_.sequence_of_token = upload(sequence_of_token);
  batch_.position = upload(position);
  batch_.num_snapshots = static_cast<int32_t>(snapshots.size());
  batch_.snapshot_row = upload(rows);
  batch_.snapshot_slot = upload(snapshot_slots);
  batch_.host_token_begin = host_begin_.data();
  batch_.host_context = host_context_.data();
}

double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    difference += (double{actual[i]} - expected[i]) * (double{actual[i]} - expected[i]);
    norm += expected[i] * expected[i];
  }
  // Below 1e-30 an expected norm is zero to fp32: underflow is right.
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  const double error = RelativeError(actual, expected);
  if (error <= tolerance) return;
  size_t worst = 0;
  double worst_difference = -1;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::fabs(double{actual[i]} - expected[i]);
    if (!(difference <= worst_difference)) {  // NaN counts as worst
      worst = i;
      worst_difference = difference;
      if (std::isnan(difference)) break;
    }
  }
  ADD_FAILURE() << what << ": relative error " << error << " above " << tolerance << "; worst element " << worst
                << " of " << actual.size() << ": " << actual[worst] << ", expected " << expected[worst];
}

void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::memcmp(&actual[i], &expected[i], 4) != 0) {
      ADD_FAILURE() << what << ": element " << i << " of " << actual.size() << " is " << std::hexfloat << actual[i]
                    << ", expected " << expected[i];
      return;
    }
  }
}

}  // namespace k3::testing
