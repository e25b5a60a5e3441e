#pragma once

namespace k3 {

// What the process exits with; scripts and orchestrators tell failures apart by these.
enum ExitCode : int {
  kExitOk = 0,
  kExitNotPassed = 1,  // verify found a difference
  kExitUsage = 2,
  kExitDoesNotFit = 3,
  kExitBadCheckpoint = 4,
  kExitCannotBind = 5,
  kExitNoDevice = 6,
  kExitDeviceFault = 70,
};

}  // namespace k3
