#pragma once

#include "kernels/ops.h"

namespace k3::bench {

// What a device reaches in this run: the measure of everything else.
struct Ceilings {
  double copy = 0;  // bytes read and written a second, by a plain copy kernel over 2 GiB
  double gemm = 0;  // FLOP/s of a bf16 product of 8192^3 on random numbers
};
Ceilings MeasureCeilings(Ops& ops);

}  // namespace k3::bench
