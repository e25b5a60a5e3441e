#include "server/text/field_error.h"

#include "absl/strings/cord.h"

namespace k3 {
namespace {

constexpr char kPathPayload[] = "k3serve/field-path";

}  // namespace

absl::Status FieldError(std::string_view path, std::string_view what) {
  std::string message(path);
  if (!path.empty()) message += ": ";
  message += what;
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kPathPayload, absl::Cord(std::string(path)));
  return status;
}

std::string FieldErrorPath(const absl::Status& status) {
  const auto payload = status.GetPayload(kPathPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

}  // namespace k3
