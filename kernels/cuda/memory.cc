#include "kernels/cuda/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/convert.h"

namespace k3::cuda {

DeviceMemory::DeviceMemory(int ordinal, size_t bytes) : ordinal_(ordinal), bytes_(bytes) {
  K3_CUDA(cudaSetDevice(ordinal));
  const cudaError_t error = cudaMalloc(&data_, std::max<size_t>(bytes, 256));
  if (error != cudaSuccess) {
    cudaGetLastError();  // an exhausted device is not a broken one
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    Refuse("cannot allocate " + std::to_string(bytes) + " bytes of device memory (" + std::to_string(free) + " of " +
               std::to_string(total) + " free): " + cudaGetErrorString(error),
           std::source_location::current());
  }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : ordinal_(other.ordinal_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(ordinal_, other.ordinal_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  cudaSetDevice(ordinal_);
  cudaFree(data_);
}

namespace {

constexpr size_t kStagingBytes = size_t{8} << 20;

// Maps the pages of a piece of a mapped file in one go where they are in the page cache: a fault for every few of them
// costs more than the copy. Where the kernel cannot (before Linux 5.14), the copy faults them in.
void MapPages(const void* data, size_t bytes) {
#ifdef MADV_POPULATE_READ
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + bytes;
  madvise(reinterpret_cast<void*>(begin), (end - begin + kPage - 1) / kPage * kPage, MADV_POPULATE_READ);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace

// Two halves, so that the host fills one while the other travels.
struct Uploader::Lane {
  explicit Lane(int device_ordinal) : ordinal(device_ordinal) {
    K3_CUDA(cudaSetDevice(ordinal));
    K3_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int half = 0; half < 2; ++half) {
      K3_CUDA(cudaMallocHost(&host[half], kStagingBytes));
      K3_CUDA(cudaEventCreateWithFlags(&sent[half], cudaEventDisableTiming));
    }
  }
  ~Lane() {
    cudaSetDevice(ordinal);
    for (int half = 0; half < 2; ++half) {
      if (sent[half] != nullptr) cudaEventDestroy(sent[half]);
      if (host[half] != nullptr) cudaFreeHost(host[half]);
    }
    if (stream != nullptr) cudaStreamDestroy(stream);
  }

  int ordinal;
  cudaStream_t stream = nullptr;
  void* host[2] = {};
  cudaEvent_t sent[2] = {};
  DeviceMemory device[2];  // only when elements must be converted
  int next = 0;
};

class Uploader::Loan {
 public:
  explicit Loan(Uploader& owner) : owner_(owner), lane_(owner.Borrow()) {}
  ~Loan() { owner_.Return(std::move(lane_)); }
  Lane& operator*() const { return *lane_; }
  Lane* operator->() const { return lane_.get(); }

 private:
  Uploader& owner_;
  std::unique_ptr<Lane> lane_;
};

Uploader::Uploader(int ordinal) : ordinal_(ordinal) {}
Uploader::~Uploader() = default;

std::unique_ptr<Uploader::Lane> Uploader::Borrow() {
  K3_CUDA(cudaSetDevice(ordinal_));
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Lane> lane = std::move(idle_.back());
      idle_.pop_back();
      return lane;
    }
  }
  return std::make_unique<Lane>(ordinal_);
}

void Uploader::Return(std::unique_ptr<Lane> lane) {
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(lane));
}

void Uploader::UploadBytes(const void* host, void* device, size_t bytes) {
  Loan lane(*this);
  for (size_t done = 0; done < bytes;) {
    const int half = lane->next ^= 1;
    const size_t piece = std::min(kStagingBytes, bytes - done);
    MapPages(static_cast<const char*>(host) + done, piece);
    K3_CUDA(cudaEventSynchronize(lane->sent[half]));
    std::memcpy(lane->host[half], static_cast<const char*>(host) + done, piece);
    K3_CUDA(cudaMemcpyAsync(static_cast<char*>(device) + done, lane->host[half], piece, cudaMemcpyHostToDevice,
                            lane->stream));
    K3_CUDA(cudaEventRecord(lane->sent[half], lane->stream));
    done += piece;
  }
  K3_CUDA(cudaStreamSynchronize(lane->stream));
}

void Uploader::Upload(const HostTensor& tensor, void* device, DType to) {
  const int64_t count = tensor.elements();
  if (tensor.data == nullptr) {
    Loan lane(*this);
    if (tensor.dtype == DType::kU8) {
      FillBits(static_cast<uint8_t*>(device), count, tensor.random_seed, lane->stream);
    } else {
      FillNormal(device, to, count, tensor.random_stddev, tensor.random_seed, lane->stream);
    }
    K3_CUDA(cudaStreamSynchronize(lane->stream));
    return;
  }
  const int64_t cols = tensor.shape.empty() ? 1 : tensor.shape.back();
  const int64_t rows = cols == 0 ? 0 : count / cols;
  const int64_t stride = tensor.row_stride > 0 ? tensor.row_stride : cols;
  if (tensor.dtype == to && stride == cols) return UploadBytes(tensor.data, device, tensor.bytes());

  // Pieces of whole rows where they fit, else of one row.
  const size_t from_size = SizeOf(tensor.dtype);
  const int64_t piece_cols = std::min<int64_t>(cols, static_cast<int64_t>(kStagingBytes / from_size));
  const int64_t piece_rows =
      piece_cols < cols ? 1 : std::max<int64_t>(1, static_cast<int64_t>(kStagingBytes / from_size) / cols);
  Loan lane(*this);
  for (int64_t row = 0; row < rows; row += piece_rows) {
    const int64_t height = std::min(piece_rows, rows - row);
    for (int64_t col = 0; col < cols; col += piece_cols) {
      const int64_t width = std::min(piece_cols, cols - col);
      const int half = lane->next ^= 1;
      if (width == stride)
        MapPages(static_cast<const char*>(tensor.data) + row * stride * from_size, height * width * from_size);
      K3_CUDA(cudaEventSynchronize(lane->sent[half]));
      for (int64_t r = 0; r < height; ++r) {
        std::memcpy(static_cast<char*>(lane->host[half]) + r * width * from_size,
                    static_cast<const char*>(tensor.data) + ((row + r) * stride + col) * from_size, width * from_size);
      }
      char* target = static_cast<char*>(device) + (row * cols + col) * SizeOf(to);
      const size_t bytes = static_cast<size_t>(height * width) * from_size;
      if (tensor.dtype == to) {
        K3_CUDA(cudaMemcpyAsync(target, lane->host[half], bytes, cudaMemcpyHostToDevice, lane->stream));
      } else {
        if (lane->device[half].data() == nullptr) lane->device[half] = DeviceMemory(ordinal_, kStagingBytes);
        K3_CUDA(
            cudaMemcpyAsync(lane->device[half].data(), lane->host[half], bytes, cudaMemcpyHostToDevice, lane->stream));
        Convert(lane->device[half].data(), tensor.dtype, target, to, height * width, lane->stream);
      }
      K3_CUDA(cudaEventRecord(lane->sent[half], lane->stream));
    }
  }
  K3_CUDA(cudaStreamSynchronize(lane->stream));
}

}  // namespace k3::cuda
