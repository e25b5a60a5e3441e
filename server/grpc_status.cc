#include "server/grpc_status.h"

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/error_details.h"

namespace k3 {
namespace {

// Trailers carry the message twice, once percent-encoded (up to three times its size), once in base64; together they
// must stay well below the 8 KiB that peers accept.
constexpr size_t kMaxMessage = 1000;

constexpr char kDomain[] = "k3serve";

void Pack(const google::protobuf::Message& message, google::rpc::Status* status) {
  status->add_details()->PackFrom(message);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status, const std::string& request_id, const std::string& field_prefix) {
  if (status.ok()) return grpc::Status::OK;
  const ErrorDetails details = DetailsOf(status);
  std::string message = Excerpt(std::string(status.message()), kMaxMessage);
  if (status.code() == absl::StatusCode::kInternal) {
    // Causes are in the log, under the same id.
    message = absl::StrCat("internal error; request ", request_id.empty() ? "unknown" : request_id);
  }

  google::rpc::Status rpc;
  rpc.set_code(static_cast<int>(status.code()));
  rpc.set_message(message);
  if (!details.reason.empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(details.reason);
    info.set_domain(kDomain);
    for (const auto& [name, value] : details.numbers) (*info.mutable_metadata())[name] = value;
    Pack(info, &rpc);
  }
  if (!details.fields.empty()) {
    google::rpc::BadRequest bad_request;
    for (const ErrorDetails::Field& field : details.fields) {
      auto* violation = bad_request.add_field_violations();
      violation->set_field(absl::StrCat(field_prefix, field.path));
      violation->set_description(Excerpt(field.description, 300));
    }
    Pack(bad_request, &rpc);
  }
  if (!details.preconditions.empty()) {
    google::rpc::PreconditionFailure failure;
    for (const ErrorDetails::Precondition& item : details.preconditions) {
      auto* violation = failure.add_violations();
      violation->set_type(item.type);
      violation->set_subject(item.subject);
      violation->set_description(item.description);
    }
    Pack(failure, &rpc);
  }
  if (!details.quotas.empty()) {
    google::rpc::QuotaFailure failure;
    for (const ErrorDetails::Quota& quota : details.quotas) {
      auto* violation = failure.add_violations();
      violation->set_subject(quota.subject);
      violation->set_description(quota.description);
    }
    Pack(failure, &rpc);
  }
  if (details.resource.has_value()) {
    google::rpc::ResourceInfo info;
    info.set_resource_type(details.resource->type);
    info.set_resource_name(Excerpt(details.resource->name));
    Pack(info, &rpc);
  }
  if (details.retry_after.has_value()) {
    const int64_t ms = absl::ToInt64Milliseconds(*details.retry_after);
    google::rpc::RetryInfo info;
    info.mutable_retry_delay()->set_seconds(ms / 1000);
    info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(ms % 1000) * 1000000);
    Pack(info, &rpc);
  }
  if (!request_id.empty()) {
    google::rpc::RequestInfo info;
    info.set_request_id(request_id);
    Pack(info, &rpc);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message, rpc.SerializeAsString());
}

std::string RetryPushback(const absl::Status& status) {
  const auto retry_after = DetailsOf(status).retry_after;
  return retry_after.has_value() ? absl::StrCat(absl::ToInt64Milliseconds(*retry_after)) : std::string();
}

}  // namespace k3
