#include "kernels/cpu/cpu_ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>

#include "kernels/core/shape_check.h"

namespace k3 {
namespace {

// "Name:   123 kB" of /proc/meminfo in bytes, 0 when absent.
size_t MemInfo(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  size_t value = 0;
  while (file >> key >> value) {
    std::getline(file, unit);
    if (key == name + ":") return value * 1024;
  }
  return 0;
}

// A byte count from a cgroup file; `absent` when there is none or it says "max".
size_t CgroupBytes(const char* path, size_t absent) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : absent;
}

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

size_t CgroupLimit() {
  return std::min(CgroupBytes("/sys/fs/cgroup/memory.max", kUnlimited),
                  CgroupBytes("/sys/fs/cgroup/memory/memory.limit_in_bytes", kUnlimited));
}

size_t CgroupUse() {
  return CgroupBytes("/sys/fs/cgroup/memory.current", CgroupBytes("/sys/fs/cgroup/memory/memory.usage_in_bytes", 0));
}

}  // namespace

CpuLinearWeight::CpuLinearWeight(PanelMatrix matrix_in) : matrix(std::move(matrix_in)) {
  out = matrix.n;
  in = matrix.k;
  bytes = matrix.bytes();
}

CpuOps::CpuOps(const KernelTable& kernels, int threads)
    : kernels_(kernels),
      pool_(threads > 0 ? threads : UsableCpus()),
      thread_floats_(static_cast<size_t>(pool_.threads())) {}

CpuOps::~CpuOps() {
  for (const void* vector : vectors_) std::free(const_cast<void*>(vector));
}

std::string CpuOps::device_name() const {
  return "CPU, " + std::to_string(pool_.threads()) + (pool_.threads() == 1 ? " thread, " : " threads, ") +
         kernels_.name;
}

void* CpuOps::Allocate(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = bytes >= kHugePage ? kHugePage : 256;
  void* p = std::aligned_alloc(alignment, std::max(alignment, (bytes + alignment - 1) / alignment * alignment));
  if (p == nullptr) throw DeviceError("cannot allocate " + std::to_string(bytes) + " bytes of host memory");
  if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);
  return p;
}

void CpuOps::Free(void* data) noexcept { std::free(data); }

void CpuOps::CopyToDevice(void* device, const void* host, size_t bytes, Stream) {
  if (bytes > 0) std::memcpy(device, host, bytes);
}
void CpuOps::CopyToHost(void* host, const void* device, size_t bytes, Stream) {
  if (bytes > 0) std::memcpy(host, device, bytes);
}
void CpuOps::CopyOnDevice(void* to, const void* from, size_t bytes, Stream) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void CpuOps::Fill(void* device, uint8_t byte, size_t bytes, Stream) {
  if (bytes > 0) std::memset(device, byte, bytes);
}

size_t CpuOps::TotalMemory() const { return std::min(MemInfo("MemTotal"), CgroupLimit()); }

size_t CpuOps::FreeMemory() const {
  const size_t limit = CgroupLimit();
  const size_t available = MemInfo("MemAvailable");
  if (limit == kUnlimited) return available;
  const size_t used = CgroupUse();
  return std::min(available, used < limit ? limit - used : 0);
}

std::unique_ptr<LinearWeight> CpuOps::MakeLinear(std::span<const HostTensor> parts) {
  return std::make_unique<CpuLinearWeight>(PanelMatrix::Pack(parts));
}

std::unique_ptr<ExpertWeights> CpuOps::MakeExperts(int32_t first, std::span<const HostExpert> experts) {
  auto weights = std::make_unique<CpuExpertWeights>();
  weights->first = first;
  weights->count = static_cast<int32_t>(experts.size());
  const auto pack = [](const HostTensor& w, const HostTensor& scale) {
    return scale.shape.empty() ? PanelMatrix::Pack({&w, 1}) : PanelMatrix::PackMxfp4(w, scale);
  };
  for (const HostExpert& expert : experts) {
    CpuExpertWeights::Expert packed{pack(expert.w1, expert.w1_scale), pack(expert.w3, expert.w3_scale),
                                    pack(expert.w2, expert.w2_scale)};
    if (weights->experts.empty()) {
      weights->in = packed.w1.k;
      weights->inner = packed.w1.n;
    }
    const auto check = [&](const HostTensor& t, const PanelMatrix& m, int64_t n, int64_t k) {
      CheckEqual("MakeExperts", (t.name + " rows").c_str(), m.n, n);
      CheckEqual("MakeExperts", (t.name + " columns").c_str(), m.k, k);
    };
    check(expert.w1, packed.w1, weights->inner, weights->in);
    check(expert.w3, packed.w3, weights->inner, weights->in);
    check(expert.w2, packed.w2, weights->in, weights->inner);
    weights->bytes += packed.w1.bytes() + packed.w3.bytes() + packed.w2.bytes();
    weights->experts.push_back(std::move(packed));
  }
  return weights;
}

std::unique_ptr<LatentProjection> CpuOps::MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                               int32_t value_dim) {
  const int64_t rows = int64_t{heads} * (nope_dim + value_dim);
  const bool shape = kv_b.shape.size() == 2 && kv_b.shape[0] == rows && heads > 0 && nope_dim > 0 && value_dim > 0;
  CheckTrue(shape, "MakeLatentProjection",
            kv_b.name + " must have heads * (nope + value) = " + std::to_string(rows) + " rows, got " +
                (kv_b.shape.empty() ? std::string("no shape") : std::to_string(kv_b.shape[0])));
  auto projection = std::make_unique<CpuLatentProjection>();
  projection->heads = heads;
  projection->nope_dim = nope_dim;
  projection->value_dim = value_dim;
  projection->latent_dim = static_cast<int32_t>(kv_b.shape[1]);
  const int64_t latent = kv_b.shape[1];
  const std::vector<float> values = ToFloats(kv_b);
  const PanelFormat format = kv_b.dtype == DType::kBF16 ? PanelFormat::kBf16 : PanelFormat::kF32;
  for (int32_t h = 0; h < heads; ++h) {
    const float* key_rows = values.data() + int64_t{h} * (nope_dim + value_dim) * latent;
    projection->keys.push_back(PanelMatrix::PackValues(key_rows, latent, nope_dim, 1, latent, format));
    projection->values.push_back(
        PanelMatrix::PackValues(key_rows + nope_dim * latent, value_dim, latent, latent, 1, format));
    projection->bytes += projection->keys.back().bytes() + projection->values.back().bytes();
  }
  return projection;
}

const float* CpuOps::MakeVector(std::span<const float> values) {
  void* copy = Allocate(std::max<size_t>(values.size_bytes(), 64));
  CopyToDevice(copy, values.data(), values.size_bytes(), nullptr);
  const std::lock_guard<std::mutex> lock(vectors_mutex_);
  vectors_.insert(copy);
  return static_cast<const float*>(copy);
}

std::unique_ptr<Ops> MakeCpuOps(const CpuOptions& options) {
  const KernelTable& kernels = options.force_scalar ? *Kernels(CpuIsa::kScalar) : BestKernels();
  return std::make_unique<CpuOps>(kernels, options.threads);
}

std::unique_ptr<Ops> MakeCpuOpsFor(CpuIsa isa, int threads) {
  const KernelTable* kernels = Kernels(isa);
  if (kernels == nullptr) return nullptr;
  return std::make_unique<CpuOps>(*kernels, threads);
}

}  // namespace k3
