#pragma once

#include <cuda_bf16.h>

#include <cstdint>

// The machine instructions that C++ has no words for, by name.
namespace k3::cuda {

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* DynamicShared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  return reinterpret_cast<T*>(dynamic_shared);
}

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// --- asynchronous copies of 16 bytes to shared memory ---

// With `valid` false the 16 bytes become zero and `global` is not read (it must still be a mapped address).
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same if `wanted`, without a branch, to an address in shared memory.
__device__ __forceinline__ void CopyAsync16If(bool wanted, uint32_t shared, const void* global, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %0, 0;\n"
      "@wanted cp.async.cg.shared.global [%1], [%2], 16, %3;\n"
      "}" ::"r"(static_cast<int>(wanted)),
      "r"(shared), "l"(global), "r"(valid ? 16 : 0));
}
// The same for 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void CopyAsyncSmall(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(SharedAddress(shared)), "l"(global), "n"(kBytes),
               "r"(valid ? kBytes : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- bulk copies to shared memory, completing on a barrier in shared memory ---

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
}
// After BarrierInit and before a block barrier: makes the barriers known to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival that also announces `bytes` of copies.
__device__ __forceinline__ void BarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Waits for the phase of the given parity (0 for the first) to complete.
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
// Arrives, one of those that the barrier counts, once all CopyAsync of this thread so far have landed.
__device__ __forceinline__ void BarrierArriveCopied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// `bytes`, a multiple of 16, between 16-byte aligned addresses. One thread issues it for the block.
__device__ __forceinline__ void CopyBulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}
// The same with a policy of the second-level cache.
__device__ __forceinline__ void CopyBulkHinted(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
// One box of the tensor that `map` (a kernel parameter) describes, from the given element on, innermost first. One
// thread issues it for the block; the whole box counts, elements outside the tensor too.
__device__ __forceinline__ void CopyTensor3(void* shared, const void* map, int x, int y, int z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier))
      : "memory");
}
// The same with a policy of the second-level cache.
__device__ __forceinline__ void CopyTensor3Hinted(void* shared, const void* map, int x, int y, int z, uint64_t* barrier,
                                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyTensor4(void* shared, const void* map, int x, int y, int z, int w,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(SharedAddress(barrier))
      : "memory");
}

// The other way, one box from shared memory; what lies outside the tensor is left out. One thread issues copies, closes
// a group of them and waits for all of its groups: until shared memory has been read, or until all is written.
__device__ __forceinline__ void CopyTensor3Out(const void* map, int x, int y, int z, const void* shared,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;" ::"l"(
          map),
      "r"(x), "r"(y), "r"(z), "r"(SharedAddress(shared)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void CopyOutCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void CopyOutWaitRead() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void CopyOutWait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's earlier writes to shared memory before later bulk copies out of it; a barrier must follow.
__device__ __forceinline__ void FenceSharedForCopy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between what this thread has written to global memory, or has learnt to be written, and copies of it by the engine.
__device__ __forceinline__ void FenceGlobalForCopy() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- counters in global memory ---

// What this thread has written, or has seen of others by a block barrier, is there for whoever reads the sum.
__device__ __forceinline__ void AddRelease(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// --- launches that overlap (LaunchShape::early) ---

// The next launch may start.
__device__ __forceinline__ void GridDependencyRelease() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// All of the launch before has ended and is visible; at once in a launch that is not early.
__device__ __forceinline__ void GridDependencyWait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- warpgroups with roles of their own ---

// Barriers 1 to 15 (0 is __syncthreads), for `threads` threads, whole warps: those that wait and those that only
// arrive.
__device__ __forceinline__ void NamedBarrierSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedBarrierArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Registers a thread of the warpgroup, a multiple of 8; the kernel has a register cap at entry.
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- matrix fragments ---

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned), as a
// pointer or as a shared address to which kOffset bytes are added.
template <int kOffset>
__device__ __forceinline__ void LoadMatrix4(uint32_t (&fragment)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row), "n"(kOffset)
               : "memory");
}
template <int kOffset>
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&fragment)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row), "n"(kOffset)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4(uint32_t (&fragment)[4], const void* row) {
  LoadMatrix4<0>(fragment, SharedAddress(row));
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&fragment)[4], const void* row) {
  LoadMatrix4Transposed<0>(fragment, SharedAddress(row));
}

// The other way: matrix m of `fragment`, transposed, to the rows at which lanes 8 m .. 8 m + 7 point.
template <int kOffset>
__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(row),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "n"(kOffset)
               : "memory");
}
__device__ __forceinline__ void StoreMatrix4Transposed(void* row, const uint32_t (&fragment)[4]) {
  StoreMatrix4Transposed<0>(SharedAddress(row), fragment);
}

// sum[16x8] += a[16x16] b[16x8]. With g = lane / 4 and t = lane % 4:
//   a[0] holds (row g, cols 2t, 2t+1), a[1] row g+8, a[2] and a[3] the same rows at columns +8;
//   b[0] holds (rows 2t, 2t+1, col g), b[1] rows +8; sum[0..1] (row g, cols 2t, 2t+1), sum[2..3] row g+8.
__device__ __forceinline__ void MmaBf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for fp16 operands.
__device__ __forceinline__ void MmaF16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with the product as the sum.
__device__ __forceinline__ void MmaF16From0(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Two floats rounded to a pair of bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Products of pairs; subnormal operands and results are kept.
__device__ __forceinline__ uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two floats rounded to a pair of fp16, `low` in the lower half; beyond +-65504 they become that, NaN stays.
__device__ __forceinline__ uint32_t PackF16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 UnpackF16(uint32_t pair) {
  float2 values;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

// Two floats rounded to a pair of e4m3, `low` in the lower byte; beyond +-448 they become that.
__device__ __forceinline__ uint32_t PackE4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 UnpackE4m3(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return UnpackF16(halves);
}

// 2^x to 2 ulp; results below 2^-126 become 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same, kept where it stands among asynchronous products and the waits for them.
__device__ __forceinline__ float Exp2Here(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp; 0 for infinite x, infinite for |x| below 2^-126.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x) to 2 ulp; infinite for x below 2^-126.
__device__ __forceinline__ float ReciprocalRoot(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh with an error of up to 2^-11 of it.
__device__ __forceinline__ float Tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One store, also where a branch beside it stores the same in pieces.
__device__ __forceinline__ void Store16(void* global, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// --- loads that pass the caches by ---

__device__ __forceinline__ uint4 LoadStreaming16(const void* global) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global));
  return v;
}

// The same, or zeros; no branch.
__device__ __forceinline__ uint4 LoadStreaming16If(bool valid, const void* global) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(global), "r"(static_cast<int>(valid)));
  return v;
}
__device__ __forceinline__ uint32_t Load4If(bool valid, const void* global) {
  uint32_t v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
               : "=&r"(v)
               : "l"(global), "r"(static_cast<int>(valid)));
  return v;
}

// What is touched with this policy leaves the second-level cache first.
__device__ __forceinline__ uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t EvictNormalPolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint4 LoadHinted16(const void* global, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global), "l"(policy)
               : "memory");
  return v;
}
// The address is kept from the compiler (13.0), which else may split it in a way that it encodes wrongly here.
__device__ __forceinline__ void CopyAsyncHinted16(void* shared, const void* global, uint64_t policy) {
  uint32_t to = SharedAddress(shared);
  asm volatile("" : "+r"(to));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void StoreHinted16(void* global, uint4 v, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(global), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}
// What `value` is used for stays behind this point.
__device__ __forceinline__ void Pin(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ __forceinline__ void PrefetchL1(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global));
}
__device__ __forceinline__ void PrefetchL2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
// `bytes`, a multiple of 16, from a 16-byte aligned address on. One thread issues it for the block.
__device__ __forceinline__ void PrefetchBulkL2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// --- counters that hurry nobody: no order with other accesses ---

__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
__device__ __forceinline__ void StoreRelaxed(uint32_t* global, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}
__device__ __forceinline__ void AddRelaxed(uint32_t* global, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// --- clusters of blocks ---

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster; shared memory written before the arrival is visible after the wait. A
// block's shared memory may be touched by others from their first wait until its own last arrival.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Says only that this block has started: nothing written before is visible after the wait.
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of block `rank`'s copy of a shared variable.
template <typename T>
__device__ __forceinline__ T* InBlock(T* shared, uint32_t rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T*>(address);
}

// Stores a float to block `rank`'s copy of a shared variable and counts its bytes on that block's copy of `barrier`.
__device__ __forceinline__ void StoreAsync(float* to, float value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [barrier];\n"
      "}" ::"r"(SharedAddress(to)),
      "r"(__float_as_uint(value)), "r"(SharedAddress(barrier)), "r"(rank)
      : "memory");
}
// One arrival at block `rank`'s copy of a barrier. Says nothing about earlier writes: release at the scope of the
// cluster costs the expert tiles, which only read, a quarter of their speed.
__device__ __forceinline__ void BarrierArriveAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}
// CopyBulkHinted to the same place in each block of the cluster whose bit is set in `blocks`, completing on its
// barrier.
__device__ __forceinline__ void CopyBulkMulticast(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                                  uint16_t blocks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4, %5;" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "h"(blocks), "l"(policy)
      : "memory");
}
// CopyTensor3 to the same place in each block of the cluster whose bit is set in `blocks`, completing on its barrier.
__device__ __forceinline__ void CopyTensor3Multicast(void* shared, const void* map, int x, int y, int z,
                                                     uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(SharedAddress(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier)), "h"(blocks)
      : "memory");
}

}  // namespace k3::cuda
