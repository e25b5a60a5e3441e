#pragma once

#include <openssl/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace k3 {

struct TlsPaths {
  std::string cert;       // certificate chain, the server's own first
  std::string key;        // its private key, without a pass phrase
  std::string client_ca;  // empty: clients need no certificate
};

// One consistent set of certificate, key and client authority. `context` serves HTTP; gRPC takes the texts.
struct TlsIdentity {
  std::string cert;
  std::string key;
  std::string client_ca;
  std::shared_ptr<SSL_CTX> context;
  uint64_t generation = 0;  // grows with each reload
};

// The TLS files of all listeners. What is given out was checked as a whole: the chain parses and has not expired, the
// key belongs to it, the authority parses. Connections keep the identity that they began with. Thread-safe.
class TlsStore {
 public:
  // INVALID_ARGUMENT names the flag, the file and what is wrong with it.
  static absl::StatusOr<std::unique_ptr<TlsStore>> Open(TlsPaths paths);

  // Reads the files again. On an error what was there stays in use.
  absl::Status Reload();
  std::shared_ptr<const TlsIdentity> Current() const;
  bool asks_for_client_certificate() const { return !paths_.client_ca.empty(); }

 private:
  explicit TlsStore(TlsPaths paths) : paths_(std::move(paths)) {}

  const TlsPaths paths_;
  mutable std::mutex mutex_;
  std::shared_ptr<const TlsIdentity> current_;  // guarded by mutex_
};

}  // namespace k3
