#pragma once

#include <string>

namespace k3 {

// Which of a launcher's processes this is, and where the first one is found.
struct ProcessPlace {
  int process = 0;
  int processes = 1;
  int local_process = 0;  // on its machine
  std::string master_host;
  int master_port = 0;
};

}  // namespace k3
