#include "server/commands/client_access.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/api_keys.h"
#include "server/text_file.h"

namespace k3 {
namespace {

// OpenSSL's reason for the file at hand.
absl::Status BadFile(const char* flag, const std::string& path) {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": ", path, ": ", reason == nullptr ? "cannot be used" : reason));
}

absl::Status ReadText(const char* flag, const std::string& path, std::string* text) {
  if (path.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> all = ReadTextFile(path);
  if (!all.ok()) return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", all.status().message()));
  *text = *std::move(all);
  return absl::OkStatus();
}

// No key has a pass phrase here; asking for one on the terminal would hang a script.
int NoPassphrase(char*, int, int, void*) { return 0; }

}  // namespace

void ClientAccess::DeclareFlags(FlagSet& flags) {
  flags.String("api-key-file", &key_path_, "FILE", "the key to show: the file's first line");
  flags.Bool("tls", &tls_, "gRPC over TLS (HTTP: an https:// URL); the certificate is always verified");
  flags.String("tls-ca", &ca_path_, "FILE", "trust this authority (PEM) instead of the system's; turns TLS on");
  flags.String("tls-cert", &cert_path_, "FILE", "certificate chain to show to the server (PEM)");
  flags.String("tls-key", &cert_key_path_, "FILE", "its private key (PEM)");
}

absl::Status ClientAccess::Load() {
  if (!key_path_.empty()) {
    std::ifstream file(key_path_);
    if (!std::getline(file, key_)) {
      return absl::InvalidArgumentError(absl::StrCat("--api-key-file: cannot read a key from ", key_path_));
    }
    key_ = std::string(absl::StripAsciiWhitespace(key_));
    // gRPC would abort the process.
    if (!CanBeKey(key_)) {
      return absl::InvalidArgumentError(absl::StrCat("--api-key-file: the first line of ", key_path_,
                                                     " is no key: expected printable ASCII without spaces"));
    }
  }
  if (cert_path_.empty() != cert_key_path_.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key need each other");
  }
  absl::Status status = ReadText("tls-ca", ca_path_, &ca_);
  if (status.ok()) status = ReadText("tls-cert", cert_path_, &cert_);
  if (status.ok()) status = ReadText("tls-key", cert_key_path_, &cert_key_);
  if (!status.ok()) return status;

  context_.reset(SSL_CTX_new(TLS_client_method()), &SSL_CTX_free);
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_default_passwd_cb(context, &NoPassphrase);
  if (ca_path_.empty()) {
    SSL_CTX_set_default_verify_paths(context);
  } else if (SSL_CTX_load_verify_locations(context, ca_path_.c_str(), nullptr) != 1) {
    return BadFile("tls-ca", ca_path_);
  }
  if (!cert_path_.empty()) {
    if (SSL_CTX_use_certificate_chain_file(context, cert_path_.c_str()) != 1) return BadFile("tls-cert", cert_path_);
    if (SSL_CTX_use_PrivateKey_file(context, cert_key_path_.c_str(), SSL_FILETYPE_PEM) != 1) {
      return BadFile("tls-key", cert_key_path_);
    }
  }
  return absl::OkStatus();
}

absl::Status ClientAccess::CheckUrl(const std::string& flag, bool https) const {
  if (https || !tls()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " must be https:// with TLS flags"));
}

std::shared_ptr<grpc::ChannelCredentials> ClientAccess::ChannelCredentials() const {
  if (!tls()) return grpc::InsecureChannelCredentials();
  return grpc::SslCredentials({.pem_root_certs = ca_, .pem_private_key = cert_key_, .pem_cert_chain = cert_});
}

}  // namespace k3
