#include <string>

#include "support/logging.h"  // of the grammar library

// Where the library's own messages go: errors to its caller, who tells the client; all else nowhere, because it repeats
// what clients wrote, and a log holds no part of a request.
namespace xgrammar {

void LogFatalImpl(const std::string& file, int lineno, const std::string& message) {
  throw LogFatalError(file, lineno, message);
}

void LogMessageImpl(const std::string&, int, int, const std::string&) {}

}  // namespace xgrammar
