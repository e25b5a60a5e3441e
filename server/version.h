#pragma once

namespace k3 {

// The release, e.g. "0.1.0".
extern const char kVersion[];
// The commit that was built, with "-dirty" when files differed; "unknown" outside a checkout.
extern const char kCommit[];
// The CUDA toolkit that the device code was compiled with, or "not compiled in".
extern const char kCudaVersion[];

}  // namespace k3
