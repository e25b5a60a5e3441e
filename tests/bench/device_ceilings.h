#pragma once

#include <functional>

#include "kernels/ops.h"

namespace k3::bench {

// What a device reaches in this run: the measure of everything else.
struct Ceilings {
  double copy = 0;  // bytes read and written a second, by a plain copy kernel over 2 GiB
  double gemm = 0;  // FLOP/s of a bf16 product of 8192^3 on random numbers
};
// `seconds_of` tells how long a call takes that only launches; by default the median of a dozen between events.
using SecondsOf = std::function<double(const std::function<void()>&)>;
Ceilings MeasureCeilings(Ops& ops, const SecondsOf& seconds_of);
Ceilings MeasureCeilings(Ops& ops);

}  // namespace k3::bench
