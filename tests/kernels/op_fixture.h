#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"

// What op tests are made of. A test body is written once against Ops& and runs on every backend of this build and
// machine:
//
//   class RmsNormTest : public OpTest {};
//   K3_INSTANTIATE_OPS(RmsNormTest);
//   TEST_P(RmsNormTest, ...) { DeviceMatrix x(ops(), act(), rows, cols, values); ... ExpectClose(out.Get(), oracle,
//   tolerance()); }
namespace k3::testing {

// A way to run the ops, with the relative norm error that it may have against fp64.
struct Backend {
  std::string name;
  std::function<std::unique_ptr<Ops>()> make;
  double tolerance = 0;      // ordinary ops
  double kda_tolerance = 0;  // the recurrence, whose errors build up over the sequence
  // Results are bit-equal whatever the batch and the chunk: the CPU, and CUDA in batch-invariant mode.
  bool batch_invariant = false;
};

// Every backend that this machine can run: cpu_scalar, cpu_avx2, cpu_avx512, cuda_*.
const std::vector<Backend>& Backends();
// The Ops of a backend, made once per process.
Ops& BackendOps(const Backend& backend);

void PrintTo(const Backend& backend, std::ostream* out);

class OpTest : public ::testing::TestWithParam<Backend> {
 protected:
  Ops& ops() const { return BackendOps(GetParam()); }
  DType act() const { return ops().activation_dtype(); }
  double tolerance() const { return GetParam().tolerance; }
  double kda_tolerance() const { return GetParam().kda_tolerance; }
  bool batch_invariant() const { return GetParam().batch_invariant; }
  // The scalar loops: a hundred times slower, so that tests give them smaller cases.
  bool slow() const { return GetParam().name == "cpu_scalar"; }
};

#define K3_INSTANTIATE_OPS(suite)                                 \
  INSTANTIATE_TEST_SUITE_P(                                       \
      Ops, suite, ::testing::ValuesIn(::k3::testing::Backends()), \
      [](const ::testing::TestParamInfo<::k3::testing::Backend>& info) { return info.param.name; })

// Device memory between two guard zones. Starts as 0xFF bytes: NaN as F32, BF16 and F16, -1 as integers. The destructor
// fails the test when a guard has been written to.
class DeviceBytes {
 public:
  DeviceBytes(Ops& ops, size_t bytes);
  ~DeviceBytes();
  DeviceBytes(DeviceBytes&& other) noexcept;
  DeviceBytes& operator=(DeviceBytes&&) = delete;

  void* data() const { return static_cast<char*>(block_) + kGuard; }
  size_t size() const { return bytes_; }
  void Upload(const void* host, size_t bytes, size_t offset = 0);
  std::vector<uint8_t> Download() const;
  void Poison();

 private:
  static constexpr size_t kGuard = 512;
  static constexpr uint8_t kGuardByte = 0xA5;
  Ops* ops_;
  size_t bytes_;
  void* block_;
};

// A vector of plain values in device memory.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(Ops& ops, size_t count) : bytes_(ops, count * sizeof(T)), count_(count) {}
  DeviceArray(Ops& ops, const std::vector<T>& values) : DeviceArray(ops, values.size()) { Set(values); }

  T* data() const { return static_cast<T*>(bytes_.data()); }
  size_t size() const { return count_; }
  void Set(const std::vector<T>& values) { bytes_.Upload(values.data(), values.size() * sizeof(T)); }
  std::vector<T> Get() const {
    const std::vector<uint8_t> raw = bytes_.Download();
    std::vector<T> values(count_);
    if (count_ > 0) std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }
  void Poison() { bytes_.Poison(); }

 private:
  DeviceBytes bytes_;
  size_t count_;
};

// A matrix in device memory with a gap of NaN after each row; Get fails the test when a gap has been written to.
class DeviceMatrix {
 public:
  // Poisoned contents.
  DeviceMatrix(Ops& ops, DType dtype, int64_t rows, int64_t cols, int64_t gap = 8);
  // fp32 values, rounded to dtype.
  DeviceMatrix(Ops& ops, DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values, int64_t gap = 8);

  const MatrixView& view() const { return view_; }
  operator const MatrixView&() const { return view_; }
  void Set(const std::vector<float>& values);
  std::vector<float> Get() const;
  void Poison() { bytes_.Poison(); }

 private:
  DeviceBytes bytes_;
  MatrixView view_;
};

// values rounded to what a tensor of this type can hold.
std::vector<float> Round(std::vector<float> values, DType dtype);
std::vector<uint8_t> Encode(const std::vector<float>& values, DType dtype);
std::vector<float> Decode(const std::vector<uint8_t>& bytes, DType dtype);

// A host tensor that owns its bytes.
struct OwnedTensor {
  std::vector<uint8_t> bytes;
  HostTensor tensor;
};
OwnedTensor MakeTensor(const std::vector<float>& values, DType dtype, std::vector<int64_t> shape,
                       std::string name = "w");
OwnedTensor MakeBytes(const std::vector<uint8_t>& values, std::vector<int64_t> shape, std::string name = "w");

// Test data; the same seed gives the same values everywhere.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  std::vector<float> Normal(int64_t count, float stddev = 1, float mean = 0);
  std::vector<float> Uniform(int64_t count, float low, float high);
  std::vector<uint8_t> Bytes(int64_t count, int low, int high);  // low..high inclusive
  int Int(int low, int high);                                    // inclusive

 private:
  std::mt19937 engine_;
};

// The sequences of one step as SequenceBatch, with page tables whose unused entries are huge.
struct SequenceSpec {
  int32_t tokens = 1;
  int32_t context = 0;
  int32_t state_slot = 0;
  std::vector<int32_t> pages;  // ids, enough for context + tokens
};
struct SnapshotSpec {
  int32_t row = 0;
  int32_t slot = 0;
};
class DeviceBatch {
 public:
  DeviceBatch(Ops& ops, const std::vector<SequenceSpec>& sequences, const std::vector<SnapshotSpec>& snapshots = {});
  const SequenceBatch* get() const { return &batch_; }
  int64_t tokens() const { return batch_.num_tokens; }

 private:
  std::vector<int32_t> host_begin_, host_context_;
  std::vector<std::unique_ptr<DeviceArray<int32_t>>> arrays_;
  SequenceBatch batch_;
};

// |actual - expected| / |expected| over all elements; infinite when anything is not finite.
double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected);
void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance,
                 const std::string& what = "");
// Bit for bit, naming the first element that differs.
void ExpectSameBits(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& what = "");

// Rows [begin, begin + count) of a matrix of `cols` columns.
template <typename T>
std::vector<T> Slice(const std::vector<T>& matrix, int64_t cols, int64_t begin, int64_t count) {
  return {matrix.begin() + begin * cols, matrix.begin() + (begin + count) * cols};
}

}  // namespace k3::testing
