#include "server/grpc_reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"
#include "server/error_details.h"

namespace k3 {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

// The file and all that it imports, imports first. `seen` stops repeats.
template <class FileResponse>
void AddFile(const FileDescriptor* file, std::set<std::string>* seen, FileResponse* response) {
  if (!seen->insert(file->name()).second) return;
  for (int i = 0; i < file->dependency_count(); ++i) AddFile(file->dependency(i), seen, response);
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response->add_file_descriptor_proto(proto.SerializeAsString());
}

// The two versions of the protocol have equal messages in different packages.
template <class Request, class Response>
void Answer(const Request& request, const std::vector<std::string>& services, Response* response) {
  response->Clear();
  response->set_valid_host(request.host());
  *response->mutable_original_request() = request;
  const auto not_found = [response](const std::string& what) {
    response->mutable_error_response()->set_error_code(static_cast<int>(grpc::StatusCode::NOT_FOUND));
    response->mutable_error_response()->set_error_message(absl::StrCat("not found: ", Excerpt(what)));
  };
  const auto file = [&](const FileDescriptor* descriptor, const std::string& what) {
    if (descriptor == nullptr) return not_found(what);
    std::set<std::string> seen;
    AddFile(descriptor, &seen, response->mutable_file_descriptor_response());
  };
  const DescriptorPool* pool = DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case Request::kFileByFilename:
      file(pool->FindFileByName(request.file_by_filename()), request.file_by_filename());
      break;
    case Request::kFileContainingSymbol:
      file(pool->FindFileContainingSymbol(request.file_containing_symbol()), request.file_containing_symbol());
      break;
    case Request::kFileContainingExtension:  // proto3 without extensions
      not_found(request.file_containing_extension().containing_type());
      break;
    case Request::kAllExtensionNumbersOfType:
      if (pool->FindMessageTypeByName(request.all_extension_numbers_of_type()) == nullptr) {
        not_found(request.all_extension_numbers_of_type());
      } else {
        response->mutable_all_extension_numbers_response()->set_base_type_name(request.all_extension_numbers_of_type());
      }
      break;
    case Request::kListServices:
      for (const std::string& name : services)
        response->mutable_list_services_response()->add_service()->set_name(name);
      break;
    default:
      response->mutable_error_response()->set_error_code(static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
      response->mutable_error_response()->set_error_message("message_request is missing");
  }
}

// One question, one answer, until the caller is done.
template <class Request, class Response>
class Conversation : public grpc::ServerBidiReactor<Request, Response> {
 public:
  explicit Conversation(const std::vector<std::string>* services) : services_(services) { this->StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) return this->Finish(grpc::Status::OK);
    Answer(request_, *services_, &response_);
    this->StartWrite(&response_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return this->Finish(grpc::Status::CANCELLED);
    this->StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  const std::vector<std::string>* const services_;
  Request request_;
  Response response_;
};

template <class Base, class Request, class Response>
class Reflection : public Base {
 public:
  explicit Reflection(std::vector<std::string> services) : services_(std::move(services)) {}
  grpc::ServerBidiReactor<Request, Response>* ServerReflectionInfo(grpc::CallbackServerContext*) override {
    return new Conversation<Request, Response>(&services_);
  }

 private:
  const std::vector<std::string> services_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeReflectionV1(std::vector<std::string> services) {
  namespace v1 = grpc::reflection::v1;
  return std::make_unique<
      Reflection<v1::ServerReflection::CallbackService, v1::ServerReflectionRequest, v1::ServerReflectionResponse>>(
      std::move(services));
}

std::unique_ptr<grpc::Service> MakeReflectionV1Alpha(std::vector<std::string> services) {
  namespace v1alpha = grpc::reflection::v1alpha;
  return std::make_unique<Reflection<v1alpha::ServerReflection::CallbackService, v1alpha::ServerReflectionRequest,
                                     v1alpha::ServerReflectionResponse>>(std::move(services));
}

}  // namespace k3
