#include "kernels/ops.h"

namespace k3 {

std::unique_ptr<CapturedWork> Ops::Capture(const std::function<void()>&, Stream) {
  throw DeviceError(device_name() + " cannot capture work");
}

void Ops::Launch(const CapturedWork&, Stream) { throw DeviceError(device_name() + " cannot launch captured work"); }

}  // namespace k3
