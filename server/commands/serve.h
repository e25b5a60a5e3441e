#pragma once

#include <string>
#include <vector>

#include "server/flags.h"

namespace k3 {

// `k3serve serve MODEL_DIR`: loads, serves, and returns the exit code. Prints the ready line, --help and --print-config
// on stdout, everything else on stderr.
//
// SIGTERM and SIGINT begin a drain, also while the model loads; a second one ends the process at once with 128 plus its
// number. The caller must have blocked both signals before any thread was started, and must leave with _Exit: a load
// that was given up may still be running on its thread.
// `variables`: the names of all environment variables.
int RunServe(const std::vector<std::string>& args, const GetEnv& getenv, const std::vector<std::string>& variables);

}  // namespace k3
