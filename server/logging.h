#pragma once

#include <string>

namespace k3 {

// Sends the process' log to stderr: one line an event, UTC with milliseconds, level, message. `format` is "text" or
// "json" (an object a line); `level` one of trace, debug, info, warn, error.
void SetUpLogging(const std::string& format, const std::string& level);

}  // namespace k3
