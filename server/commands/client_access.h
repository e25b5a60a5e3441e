#pragma once

#include <grpcpp/security/credentials.h>
#include <openssl/types.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/flags.h"

namespace k3 {

// How the commands that talk to a server prove who they are and whom they trust: an API key, TLS. A server's
// certificate is always verified; there is no flag that skips it. Thread-safe once loaded; copies share what was read.
class ClientAccess {
 public:
  // The flags; `this` must stay in place until Load.
  void DeclareFlags(FlagSet& flags);

  // Reads the files. INVALID_ARGUMENT names the flag, the file and what is wrong with it.
  absl::Status Load();

  // For gRPC: any of the TLS flags turns it on. HTTP takes it from the URL's scheme.
  bool tls() const { return tls_ || !ca_path_.empty() || !cert_path_.empty(); }
  // INVALID_ARGUMENT when a plain URL meets TLS flags: the key would travel in the clear.
  absl::Status CheckUrl(const std::string& flag, bool https) const;

  const std::string& key() const { return key_; }  // empty: none is shown
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const;
  SSL_CTX* context() const { return context_.get(); }

 private:
  bool tls_ = false;
  std::string key_path_;  // of the API key
  std::string ca_path_;
  std::string cert_path_;
  std::string cert_key_path_;

  std::string key_;
  // PEM texts; gRPC takes these, HTTP the context.
  std::string ca_;
  std::string cert_;
  std::string cert_key_;
  std::shared_ptr<SSL_CTX> context_;
};

}  // namespace k3
