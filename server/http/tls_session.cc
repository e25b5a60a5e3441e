#include "server/http/tls_session.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>
#include <utility>

namespace k3 {

TlsSession::TlsSession(std::shared_ptr<SSL_CTX> context, int fd)
    : context_(std::move(context)), ssl_(SSL_new(context_.get()), &SSL_free) {
  if (ssl_ == nullptr) return;  // out of memory: every call fails
  SSL_set_fd(ssl_.get(), fd);
  SSL_set_accept_state(ssl_.get());
}

TlsSession::~TlsSession() = default;

TlsSession::Outcome TlsSession::After(int result) {
  if (result > 0) return Outcome::kDone;
  const int saved_errno = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return Outcome::kWaitRead;
    case SSL_ERROR_WANT_WRITE:
      return Outcome::kWaitWrite;
    case SSL_ERROR_ZERO_RETURN:
      return Outcome::kClosed;
    case SSL_ERROR_SYSCALL:
      if (saved_errno == 0) return Outcome::kClosed;
      error_ = std::generic_category().message(saved_errno);
      return Outcome::kFailed;
    default: {
      const unsigned long code = ERR_get_error();
      const char* reason = ERR_reason_error_string(code);
      error_ = reason != nullptr ? reason : "TLS error";
      // A peer that closes without saying so; what it sent before has been read.
      if (ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING) return Outcome::kClosed;
      return Outcome::kFailed;
    }
  }
}

// The error queue is the thread's, so what another connection left there must not count.
TlsSession::Outcome TlsSession::Handshake() {
  if (ssl_ == nullptr) return Outcome::kFailed;
  ERR_clear_error();
  errno = 0;
  return After(SSL_do_handshake(ssl_.get()));
}

TlsSession::Outcome TlsSession::Read(char* data, size_t size, size_t* bytes) {
  *bytes = 0;
  while (*bytes < size) {
    ERR_clear_error();
    errno = 0;
    const size_t room = std::min<size_t>(size - *bytes, INT_MAX);
    const int result = SSL_read(ssl_.get(), data + *bytes, static_cast<int>(room));
    if (result <= 0) {
      const Outcome outcome = After(result);
      return *bytes > 0 ? Outcome::kDone : outcome;  // an end shows again at the next call
    }
    *bytes += static_cast<size_t>(result);
  }
  return Outcome::kDone;
}

TlsSession::Outcome TlsSession::Write(const char* data, size_t size, size_t* bytes) {
  *bytes = 0;
  ERR_clear_error();
  errno = 0;
  const int result = SSL_write(ssl_.get(), data, static_cast<int>(std::min<size_t>(size, INT_MAX)));
  if (result > 0) *bytes = static_cast<size_t>(result);
  return After(result);
}

void TlsSession::Close() {
  if (ssl_ == nullptr || SSL_in_init(ssl_.get())) return;
  ERR_clear_error();
  SSL_shutdown(ssl_.get());
  ERR_clear_error();
}

bool TlsSession::HasPending() const { return ssl_ != nullptr && SSL_pending(ssl_.get()) > 0; }

}  // namespace k3
