#include "server/launch_place.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr int kDefaultPort = 29500;  // torchrun's

// One launcher's names.
struct Names {
  const char* process;
  const char* processes;
  const char* local;
};
constexpr Names kLaunchers[] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK"},
                                {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                                {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};

bool Given(const char* value) { return value != nullptr && *value != '\0'; }

absl::StatusOr<int> Number(const GetEnv& getenv, const char* name, int low, int high) {
  const char* text = getenv(name);
  int value = 0;
  if (!Given(text) || !absl::SimpleAtoi(text, &value) || value < low || value > high) {
    return absl::InvalidArgumentError(absl::StrCat("the launcher's ", name, " is \"", Given(text) ? text : "",
                                                   "\", must be a number from ", low, " to ", high));
  }
  return value;
}

}  // namespace

absl::StatusOr<ProcessPlace> LaunchPlace(const GetEnv& getenv) {
  ProcessPlace place;
  for (const Names& names : kLaunchers) {
    // A shell inside an allocation has the number of tasks, but is none of them.
    if (!Given(getenv(names.process)) || !Given(getenv(names.processes))) continue;
    const auto processes = Number(getenv, names.processes, 1, 4096);
    if (!processes.ok()) return processes.status();
    if (*processes == 1) continue;
    const auto process = Number(getenv, names.process, 0, *processes - 1);
    if (!process.ok()) return process.status();
    place.processes = *processes;
    place.process = *process;
    if (Given(getenv(names.local))) {
      const auto local = Number(getenv, names.local, 0, *processes - 1);
      if (!local.ok()) return local.status();
      place.local_process = *local;
    }
    const char* host = getenv("MASTER_ADDR");
    if (!Given(host)) host = getenv("SLURM_LAUNCH_NODE_IPADDR");
    if (!Given(host)) {
      return absl::InvalidArgumentError(
          absl::StrCat(names.processes, " is ", *processes,
                       ", but MASTER_ADDR does not say on which machine the first process runs"));
    }
    place.master_host = host;
    place.master_port = kDefaultPort;
    if (Given(getenv("MASTER_PORT"))) {
      const auto port = Number(getenv, "MASTER_PORT", 1, 65534);
      if (!port.ok()) return port.status();
      place.master_port = *port;
    }
    return place;
  }
  return place;
}

}  // namespace k3
