#pragma once

#include "kernels/cuda/ptx.cuh"

// The warpgroup's matrix instructions: sum[64 x N] += a[64 x 16] b[16 x N], asynchronous, by four consecutive warps the
// first of which is a multiple of four. Warp w of the group owns rows 16 w .. 16 w + 15; of every 8 columns a lane
// holds the four sums that MmaBf16 would leave it: sum[4 j .. 4 j + 3] for columns 8 j .. 8 j + 7.
//
// Operands in shared memory are made of atoms of 8 rows x 128 bytes with 128-byte swizzle (Swizzle128), each on a
// 1024-byte boundary, and are named by descriptors.
namespace k3::cuda {

// Byte offset of the 16-byte piece `piece` (0..7) of row `row` within a column of such atoms.
__device__ __forceinline__ int Swizzle128(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Rows contiguous along the contraction ("K-major", a and plain b): rows in groups of 8, `group_bytes` apart. Within an
// atom the next 16 elements of the contraction are 32 bytes on. Transposed b (contraction along rows): groups of 8 rows
// `group_bytes` apart, blocks of 64 columns `block_bytes` apart.
__device__ __forceinline__ uint64_t SharedOperand(const void* shared, uint32_t group_bytes = 1024,
                                                  uint32_t block_bytes = 16) {
  return (static_cast<uint64_t>(SharedAddress(shared)) & 0x3ffff) >> 4 | static_cast<uint64_t>(block_bytes >> 4) << 16 |
         static_cast<uint64_t>(group_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// The same of atoms of 8 rows x 64 bytes with 64-byte swizzle (piece p of row r is the (p ^ r / 2 % 4)-th), each on a
// 512-byte boundary and right after the one before.
__device__ __forceinline__ uint64_t SharedOperand64(const void* shared) {
  return (static_cast<uint64_t>(SharedAddress(shared)) & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 |
         uint64_t{2} << 62;
}

// Orders this thread's earlier writes to shared memory before the matrix unit's reads; a barrier must follow.
__device__ __forceinline__ void FenceSharedForMatrix() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product, and after registers that products use were touched.
__device__ __forceinline__ void GroupMmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void GroupMmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void GroupMmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// a and b in shared memory; with `accumulate` false the old sums are ignored. Transposed a: as transposed b, 64 rows
// wide. The sums are d[kFirst], d[kFirst + 1], ...
template <int N, bool kTransposedB = false, bool kTransposedA = false, int kFirst = 0, int kSums>
__device__ __forceinline__ void GroupMma(float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate = true);
// a in registers, as MmaBf16 takes it.
template <int N, bool kTransposedB = false, int kFirst = 0, int kSums>
__device__ __forceinline__ void GroupMma(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate = true);

// a and b in fp16, plain, in shared memory.
template <int N>
__device__ __forceinline__ void GroupMmaSharedF16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate);

// a in registers, both in fp16.
template <int N, bool kTransposedB = false>
__device__ __forceinline__ void GroupMmaF16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                            bool accumulate = true);

// The first 4, 8, ... sums as operands: their numbers, and what they are bound to.
// clang-format off
#define K3_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define K3_NUMBERS_16 K3_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define K3_NUMBERS_32 K3_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define K3_NUMBERS_48 K3_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define K3_NUMBERS_64 K3_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define K3_NUMBERS_80 K3_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define K3_NUMBERS_96 K3_NUMBERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define K3_NUMBERS_104 K3_NUMBERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define K3_NUMBERS_112 K3_NUMBERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define K3_NUMBERS_120 K3_NUMBERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define K3_NUMBERS_128 K3_NUMBERS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define K3_NUMBERS_52 K3_NUMBERS_48 ", %48, %49, %50, %51"
#define K3_NUMBERS_56 K3_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define K3_NUMBERS_60 K3_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59"
#define K3_NUMBERS_68 K3_NUMBERS_64 ", %64, %65, %66, %67"
#define K3_NUMBERS_72 K3_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define K3_NUMBERS_76 K3_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75"
#define K3_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define K3_SUMS_16 K3_SUMS_8, \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define K3_SUMS_32 K3_SUMS_16, \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define K3_SUMS_48 K3_SUMS_32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define K3_SUMS_64 K3_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define K3_SUMS_80 K3_SUMS_64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define K3_SUMS_96 K3_SUMS_80, \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define K3_SUMS_104 K3_SUMS_96, \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define K3_SUMS_112 K3_SUMS_104, \
    "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define K3_SUMS_120 K3_SUMS_112, \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define K3_SUMS_128 K3_SUMS_120, \
    "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define K3_SUMS_52 K3_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define K3_SUMS_56 K3_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define K3_SUMS_60 K3_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define K3_SUMS_68 K3_SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define K3_SUMS_72 K3_SUMS_64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define K3_SUMS_76 K3_SUMS_64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])

#define K3_NUMBERS_108 K3_NUMBERS_104 ", %104, %105, %106, %107"
#define K3_NUMBERS_116 K3_NUMBERS_112 ", %112, %113, %114, %115"
#define K3_NUMBERS_124 K3_NUMBERS_120 ", %120, %121, %122, %123"
#define K3_SUMS_108 K3_SUMS_104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define K3_SUMS_116 K3_SUMS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define K3_SUMS_124 K3_SUMS_120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])

#define K3_GROUP_MMA_OF(NAME, TYPE, N, SUMS, FIRST, SECOND, THIRD, FOURTH, FIFTH)                                      \
  template <bool kTransposedB, bool kTransposedA>                                                                      \
  __device__ __forceinline__ void NAME##N(float* d, uint64_t a, uint64_t b, bool accumulate) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " THIRD ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" K3_NUMBERS_##SUMS "}, " FIRST    \
                 ", " SECOND ", p, 1, 1, " FIFTH ", " FOURTH ";\n}"                                                    \
                 : K3_SUMS_##SUMS                                                                                      \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransposedB ? 1 : 0),                       \
                   "n"(kTransposedA ? 1 : 0));                                                                         \
  }
#define K3_GROUP_MMA_REGISTERS(NAME, TYPE, N, SUMS, A, SECOND, THIRD, FOURTH)                                          \
  template <bool kTransposedB>                                                                                         \
  __device__ __forceinline__ void NAME##N(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " THIRD ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" K3_NUMBERS_##SUMS "}, {" A       \
                 "}, " SECOND ", p, 1, 1, " FOURTH ";\n}"                                                              \
                 : K3_SUMS_##SUMS                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),              \
                   "n"(kTransposedB ? 1 : 0));                                                                         \
  }
#define K3_GROUP_MMA(N, ...) K3_GROUP_MMA_OF(GroupMma, "bf16", N, __VA_ARGS__)
K3_GROUP_MMA(16, 8, "%8", "%9", "%10", "%11", "%12")
K3_GROUP_MMA(32, 16, "%16", "%17", "%18", "%19", "%20")
K3_GROUP_MMA(64, 32, "%32", "%33", "%34", "%35", "%36")
K3_GROUP_MMA(96, 48, "%48", "%49", "%50", "%51", "%52")
K3_GROUP_MMA(104, 52, "%52", "%53", "%54", "%55", "%56")
K3_GROUP_MMA(112, 56, "%56", "%57", "%58", "%59", "%60")
K3_GROUP_MMA(120, 60, "%60", "%61", "%62", "%63", "%64")
K3_GROUP_MMA(128, 64, "%64", "%65", "%66", "%67", "%68")
K3_GROUP_MMA(136, 68, "%68", "%69", "%70", "%71", "%72")
K3_GROUP_MMA(144, 72, "%72", "%73", "%74", "%75", "%76")
K3_GROUP_MMA(152, 76, "%76", "%77", "%78", "%79", "%80")
K3_GROUP_MMA(160, 80, "%80", "%81", "%82", "%83", "%84")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 32, 16, "%16, %17, %18, %19", "%20", "%21", "%22")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 64, 32, "%32, %33, %34, %35", "%36", "%37", "%38")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 96, 48, "%48, %49, %50, %51", "%52", "%53", "%54")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 128, 64, "%64, %65, %66, %67", "%68", "%69", "%70")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 136, 68, "%68, %69, %70, %71", "%72", "%73", "%74")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 144, 72, "%72, %73, %74, %75", "%76", "%77", "%78")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 152, 76, "%76, %77, %78, %79", "%80", "%81", "%82")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 160, 80, "%80, %81, %82, %83", "%84", "%85", "%86")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 192, 96, "%96, %97, %98, %99", "%100", "%101", "%102")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 208, 104, "%104, %105, %106, %107", "%108", "%109", "%110")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 216, 108, "%108, %109, %110, %111", "%112", "%113", "%114")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 224, 112, "%112, %113, %114, %115", "%116", "%117", "%118")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 232, 116, "%116, %117, %118, %119", "%120", "%121", "%122")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 240, 120, "%120, %121, %122, %123", "%124", "%125", "%126")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 248, 124, "%124, %125, %126, %127", "%128", "%129", "%130")
K3_GROUP_MMA_REGISTERS(GroupMma, "bf16", 256, 128, "%128, %129, %130, %131", "%132", "%133", "%134")
K3_GROUP_MMA_OF(GroupMmaF16_, "f16", 128, 64, "%64", "%65", "%66", "%67", "%68")
K3_GROUP_MMA_REGISTERS(GroupMmaF16_, "f16", 32, 16, "%16, %17, %18, %19", "%20", "%21", "%22")
K3_GROUP_MMA_REGISTERS(GroupMmaF16_, "f16", 128, 64, "%64, %65, %66, %67", "%68", "%69", "%70")
#define K3_NUMBERS_4 "%0, %1, %2, %3"
#define K3_NUMBERS_12 K3_NUMBERS_8 ", %8, %9, %10, %11"
#define K3_SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define K3_SUMS_12 K3_SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define K3_GROUP_MMA_E4M3(N, SUMS, A, SECOND, THIRD)                                                                   \
  __device__ __forceinline__ void GroupMmaE4m3_##N(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " THIRD ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" K3_NUMBERS_##SUMS "}, {" A "}, " SECOND  \
                 ", p, 1, 1;\n}"                                                                                       \
                 : K3_SUMS_##SUMS                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));             \
  }
K3_GROUP_MMA_E4M3(8, 4, "%4, %5, %6, %7", "%8", "%9")
K3_GROUP_MMA_E4M3(16, 8, "%8, %9, %10, %11", "%12", "%13")
K3_GROUP_MMA_E4M3(24, 12, "%12, %13, %14, %15", "%16", "%17")
K3_GROUP_MMA_E4M3(32, 16, "%16, %17, %18, %19", "%20", "%21")
#undef K3_GROUP_MMA_E4M3
#undef K3_NUMBERS_4
#undef K3_NUMBERS_12
#undef K3_SUMS_4
#undef K3_SUMS_12
#undef K3_GROUP_MMA
#undef K3_GROUP_MMA_OF
#undef K3_GROUP_MMA_REGISTERS
#undef K3_NUMBERS_8
#undef K3_SUMS_8
#undef K3_NUMBERS_16
#undef K3_SUMS_16
#undef K3_NUMBERS_32
#undef K3_SUMS_32
#undef K3_NUMBERS_48
#undef K3_SUMS_48
#undef K3_NUMBERS_52
#undef K3_SUMS_52
#undef K3_NUMBERS_56
#undef K3_SUMS_56
#undef K3_NUMBERS_60
#undef K3_SUMS_60
#undef K3_NUMBERS_64
#undef K3_SUMS_64
#undef K3_NUMBERS_68
#undef K3_SUMS_68
#undef K3_NUMBERS_72
#undef K3_SUMS_72
#undef K3_NUMBERS_76
#undef K3_SUMS_76
#undef K3_NUMBERS_80
#undef K3_SUMS_80
#undef K3_NUMBERS_96
#undef K3_SUMS_96
#undef K3_NUMBERS_104
#undef K3_SUMS_104
#undef K3_NUMBERS_108
#undef K3_SUMS_108
#undef K3_NUMBERS_112
#undef K3_SUMS_112
#undef K3_NUMBERS_116
#undef K3_SUMS_116
#undef K3_NUMBERS_120
#undef K3_SUMS_120
#undef K3_NUMBERS_124
#undef K3_SUMS_124
#undef K3_NUMBERS_128
#undef K3_SUMS_128
// clang-format on

template <int N, bool kTransposedB, bool kTransposedA, int kFirst, int kSums>
__device__ __forceinline__ void GroupMma(float (&d)[kSums], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kFirst + N / 2 <= kSums);
  if constexpr (N == 16) GroupMma16<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 32) GroupMma32<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 64) GroupMma64<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 96) GroupMma96<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 104) GroupMma104<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 112) GroupMma112<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 120) GroupMma120<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 128) GroupMma128<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 136) GroupMma136<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 144) GroupMma144<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 152) GroupMma152<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
  if constexpr (N == 160) GroupMma160<kTransposedB, kTransposedA>(d + kFirst, a, b, accumulate);
}

template <int N, bool kTransposedB, int kFirst, int kSums>
__device__ __forceinline__ void GroupMma(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(kFirst + N / 2 <= kSums);
  if constexpr (N == 32) GroupMma32<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 64) GroupMma64<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 96) GroupMma96<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 128) GroupMma128<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 136) GroupMma136<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 144) GroupMma144<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 152) GroupMma152<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 160) GroupMma160<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 192) GroupMma192<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 208) GroupMma208<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 216) GroupMma216<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 224) GroupMma224<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 232) GroupMma232<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 240) GroupMma240<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 248) GroupMma248<kTransposedB>(d + kFirst, a, b, accumulate);
  if constexpr (N == 256) GroupMma256<kTransposedB>(d + kFirst, a, b, accumulate);
}

template <int N>
__device__ __forceinline__ void GroupMmaSharedF16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 128);
  GroupMmaF16_128<false, false>(d, a, b, accumulate);
}

template <int N, bool kTransposedB>
__device__ __forceinline__ void GroupMmaF16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  if constexpr (N == 32) GroupMmaF16_32<kTransposedB>(d, a, b, accumulate);
  if constexpr (N == 128) GroupMmaF16_128<kTransposedB>(d, a, b, accumulate);
}

// sum[64 x N] += a[64 x 32] b[32 x N] in e4m3, N 8 to 32; with `accumulate` false the old sums are ignored. Register
// a[0] holds row g, columns 4 t .. 4 t + 3 (the first in the lowest byte), a[1] row g + 8, a[2] and a[3] the same rows
// at columns + 16; sums as above; b plain, within an atom the next 32 elements of the contraction are 32 bytes on.
template <int N, int kSums>
__device__ __forceinline__ void GroupMmaE4m3(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N / 2 <= kSums);
  if constexpr (N == 8) GroupMmaE4m3_8(d, a, b, accumulate);
  if constexpr (N == 16) GroupMmaE4m3_16(d, a, b, accumulate);
  if constexpr (N == 24) GroupMmaE4m3_24(d, a, b, accumulate);
  if constexpr (N == 32) GroupMmaE4m3_32(d, a, b, accumulate);
}

}  // namespace k3::cuda
