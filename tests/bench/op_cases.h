#pragma once

// What cuda_bench measures, op by op: the rows of the performance goals under their names, and some beside them. Each
// case allocates its inputs, times the op and reports to the bench, unless the bench's filter leaves it out.
namespace k3 {

class Bench;

void KdaCases(Bench& bench);      // prefill, decoding, verification
void MlaCases(Bench& bench);      // decoding over paged latents, prefill
void MoeCases(Bench& bench);      // experts in bf16 and MXFP4
void AttnResCases(Bench& bench);  // residual mixes alone and in groups of sites
void NormCases(Bench& bench);     // residual addition with the next norm
void SampleCases(Bench& bench);   // top-k and top-p over a vocabulary
void LinearCases(Bench& bench);   // few rows, beside cuBLAS

}  // namespace k3
