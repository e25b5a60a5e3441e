#include "server/tls_store.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/text_file.h"

namespace k3 {
namespace {

// "\x08http/1.1": HTTP/2 over this listener is not offered.
constexpr unsigned char kAlpn[] = {8, 'h', 't', 't', 'p', '/', '1', '.', '1'};

std::string LastError() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "unknown error";
  char text[160];
  ERR_error_string_n(code, text, sizeof(text));
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : text;
}

absl::StatusOr<std::string> ReadFile(const char* flag, const std::string& path) {
  absl::StatusOr<std::string> text = ReadTextFile(path);
  if (text.ok()) return text;
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", text.status().message()));
}

absl::Status Bad(const char* flag, const std::string& path, const std::string& what) {
  ERR_clear_error();
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, ": ", what));
}

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

Bio TextBio(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free);
}

Certificate NextCertificate(BIO* bio) {
  return Certificate(PEM_read_bio_X509(bio, nullptr, nullptr, nullptr), &X509_free);
}

// After the last certificate the reader reports that no further one begins.
bool EndedCleanly() {
  const unsigned long error = ERR_peek_last_error();
  const bool clean = ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  return clean;
}

// No key has a pass phrase here; asking for one on the terminal would hang the start.
int NoPassphrase(char*, int, int, void*) { return 0; }

int SelectAlpn(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* in, unsigned in_size,
               void*) {
  unsigned char* chosen = nullptr;
  if (SSL_select_next_proto(&chosen, out_size, kAlpn, sizeof(kAlpn), in, in_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;
  }
  *out = chosen;
  return SSL_TLSEXT_ERR_OK;
}

absl::Status UseChain(SSL_CTX* context, const TlsPaths& paths, const std::string& text) {
  const Bio bio = TextBio(text);
  const Certificate own = NextCertificate(bio.get());
  if (own == nullptr) return Bad("--tls-cert", paths.cert, absl::StrCat("holds no certificate: ", LastError()));
  if (X509_cmp_current_time(X509_get0_notAfter(own.get())) <= 0) {
    return Bad("--tls-cert", paths.cert, "the certificate has expired");
  }
  if (SSL_CTX_use_certificate(context, own.get()) != 1) return Bad("--tls-cert", paths.cert, LastError());
  while (Certificate next = NextCertificate(bio.get())) {
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return Bad("--tls-cert", paths.cert, LastError());
  }
  if (!EndedCleanly()) return Bad("--tls-cert", paths.cert, "a certificate of the chain does not parse");
  return absl::OkStatus();
}

absl::Status UseKey(SSL_CTX* context, const TlsPaths& paths, const std::string& text) {
  const Bio bio = TextBio(text);
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      PEM_read_bio_PrivateKey(bio.get(), nullptr, &NoPassphrase, nullptr), &EVP_PKEY_free);
  if (key == nullptr) {
    return Bad("--tls-key", paths.key, absl::StrCat("holds no private key without a pass phrase: ", LastError()));
  }
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 || SSL_CTX_check_private_key(context) != 1) {
    return Bad("--tls-key", paths.key, absl::StrCat("does not belong to the certificate of ", paths.cert));
  }
  return absl::OkStatus();
}

absl::Status UseClientAuthority(SSL_CTX* context, const TlsPaths& paths, const std::string& text) {
  const Bio bio = TextBio(text);
  X509_STORE* store = SSL_CTX_get_cert_store(context);
  int count = 0;
  while (Certificate authority = NextCertificate(bio.get())) {
    if (X509_STORE_add_cert(store, authority.get()) != 1 || SSL_CTX_add_client_CA(context, authority.get()) != 1) {
      return Bad("--tls-client-ca", paths.client_ca, LastError());
    }
    ++count;
  }
  if (!EndedCleanly() || count == 0) {
    return Bad("--tls-client-ca", paths.client_ca,
               count == 0 ? "holds no certificate" : "a certificate does not parse");
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<TlsIdentity>> ReadIdentity(const TlsPaths& paths) {
  auto identity = std::make_shared<TlsIdentity>();
  struct {
    const char* flag;
    const std::string& path;
    std::string& text;
  } const files[] = {{"--tls-cert", paths.cert, identity->cert},
                     {"--tls-key", paths.key, identity->key},
                     {"--tls-client-ca", paths.client_ca, identity->client_ca}};
  for (const auto& file : files) {
    if (file.path.empty()) continue;
    absl::StatusOr<std::string> text = ReadFile(file.flag, file.path);
    if (!text.ok()) return text.status();
    file.text = *std::move(text);
  }
  ERR_clear_error();
  identity->context = std::shared_ptr<SSL_CTX>(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  SSL_CTX* context = identity->context.get();
  if (context == nullptr) return absl::InternalError(absl::StrCat("TLS: ", LastError()));
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_NO_COMPRESSION);
  // Connections are many and mostly idle; writes are retried from buffers that may have moved.
  SSL_CTX_set_mode(context,
                   SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_alpn_select_cb(context, &SelectAlpn, nullptr);
  static constexpr unsigned char kSessionContext[] = {'k', '3'};
  SSL_CTX_set_session_id_context(context, kSessionContext, sizeof(kSessionContext));
  absl::Status status = UseChain(context, paths, identity->cert);
  if (status.ok()) status = UseKey(context, paths, identity->key);
  if (status.ok() && !paths.client_ca.empty()) status = UseClientAuthority(context, paths, identity->client_ca);
  if (!status.ok()) return status;
  return identity;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsStore>> TlsStore::Open(TlsPaths paths) {
  std::unique_ptr<TlsStore> store(new TlsStore(std::move(paths)));
  const absl::Status status = store->Reload();
  if (!status.ok()) return status;
  return store;
}

absl::Status TlsStore::Reload() {
  absl::StatusOr<std::shared_ptr<TlsIdentity>> read = ReadIdentity(paths_);
  if (!read.ok()) return read.status();
  std::lock_guard lock(mutex_);
  (*read)->generation = current_ == nullptr ? 1 : current_->generation + 1;
  current_ = *std::move(read);
  return absl::OkStatus();
}

std::shared_ptr<const TlsIdentity> TlsStore::Current() const {
  std::lock_guard lock(mutex_);
  return current_;
}

}  // namespace k3
