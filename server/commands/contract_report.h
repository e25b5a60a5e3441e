#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace k3 {

// Runs checks of a server's contract and reports each as one JSON object a line.
class ContractReport {
 public:
  explicit ContractReport(std::ostream& out) : out_(out) {}

  void Run(const std::string& name, const std::function<absl::Status()>& check) {
    absl::Status status;
    try {
      status = check();
    } catch (const std::exception& e) {  // a member of the answer is missing or of another type
      status = absl::InternalError(absl::StrCat("the answer has another shape: ", e.what()));
    }
    ++checks_;
    nlohmann::ordered_json line = {{"check", name}, {"passed", status.ok()}};
    if (!status.ok()) {
      ++failed_;
      line["detail"] = std::string(status.message());
    }
    out_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }
  // The last line; true when all have passed.
  bool Finish() {
    out_ << nlohmann::ordered_json{{"passed", failed_ == 0}, {"checks", checks_}, {"failed", failed_}}.dump()
         << std::endl;
    return failed_ == 0;
  }

 private:
  std::ostream& out_;
  int checks_ = 0;
  int failed_ = 0;
};

// OK when true; else what was expected and what came.
template <class T, class U>
absl::Status Expect(const std::string& what, const T& actual, const U& expected) {
  if (actual == expected) return absl::OkStatus();
  const nlohmann::json got = actual;
  const nlohmann::json wanted = expected;
  return absl::InternalError(
      absl::StrCat(what, " is ", got.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 300),
                   ", not ", wanted.dump().substr(0, 300)));
}
inline absl::Status ExpectTrue(bool condition, const std::string& what) {
  return condition ? absl::OkStatus() : absl::InternalError(what);
}
// The first error of several; OK otherwise.
inline absl::Status AllOf(std::initializer_list<absl::Status> statuses) {
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace k3
