#include "server/http/request_parser.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace k3 {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;
using BeastError = beast::error_code;

// What the request itself may be refused for, beside what Beast finds.
enum class Refusal { kNone, kBodyTooLarge, kBudget, kTransferCoding, kOldChunked, kTarget, kHost };

constexpr uint64_t kChunked = UINT64_MAX;

class Parser : public http::basic_parser<true> {
 public:
  explicit Parser(BodyBudget& budget) : budget_(budget) {}
  ~Parser() { budget_.Return(taken_); }

  HttpRequest request;
  Refusal refusal = Refusal::kNone;
  bool http_1_0 = false;
  bool expects_continue = false;
  bool discard = false;
  uint64_t max_body = 0;

  uint64_t Release() { return std::exchange(taken_, 0); }
  BodyBudget& budget() { return budget_; }

 private:
  void Refuse(Refusal why, BeastError& ec) {
    refusal = why;
    ec = http::error::bad_value;
  }

  void on_request_impl(http::verb, beast::string_view method, beast::string_view target, int version,
                       BeastError& ec) override {
    http_1_0 = version < 11;
    request.method.assign(method.data(), method.size());
    if (!ParseTarget({target.data(), target.size()}, &request.path, &request.query)) Refuse(Refusal::kTarget, ec);
  }
  void on_response_impl(int, beast::string_view, int, BeastError& ec) override { ec = http::error::bad_method; }
  void on_field_impl(http::field field, beast::string_view name, beast::string_view value, BeastError& ec) override {
    request.headers.emplace_back(std::string(name), std::string(value));
    const absl::string_view text(value.data(), value.size());
    // Anything but plain chunking would leave it open where the request ends.
    if (field == http::field::transfer_encoding && !absl::EqualsIgnoreCase(text, "chunked")) {
      Refuse(Refusal::kTransferCoding, ec);
    }
    if (field == http::field::expect && absl::EqualsIgnoreCase(text, "100-continue")) expects_continue = true;
  }
  void on_header_impl(BeastError& ec) override {
    // RFC 9112 3.2: with several hosts, a proxy before us may have looked at another one than we would.
    const auto hosts = std::count_if(request.headers.begin(), request.headers.end(),
                                     [](const auto& header) { return absl::EqualsIgnoreCase(header.first, "host"); });
    if (hosts > 1 || (hosts == 0 && !http_1_0)) return Refuse(Refusal::kHost, ec);
    // RFC 9112 6.1: HTTP/1.0 has no chunks, so a proxy before us may see the request end elsewhere.
    if (http_1_0 && FindHeader(request.headers, "transfer-encoding").data() != nullptr)
      Refuse(Refusal::kOldChunked, ec);
  }
  void on_body_init_impl(const boost::optional<uint64_t>&, BeastError&) override {}
  size_t on_body_impl(beast::string_view bytes, BeastError& ec) override { return Keep(bytes, ec); }
  void on_chunk_header_impl(uint64_t, beast::string_view, BeastError&) override {}
  size_t on_chunk_body_impl(uint64_t, beast::string_view bytes, BeastError& ec) override { return Keep(bytes, ec); }
  void on_finish_impl(BeastError&) override {}

  size_t Keep(beast::string_view bytes, BeastError& ec) {
    if (discard) return bytes.size();
    if (request.body.size() + bytes.size() > max_body) {
      Refuse(Refusal::kBodyTooLarge, ec);
      return 0;
    }
    if (!budget_.Take(bytes.size())) {
      Refuse(Refusal::kBudget, ec);
      return 0;
    }
    taken_ += bytes.size();
    request.body.append(bytes.data(), bytes.size());
    return bytes.size();
  }

  BodyBudget& budget_;
  uint64_t taken_ = 0;
};

}  // namespace

struct HttpRequestParser::Impl {
  explicit Impl(BodyBudget& budget) : parser(budget) {}

  Parser parser;
  State state = State::kHead;
  int status = 0;
  std::string message;
  size_t scanned = 0;         // bytes of the head that CheckLines has seen and nobody has consumed
  char consumed_last = '\0';  // the byte before them
  int ending = 0;             // of the head's last four bytes, CR LF CR LF, how many stand before `scanned`

  void Fail(int error_status, std::string sentence) {
    state = State::kFailed;
    status = error_status;
    message = std::move(sentence);
  }
  void Fail(const BeastError& ec);

  // RFC 9112 2.2 and 5.2: lines of the head end with CR LF and begin with no blank. Beast lets folded lines pass and
  // sees no end in a head of bare line feeds; a proxy before us may read either otherwise.
  bool CheckLines(std::string_view bytes);
};

bool HttpRequestParser::Impl::CheckLines(std::string_view bytes) {
  // Counted, not looked up: what Beast has taken of the head is not in `bytes` any more.
  for (; scanned < bytes.size() && ending < 4; ++scanned) {
    const char c = bytes[scanned];
    const char before = scanned == 0 ? consumed_last : bytes[scanned - 1];
    if ((c == '\n') != (before == '\r')) {
      Fail(400, "malformed HTTP request: lines of the head must end with CR LF");
      return false;
    }
    if (before == '\n' && (c == ' ' || c == '\t')) {
      Fail(400, "malformed HTTP request: a header field must be one line");
      return false;
    }
    ending = c == '\r' ? (ending == 2 ? 3 : 1) : c == '\n' ? ending + 1 : 0;
  }
  return true;
}

void HttpRequestParser::Impl::Fail(const BeastError& ec) {
  switch (parser.refusal) {
    case Refusal::kBodyTooLarge:
      return Fail(413, absl::StrCat("the request body is larger than ", parser.max_body, " bytes"));
    case Refusal::kBudget:
      return Fail(503, "too many large requests are being received at once");
    case Refusal::kTransferCoding:
      return Fail(501, "of the transfer codings only 'chunked' is supported");
    case Refusal::kOldChunked:
      return Fail(400, "HTTP/1.0 has no Transfer-Encoding");
    case Refusal::kTarget:
      return Fail(400, "the request target has a malformed percent escape");
    case Refusal::kHost:
      return Fail(400, "the request needs exactly one Host header");
    case Refusal::kNone:
      break;
  }
  if (ec == http::error::header_limit) return Fail(431, "the request's header fields are too large");
  if (ec == http::error::body_limit) {
    return Fail(413, absl::StrCat("the request body is larger than ", parser.max_body, " bytes"));
  }
  if (ec == http::error::bad_version) return Fail(505, "only HTTP/1.0 and HTTP/1.1 are supported");
  Fail(400, absl::StrCat("malformed HTTP request: ", ec.message()));
}

HttpRequestParser::HttpRequestParser(uint32_t max_header_bytes, uint64_t max_body_bytes, BodyBudget& budget)
    : impl_(std::make_unique<Impl>(budget)) {
  impl_->parser.header_limit(max_header_bytes);
  // The own check in Keep covers chunked bodies; Beast's would count discarded bytes too.
  impl_->parser.body_limit(UINT64_MAX);
  impl_->parser.max_body = max_body_bytes;
}

HttpRequestParser::~HttpRequestParser() = default;

size_t HttpRequestParser::Consume(std::string_view bytes) {
  Impl& impl = *impl_;
  Parser& parser = impl.parser;
  size_t consumed = 0;
  while (impl.state == State::kHead || impl.state == State::kBody) {
    if (consumed == bytes.size() && !parser.is_done()) break;
    if (impl.state == State::kHead && !impl.CheckLines(bytes.substr(consumed))) break;
    BeastError ec;
    const size_t n = parser.put(boost::asio::buffer(bytes.data() + consumed, bytes.size() - consumed), ec);
    consumed += n;
    if (ec == http::error::need_more) {
      if (n == 0) break;
      impl.scanned -= std::min(impl.scanned, n);
      impl.consumed_last = bytes[consumed - 1];
      ec = {};
      if (impl.state == State::kHead && !parser.is_header_done()) break;
    }
    if (ec) {
      impl.Fail(ec);
      break;
    }
    if (impl.state == State::kHead && parser.is_header_done()) {
      const boost::optional<uint64_t> length = parser.content_length();
      if (length && *length > parser.max_body) {
        parser.refusal = Refusal::kBodyTooLarge;
        impl.Fail({});
        break;
      }
      impl.state = parser.is_done() ? State::kDone : State::kBody;
      break;
    }
    if (parser.is_done()) impl.state = State::kDone;
  }
  return consumed;
}

HttpRequestParser::State HttpRequestParser::state() const { return impl_->state; }
int HttpRequestParser::error_status() const { return impl_->status; }
std::string_view HttpRequestParser::error_message() const { return impl_->message; }
HttpRequest& HttpRequestParser::request() { return impl_->parser.request; }
bool HttpRequestParser::keep_alive() const { return impl_->parser.keep_alive(); }
bool HttpRequestParser::http_1_0() const { return impl_->parser.http_1_0; }
bool HttpRequestParser::expects_continue() const { return impl_->parser.expects_continue; }
void HttpRequestParser::DiscardBody() { impl_->parser.discard = true; }

uint64_t HttpRequestParser::content_length() const {
  if (impl_->parser.chunked()) return kChunked;
  const boost::optional<uint64_t> length = impl_->parser.content_length();
  return length ? *length : 0;
}

HttpRequest HttpRequestParser::TakeRequest(std::shared_ptr<void>* lease) {
  BodyBudget* budget = &impl_->parser.budget();
  const uint64_t bytes = impl_->parser.Release();
  // Small bodies are handled at once; only the others are worth an allocation.
  if (bytes < 64 << 10) {
    budget->Return(bytes);
  } else {
    *lease = std::shared_ptr<void>(budget, [bytes](void* b) { static_cast<BodyBudget*>(b)->Return(bytes); });
  }
  return std::move(impl_->parser.request);
}

}  // namespace k3
