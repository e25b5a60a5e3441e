#pragma once

#include "absl/status/statusor.h"
#include "engine/process_place.h"
#include "server/flags.h"

namespace k3 {

// The place that a cluster's launcher has given this process, from its variables: torchrun's (RANK, WORLD_SIZE,
// LOCAL_RANK, MASTER_ADDR, MASTER_PORT), Open MPI's (OMPI_COMM_WORLD_*) or Slurm's (SLURM_PROCID, SLURM_NTASKS,
// SLURM_LOCALID, and SLURM_LAUNCH_NODE_IPADDR for the address). A single process without them. InvalidArgument names
// what does not fit.
absl::StatusOr<ProcessPlace> LaunchPlace(const GetEnv& getenv);

}  // namespace k3
