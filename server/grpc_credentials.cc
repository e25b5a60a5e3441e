#include "server/grpc_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include <atomic>
#include <cstdint>

#include "server/tls_store.h"

namespace k3 {
namespace {

// gRPC's C++ layer of this version takes fixed texts or watches files by a timer; its C layer asks a callback at each
// handshake, which is what a reload on demand needs.
class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(const TlsStore* store) : store_(store) {
    const auto clients = store->asks_for_client_certificate()
                             ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                             : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
    credentials_ = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(clients, &Fetch, this));
  }
  ~ReloadingCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  // gRPC calls this under a lock of its own.
  static grpc_ssl_certificate_config_reload_status Fetch(void* self, grpc_ssl_server_certificate_config** config) {
    auto* credentials = static_cast<ReloadingCredentials*>(self);
    const std::shared_ptr<const TlsIdentity> identity = credentials->store_->Current();
    if (credentials->generation_.exchange(identity->generation) == identity->generation) {
      return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    }
    const grpc_ssl_pem_key_cert_pair pair{identity->key.c_str(), identity->cert.c_str()};
    // It insists on roots even where no client is asked for a certificate and nothing is checked against them.
    const char* roots = identity->client_ca.empty() ? identity->cert.c_str() : identity->client_ca.c_str();
    *config = grpc_ssl_server_certificate_config_create(roots, &pair, 1);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const TlsStore* const store_;
  grpc_server_credentials* credentials_ = nullptr;
  std::atomic<uint64_t> generation_{0};  // of the identity that gRPC holds
};

}  // namespace

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsStore* tls) {
  if (tls == nullptr) return grpc::InsecureServerCredentials();
  return std::make_shared<ReloadingCredentials>(tls);
}

}  // namespace k3
