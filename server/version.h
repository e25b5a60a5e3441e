#pragma once

namespace k3 {

// The release, e.g. "0.1.0".
extern const char kVersion[];
// The commit that was built, with "-dirty" when files differed; "unknown" outside a checkout.
extern const char kCommit[];

}  // namespace k3
