#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "engine/memory_plan.h"

namespace k3 {

// `k3serve plan MODEL_DIR`: how memory would be used, from config.json and, where there are weights, their headers.
// Takes the memory and layout flags of `serve`, --gpu-memory-gib and --json. Writes a table or one JSON object to
// `out`, messages to `err`. Returns the exit code: 0 fits, 2 usage, 3 does not fit, 4 bad config or checkpoint.
int RunPlan(const std::vector<std::string>& args, std::ostream& out, std::ostream& err);

// What the plan is about, for its title lines.
struct PlanSubject {
  std::string model_dir;
  std::string model_type;
  bool from_headers = false;  // else from config.json alone
  int32_t kda_heads = 0;      // of all ranks
};
std::string PlanTable(const PlanSubject& subject, const MemoryRequest& request, const MemoryPlan& plan);
std::string PlanJson(const PlanSubject& subject, const MemoryRequest& request, const MemoryPlan& plan);

}  // namespace k3
