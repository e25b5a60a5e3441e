#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace k3::testing {

struct HttpReplyText {
  int status = 0;
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
  // The value of a header, "" when absent.
  std::string Header(std::string_view name) const;
};

// A client made of a plain socket, so that tests decide on every byte and on when to read. All waits end after the
// time-out with a failed result.
class HttpClient {
 public:
  explicit HttpClient(uint16_t port, int receive_buffer = 0);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool connected() const { return fd_ >= 0; }
  // False when the server closed the connection.
  bool Send(std::string_view bytes);
  // Ends the sending side only.
  void HalfClose();
  void Close();
  // Closes so that the server sees a reset.
  void Reset();

  // One whole reply; nullopt when the connection ended or the time passed before its end.
  std::optional<HttpReplyText> ReadReply(bool head_only = false);
  // The head of a reply; the body stays to be read by ReadEvent or ReadSome.
  std::optional<HttpReplyText> ReadHead();
  // The body of a reply whose head was read.
  std::optional<std::string> ReadBody(const HttpReplyText& head);
  // The next event of a chunked event stream, without "data: "; comment lines are returned as they are. nullopt at the
  // end of the stream; `ended` then tells whether it ended properly.
  std::optional<std::string> ReadEvent();
  bool ended() const { return ended_; }
  // Sizes of the chunks read so far by ReadEvent; an event must never be cut by a chunk's end.
  bool event_was_split() const { return event_was_split_; }
  // True when the server closes within the time-out; throws away what it sends.
  bool WaitForClose();

  // POST or GET in one call.
  std::optional<HttpReplyText> Call(std::string_view method, std::string_view target, std::string_view body = "",
                                    std::string_view extra_headers = "");
  // Only sends it.
  bool SendRequest(std::string_view method, std::string_view target, std::string_view body = "",
                   std::string_view extra_headers = "");

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  bool Fill();       // more bytes into buffer_
  bool ReadChunk();  // the next chunk into events_; false at the end
  bool Line(std::string* line);

  int fd_ = -1;
  std::chrono::milliseconds timeout_{10000};
  std::string buffer_;
  std::string events_;
  bool ended_ = false;
  bool event_was_split_ = false;
};

}  // namespace k3::testing
