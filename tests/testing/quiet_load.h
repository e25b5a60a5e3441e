#pragma once

#include "engine/model/weights_loader.h"

namespace k3::testing {

// Loading without progress lines.
inline LoadOptions QuietLoad() {
  LoadOptions options;
  options.print_progress = false;
  return options;
}

}  // namespace k3::testing
