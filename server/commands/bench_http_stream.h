#pragma once

#include <openssl/ssl.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/ssl/ssl_stream.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace k3 {

// A client's connection, plain or TLS, in the form that Beast reads from and writes to.
class BenchHttpStream {
 public:
  using executor_type = boost::beast::tcp_stream::executor_type;

  // TLS unless `context` is null; the server must then prove that it is `host`.
  BenchHttpStream(boost::asio::io_context& io, SSL_CTX* context, const std::string& host) {
    if (context == nullptr) {
      plain_.emplace(io);
      return;
    }
    SSL_CTX_up_ref(context);  // the next line takes one
    boost::asio::ssl::context shared(context);
    tls_.emplace(io, shared);
    SSL* const ssl = tls_->native_handle();
    SSL_set1_host(ssl, host.c_str());  // a name or an address
    boost::system::error_code is_name;
    boost::asio::ip::make_address(host, is_name);
    if (is_name) SSL_set_tlsext_host_name(ssl, host.c_str());
  }

  boost::beast::tcp_stream& tcp() { return plain_.has_value() ? *plain_ : tls_->next_layer(); }
  executor_type get_executor() { return tcp().get_executor(); }

  // After the connect: `handler(error_code)`, at once on a plain connection.
  template <class Handler>
  void Handshake(Handler handler) {
    if (plain_.has_value()) return handler(boost::system::error_code());
    tls_->async_handshake(boost::asio::ssl::stream_base::client, std::move(handler));
  }

  template <class Buffers, class Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (plain_.has_value()) {
      plain_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    }
  }
  template <class Buffers, class Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (plain_.has_value()) {
      plain_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

 private:
  // One of the two.
  std::optional<boost::beast::tcp_stream> plain_;
  std::optional<boost::beast::ssl_stream<boost::beast::tcp_stream>> tls_;
};

}  // namespace k3
