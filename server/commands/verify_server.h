#pragma once

#include <ostream>
#include <string>

#include "server/commands/client_access.h"
#include "server/commands/contract_report.h"
#include "server/commands/http_caller.h"

namespace k3 {

struct VerifyServerOptions {
  std::string url;     // HTTP; empty: not checked
  std::string target;  // gRPC; empty: not checked
  ClientAccess access;
};

// Replays the API contract against a running server: answers, streams, errors, limits, and that both front ends say the
// same. Works with any model; the requests are small. Prints one JSON object a check, then a summary. Returns the exit
// code.
int RunVerifyServer(VerifyServerOptions options, std::ostream& out, std::ostream& err);

// The parts of it. `greedy` gets the text of a greedy completion of kContractPrompt, or is compared with it when set.
inline constexpr char kContractPrompt[] = "The shell is";
void CheckHttpContract(const HttpUrl& url, const ClientAccess& access, ContractReport& report, std::string* greedy);
void CheckGrpcContract(const std::string& target, const ClientAccess& access, ContractReport& report,
                       std::string* greedy);

}  // namespace k3
