#include <spdlog/spdlog.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "tests/testing/openai_server.h"

// The HTTP front end whose model says what it is told: each line of standard input is the text of all later replies, in
// which ⟨tag⟩ and ⟨/tag⟩ stand for markers of the K3 format. A second word on the first line of output is the port.
// Lets client tests see tool calls, which the small model does not make by itself.
int main() {
  spdlog::set_level(spdlog::level::off);  // its log would go to the output that the tests read
  k3::testing::OpenAiServer server;
  std::printf("ready %d\n", static_cast<int>(server.port()));
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    server.ForceText(line);
    std::puts("ok");
    std::fflush(stdout);
  }
}
