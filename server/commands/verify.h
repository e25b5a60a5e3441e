#pragma once

#include <iosfwd>
#include <string>
#include <vector>

namespace k3 {

// `k3serve verify MODEL_DIR --golden FILE`: runs the golden's prompts and compares. Writes one JSON object a line per
// prompt to `out`, then a summary object; messages go to `err`. Returns the exit code: 0 passed, 1 not passed, 2 usage,
// 4 bad checkpoint or golden, 6 no usable device, 70 device fault.
int RunVerify(const std::vector<std::string>& args, std::ostream& out, std::ostream& err);

}  // namespace k3
