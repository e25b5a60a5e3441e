#include "kernels/cuda/cuda_ops.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>

#include "kernels/cuda/op_table.h"

namespace k3::cuda {
namespace {

constexpr int kCapabilityMajor = 9;
constexpr int kCapabilityMinor = 0;

std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The number of visible devices; throws when the driver is missing or older than this build's toolkit.
int VisibleDevices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) {
    throw DeviceError("no NVIDIA driver: needed is one for CUDA " + VersionText(CUDART_VERSION) + ", found none");
  }
  if (error == cudaErrorInsufficientDriver || (driver < CUDART_VERSION && error != cudaErrorNoDevice)) {
    throw DeviceError("the NVIDIA driver is too old: needed is one for CUDA " + VersionText(CUDART_VERSION) +
                      ", found " + (driver == 0 ? std::string("none") : "one for CUDA " + VersionText(driver)));
  }
  throw DeviceError("no CUDA device: needed is one of compute capability " + std::to_string(kCapabilityMajor) + "." +
                    std::to_string(kCapabilityMinor) + " (H100, H200), found none" +
                    (error == cudaSuccess ? std::string() : std::string(" (") + cudaGetErrorString(error) + ")"));
}

void RequireCapability(int ordinal, const cudaDeviceProp& properties) {
  if (properties.major == kCapabilityMajor && properties.minor == kCapabilityMinor) return;
  throw DeviceError("CUDA device " + std::to_string(ordinal) + " cannot run this build: needed is compute capability " +
                    std::to_string(kCapabilityMajor) + "." + std::to_string(kCapabilityMinor) +
                    " (H100, H200), found " + std::to_string(properties.major) + "." +
                    std::to_string(properties.minor) + " (" + properties.name + ")");
}

struct CudaGraph final : CapturedWork {
  ~CudaGraph() override {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
};

}  // namespace

CudaOps::CudaOps(const CudaOptions& options) {
  if (options.compute_dtype != DType::kBF16 && options.compute_dtype != DType::kF32) {
    throw DeviceError(std::string("compute_dtype must be BF16 or F32, is ") + Name(options.compute_dtype));
  }
  const int count = VisibleDevices();
  if (options.device < 0 || options.device >= count) {
    throw DeviceError("no CUDA device " + std::to_string(options.device) + ": found " + std::to_string(count));
  }
  cudaDeviceProp properties;
  K3_CUDA(cudaGetDeviceProperties(&properties, options.device));
  RequireCapability(options.device, properties);
  K3_CUDA(cudaSetDevice(options.device));
  name_ = std::string(properties.name) + " (device " + std::to_string(options.device) + ")";
  device_.ordinal = options.device;
  device_.multiprocessors = properties.multiProcessorCount;
  device_.shared_per_block = properties.sharedMemPerBlockOptin;
  device_.act = options.compute_dtype;
  device_.batch_invariant = options.batch_invariant;
  K3_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  K3_CUDA(cudaStreamCreateWithFlags(&side_stream_, cudaStreamNonBlocking));
  K3_CUDA(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming));
  K3_CUDA(cudaEventCreateWithFlags(&joined_, cudaEventDisableTiming));
  blas_ = std::make_unique<Blas>(options.device);
  side_blas_ = std::make_unique<Blas>(options.device);
  device_.blas = blas_.get();
  side_device_ = device_;
  side_device_.blas = side_blas_.get();
  side_device_.on_side_stream = true;
  uploader_ = std::make_unique<Uploader>(options.device);
  expert_maker_ = std::make_unique<ExpertMaker>(device_, *uploader_);
}

CudaOps::~CudaOps() {
  cudaSetDevice(device_.ordinal);
  cudaStreamSynchronize(stream_);
  cudaStreamSynchronize(side_stream_);
  cudaEventDestroy(forked_);
  cudaEventDestroy(joined_);
  cudaStreamDestroy(side_stream_);
  cudaStreamDestroy(stream_);
}

void* CudaOps::Allocate(size_t bytes) {
  K3_CUDA(cudaSetDevice(device_.ordinal));
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, std::max<size_t>(bytes, 256));
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError("cannot allocate " + std::to_string(bytes) + " bytes on " + name_ + " (" +
                      std::to_string(FreeMemory()) + " of " + std::to_string(TotalMemory()) +
                      " free): " + cudaGetErrorString(error));
  }
  return data;
}

void CudaOps::Free(void* data) noexcept {
  cudaSetDevice(device_.ordinal);
  cudaFree(data);
}

void* CudaOps::AllocateHost(size_t bytes) {
  K3_CUDA(cudaSetDevice(device_.ordinal));
  void* data = nullptr;
  K3_CUDA(cudaMallocHost(&data, std::max<size_t>(bytes, 256)));
  return data;
}

void CudaOps::FreeHost(void* data) noexcept { cudaFreeHost(data); }

void CudaOps::CopyToDevice(void* device, const void* host, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  K3_CUDA(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, Queue(stream)));
}

void CudaOps::CopyToHost(void* host, const void* device, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  K3_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, Queue(stream)));
}

void CudaOps::CopyOnDevice(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  K3_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Queue(stream)));
}

void CudaOps::Fill(void* device, uint8_t byte, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  K3_CUDA(cudaMemsetAsync(device, byte, bytes, Queue(stream)));
}

void CudaOps::Synchronize(Stream stream) { K3_CUDA(cudaStreamSynchronize(Queue(stream))); }

Stream CudaOps::Fork(Stream stream) {
  K3_CUDA(cudaEventRecord(forked_, Queue(stream)));
  K3_CUDA(cudaStreamWaitEvent(side_stream_, forked_, 0));
  return side_stream_;
}

void CudaOps::Join(Stream side, Stream stream) {
  K3_CUDA(cudaEventRecord(joined_, Queue(side)));
  K3_CUDA(cudaStreamWaitEvent(Queue(stream), joined_, 0));
}

Event CudaOps::MakeEvent() {
  K3_CUDA(cudaSetDevice(device_.ordinal));
  cudaEvent_t event;
  K3_CUDA(cudaEventCreate(&event));
  return event;
}

void CudaOps::FreeEvent(Event event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void CudaOps::RecordEvent(Event event, Stream stream) {
  K3_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event), Queue(stream)));
}

void CudaOps::WaitEvent(Event event) { K3_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }

double CudaOps::Milliseconds(Event from, Event to) {
  float milliseconds = 0;
  K3_CUDA(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)));
  return milliseconds;
}

void CudaOps::BeginRange(const char* name) { nvtxRangePushA(name); }

void CudaOps::EndRange() { nvtxRangePop(); }

std::unique_ptr<CapturedWork> CudaOps::Capture(const std::function<void()>& record, Stream stream) {
  auto work = std::make_unique<CudaGraph>();
  const cudaStream_t queue = Queue(stream);
  // Loads may allocate on other threads meanwhile; only this thread's calls belong to the graph.
  K3_CUDA(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal));
  try {
    record();
  } catch (...) {
    cudaGraph_t broken = nullptr;
    cudaStreamEndCapture(queue, &broken);
    if (broken != nullptr) cudaGraphDestroy(broken);
    cudaGetLastError();
    throw;
  }
  K3_CUDA(cudaStreamEndCapture(queue, &work->graph));
  K3_CUDA(cudaGraphGetNodes(work->graph, nullptr, &work->nodes));
  K3_CUDA(cudaGraphInstantiate(&work->executable, work->graph, 0));
  K3_CUDA(cudaGraphUpload(work->executable, queue));
  return work;
}

void CudaOps::Launch(const CapturedWork& work, Stream stream) {
  K3_CUDA(cudaGraphLaunch(static_cast<const CudaGraph&>(work).executable, Queue(stream)));
}

size_t CudaOps::TotalMemory() const {
  size_t free = 0, total = 0;
  K3_CUDA(cudaSetDevice(device_.ordinal));
  K3_CUDA(cudaMemGetInfo(&free, &total));
  return total;
}

size_t CudaOps::FreeMemory() const {
  size_t free = 0, total = 0;
  K3_CUDA(cudaSetDevice(device_.ordinal));
  K3_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

MatrixView CudaOps::MakeTable(const HostTensor& table) {
  K3_REQUIRE(table.shape.size() == 2,
             table.name + " must have 2 dimensions, has " + std::to_string(table.shape.size()));
  // BF16 loses nothing where the checkpoint holds BF16 anyway.
  const DType type = table.dtype == DType::kBF16 ? DType::kBF16 : device_.act;
  DeviceMemory memory(device_.ordinal, static_cast<size_t>(table.elements()) * SizeOf(type));
  uploader_->Upload(table, memory.data(), type);
  const MatrixView view{memory.data(), type, table.shape[0], table.shape[1], table.shape[1]};
  std::lock_guard lock(mutex_);
  owned_.push_back(std::move(memory));
  return view;
}

const float* CudaOps::MakeVector(std::span<const float> values) {
  DeviceMemory memory(device_.ordinal, values.size_bytes());
  uploader_->UploadBytes(values.data(), memory.data(), values.size_bytes());
  const float* data = static_cast<const float*>(memory.data());
  std::lock_guard lock(mutex_);
  owned_.push_back(std::move(memory));
  return data;
}

std::unique_ptr<LinearWeight> CudaOps::MakeLinear(std::span<const HostTensor> parts) {
  return cuda::MakeLinear(device_, *uploader_, parts);
}

size_t CudaOps::KdaScratchBytes(int64_t tokens, int64_t, int32_t heads, int32_t head_dim, int32_t) const {
  return cuda::KdaScratchBytes(device_, tokens, heads, head_dim);
}

void CudaOps::Kda(const KdaParams& params, Stream stream) { cuda::Kda(device_, params, Queue(stream)); }
std::unique_ptr<LatentProjection> CudaOps::MakeLatentProjection(const HostTensor& kv_b, int32_t heads, int32_t nope_dim,
                                                                int32_t value_dim) {
  return cuda::MakeLatentProjection(device_, *uploader_, kv_b, heads, nope_dim, value_dim);
}

size_t CudaOps::MlaScratchBytes(int64_t tokens, int64_t, int32_t heads, int32_t latent_dim, int32_t, int32_t, int32_t,
                                int64_t max_context) const {
  return cuda::MlaScratchBytes(device_, tokens, heads, latent_dim, max_context);
}

void CudaOps::MlaAppend(const MlaAppendParams& params, Stream stream) {
  cuda::MlaAppend(device_, params, Queue(stream));
}
void CudaOps::MlaAttention(const MlaAttentionParams& params, Stream stream) {
  cuda::MlaAttention(device_, params, Queue(stream));
}
std::unique_ptr<ExpertWeights> CudaOps::MakeExperts(int32_t first, std::span<const HostExpert> experts) {
  return expert_maker_->Make(first, experts);
}

size_t CudaOps::MoeScratchBytes(int64_t tokens, int32_t top_k, int32_t experts, int64_t in, int64_t inner) const {
  return cuda::MoeScratchBytes(device_, tokens, top_k, experts, in, inner);
}

void CudaOps::MoeExperts(const MoeExpertsParams& params, Stream stream) {
  cuda::MoeExperts(device_, params, Queue(stream));
}

void CudaOps::BeginStep(const BeginStepParams& params, Stream stream) {
  cuda::BeginStep(device_, params, Queue(stream));
}
void CudaOps::Embed(const EmbedParams& params, Stream stream) { cuda::Embed(device_, params, Queue(stream)); }
void CudaOps::Linear(const LinearParams& params, Stream stream) {
  cuda::Linear(DeviceFor(stream), params, Queue(stream));
}
void CudaOps::LinearPair(const LinearParams& first, const LinearParams& second, Stream stream) {
  cuda::LinearPair(DeviceFor(stream), first, second, Queue(stream));
}
void CudaOps::BindThread() { K3_CUDA(cudaSetDevice(device_.ordinal)); }
void CudaOps::CopyMatrix(const CopyMatrixParams& params, Stream stream) {
  cuda::CopyMatrix(device_, params, Queue(stream));
}
void CudaOps::TreeSum(const TreeSumParams& params, Stream stream) { cuda::TreeSum(device_, params, Queue(stream)); }
void CudaOps::PackSlots(const PackSlotsParams& params, Stream stream) {
  cuda::PackSlots(device_, params, Queue(stream));
}
void CudaOps::SumSlots(const SumSlotsParams& params, Stream stream) { cuda::SumSlots(device_, params, Queue(stream)); }
void CudaOps::GatherRows(const GatherRowsParams& params, Stream stream) {
  cuda::GatherRows(device_, params, Queue(stream));
}
void CudaOps::GatedActivation(const GatedActivationParams& params, Stream stream) {
  cuda::GatedActivation(device_, params, Queue(stream));
}
void CudaOps::RouterTopK(const RouterTopKParams& params, Stream stream) {
  cuda::RouterTopK(device_, params, Queue(stream));
}
void CudaOps::RouterSoftCap(const RouterSoftCapParams& params, Stream stream) {
  cuda::RouterSoftCap(device_, params, Queue(stream));
}
void CudaOps::RmsNorm(const RmsNormParams& params, Stream stream) { cuda::RmsNorm(device_, params, Queue(stream)); }
void CudaOps::AddRmsNorm(const AddRmsNormParams& params, Stream stream) {
  cuda::AddRmsNorm(device_, params, Queue(stream));
}
AttnResForm CudaOps::ChooseAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites) const {
  if (device_.batch_invariant || device_.act != DType::kBF16) return AttnResForm::kOnePass;
  return MeasuredAttnResForm(rows, cols, closed, sites);
}
void CudaOps::AttnResMix(const AttnResMixParams& params, Stream stream) {
  cuda::AttnResMix(device_, params, Queue(stream));
}
void CudaOps::AttnResClosed(const AttnResClosedParams& params, Stream stream) {
  cuda::AttnResClosed(device_, params, Queue(stream));
}

size_t CudaOps::SampleScratchBytes(int64_t, int64_t) const { return cuda::SampleScratchBytes(); }

void CudaOps::Sample(const SampleParams& params, Stream stream) { cuda::Sample(device_, params, Queue(stream)); }

}  // namespace k3::cuda

namespace k3 {

std::unique_ptr<Ops> MakeCudaOps(const CudaOptions& options) { return std::make_unique<cuda::CudaOps>(options); }

int CudaDeviceCount() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  int usable = 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    usable += major == cuda::kCapabilityMajor && minor == cuda::kCapabilityMinor;
  }
  return usable;
}

}  // namespace k3
