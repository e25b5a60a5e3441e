#define K3_SIMD avx512

// The order matters: each header is written against the names of those before it.
// clang-format off
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/gemm_kernels.h"
#include "kernels/cpu/kernels.inc"
// clang-format on
