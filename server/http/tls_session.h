#pragma once

#include <openssl/types.h>

#include <cstddef>
#include <memory>
#include <string>

namespace k3 {

// The server's side of TLS over a connected socket that does not block. Nothing here waits: each call does what can be
// done now and says what to wait for. One thread at a time. Writes to a closed peer raise SIGPIPE, which the process
// must ignore.
class TlsSession {
 public:
  enum class Outcome {
    kDone,
    kWaitRead,   // call again when the socket is readable
    kWaitWrite,  // when it is writable
    kClosed,     // the peer ended the session
    kFailed,
  };

  // Keeps `context` alive. `fd` stays the caller's.
  TlsSession(std::shared_ptr<SSL_CTX> context, int fd);
  ~TlsSession();

  Outcome Handshake();
  // Fills `data` as far as bytes are there; kDone when `*bytes` > 0.
  Outcome Read(char* data, size_t size, size_t* bytes);
  // After kWaitWrite the next call must offer the same bytes again (more may follow them).
  Outcome Write(const char* data, size_t size, size_t* bytes);
  // Tells the peer that nothing more comes, as far as the socket takes it.
  void Close();
  // Decrypted bytes wait that no event of the socket will announce.
  bool HasPending() const;

  // Why the last call failed; for logs.
  const std::string& error() const { return error_; }

 private:
  Outcome After(int result);

  const std::shared_ptr<SSL_CTX> context_;
  std::unique_ptr<SSL, void (*)(SSL*)> ssl_;
  std::string error_;
};

}  // namespace k3
