#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "server/commands/bench.h"
#include "server/commands/generate.h"
#include "server/commands/plan.h"
#include "server/commands/serve.h"
#include "server/commands/verify.h"
#include "server/commands/version.h"
#include "server/exit_codes.h"
#include "server/flags.h"
#include "server/logging.h"

namespace k3 {
namespace {

struct Command {
  const char* name;
  const char* help;
  int (*run)(const std::vector<std::string>& args);
};

const Command kCommands[] = {
    {"serve", "MODEL_DIR          load a model and serve it by gRPC and HTTP",
     [](const std::vector<std::string>& args) {
       std::vector<std::string> variables;
       for (char** variable = environ; *variable != nullptr; ++variable) {
         const std::string text = *variable;
         variables.push_back(text.substr(0, text.find('=')));
       }
       return RunServe(
           args, [](const char* name) { return getenv(name); }, variables);
     }},
    {"generate", "TEXT            ask a running server",
     [](const std::vector<std::string>& args) { return RunGenerate(args, std::cin, std::cout, std::cerr); }},
    {"bench", "                   put load on a running server and measure it",
     [](const std::vector<std::string>& args) { return RunBench(args, std::cout, std::cerr); }},
    {"plan", "MODEL_DIR           how memory would be used, without loading",
     [](const std::vector<std::string>& args) { return RunPlan(args, std::cout, std::cerr); }},
    {"verify", "MODEL_DIR         run reference prompts and compare",
     [](const std::vector<std::string>& args) { return RunVerify(args, std::cout, std::cerr); }},
    {"version", "                 version, commit, libraries, processors",
     [](const std::vector<std::string>& args) {
       if (!args.empty() && args[0] != "--help") {
         std::cerr << "k3serve version: takes no arguments, found " << args[0] << "\n";
         return static_cast<int>(kExitUsage);
       }
       std::cout << VersionText();
       return static_cast<int>(kExitOk);
     }},
};

void PrintUsage(std::ostream& out) {
  out << "k3serve - inference server for Kimi K3-style models\n\nUsage: k3serve COMMAND ...\n\n";
  for (const Command& command : kCommands) out << "  " << command.name << " " << command.help << "\n";
  out << "\nk3serve COMMAND --help tells a command's flags. Exit codes: 0 clean, 2 usage, 3 does not fit, 4 bad "
         "checkpoint,\n5 cannot bind, 6 no usable device, 70 device fault.\n";
}

// What no caller caught, in any thread: mostly no memory, also for a new thread's stack, where unwinding would have to
// destroy threads that run. One line and the exit code of a lost device instead of an abort without a word.
[[noreturn]] void Terminate() {
  const char* hint = "";
  std::string what = "terminated";
  if (const std::exception_ptr current = std::current_exception()) {
    try {
      std::rethrow_exception(current);
    } catch (const std::bad_alloc&) {
      what = "out of memory";
    } catch (const std::system_error& error) {
      what = error.what();
      if (error.code() == std::errc::resource_unavailable_try_again) {
        hint = ": no thread could be started: too little memory or too many processes";
      }
    } catch (const std::exception& error) {
      what = error.what();
    } catch (...) {
      what = "an exception of unknown type";
    }
  }
  std::fprintf(stderr, "k3serve: fatal: %s%s\n", what.c_str(), hint);
  std::fflush(stderr);
  _exit(kExitDeviceFault);
}

int Run(const std::vector<std::string>& words) {
  if (words.empty()) {
    PrintUsage(std::cerr);
    return kExitUsage;
  }
  const std::string& name = words[0];
  if (name == "--help" || name == "-h" || name == "help") {
    PrintUsage(std::cout);
    return kExitOk;
  }
  const std::string wanted = name == "--version" ? "version" : name;
  const Command* nearest = nullptr;
  // Standard output belongs to the commands' results; `serve` sets this up again as its flags say.
  SetUpLogging("text", "info");
  for (const Command& command : kCommands) {
    if (wanted == command.name) return command.run({words.begin() + 1, words.end()});
    if (nearest == nullptr || EditDistance(wanted, command.name) < EditDistance(wanted, nearest->name)) {
      nearest = &command;
    }
  }
  std::cerr << "k3serve: unknown command " << name << "; did you mean " << nearest->name << "?\n";
  return kExitUsage;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) {
  std::set_terminate(k3::Terminate);
  const int code = k3::Run(std::vector<std::string>(argv + 1, argv + argc));
  // Not through static destructors: a load that was given up may still be running.
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
}
