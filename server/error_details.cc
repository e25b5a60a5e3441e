#include "server/error_details.h"

#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

constexpr char kPayloadType[] = "k3serve/error-details";

using nlohmann::json;

// Invalid UTF-8 in a message must not throw.
std::string Dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

}  // namespace

absl::Status WithDetails(absl::Status status, const ErrorDetails& details) {
  json out = {{"reason", details.reason}, {"numbers", details.numbers}};
  for (const auto& field : details.fields) out["fields"].push_back({field.path, field.description});
  for (const auto& item : details.preconditions) {
    out["preconditions"].push_back({item.type, item.subject, item.description});
  }
  for (const auto& quota : details.quotas) out["quotas"].push_back({quota.subject, quota.description});
  if (details.resource.has_value()) out["resource"] = {details.resource->type, details.resource->name};
  if (details.retry_after.has_value()) out["retry_after_ms"] = absl::ToInt64Milliseconds(*details.retry_after);
  status.SetPayload(kPayloadType, absl::Cord(Dump(out)));
  return status;
}

ErrorDetails DetailsOf(const absl::Status& status) {
  ErrorDetails details;
  const auto payload = status.GetPayload(kPayloadType);
  if (!payload.has_value()) return details;
  const json in = json::parse(std::string(*payload));
  details.reason = in["reason"];
  details.numbers = in["numbers"];
  for (const json& field : in.value("fields", json::array())) details.fields.push_back({field[0], field[1]});
  for (const json& item : in.value("preconditions", json::array())) {
    details.preconditions.push_back({item[0], item[1], item[2]});
  }
  for (const json& quota : in.value("quotas", json::array())) details.quotas.push_back({quota[0], quota[1]});
  if (in.contains("resource")) details.resource = ErrorDetails::Resource{in["resource"][0], in["resource"][1]};
  if (in.contains("retry_after_ms")) details.retry_after = absl::Milliseconds(in["retry_after_ms"].get<int64_t>());
  return details;
}

absl::Status InvalidField(const std::string& path, const std::string& description) {
  ErrorDetails details;
  details.reason = "invalid_field";
  details.fields.push_back({path, description});
  return WithDetails(absl::InvalidArgumentError(absl::StrCat(path, ": ", description)), details);
}

absl::Status UnimplementedFeature(const std::string& path, const std::string& description) {
  ErrorDetails details;
  details.reason = "unsupported_parameter";
  details.fields.push_back({path, description});
  return WithDetails(absl::UnimplementedError(absl::StrCat(path, ": ", description)), details);
}

absl::Status UnavailableFor(const std::string& reason, const std::string& message, absl::Duration retry_after) {
  ErrorDetails details;
  details.reason = reason;
  details.retry_after = retry_after;
  return WithDetails(absl::UnavailableError(message), details);
}

std::string Excerpt(const std::string& text, size_t limit) {
  std::string out = SanitizeUtf8(text.substr(0, limit));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  if (text.size() > limit) out += "...";
  return out;
}

}  // namespace k3
