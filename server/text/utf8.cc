#include "server/text/utf8.h"

#include <cstring>

namespace k3 {
namespace {

struct LeadByte {
  int continuation_bytes;  // 0 for a byte that starts no multi-byte character
  uint8_t lower;           // range of the first continuation byte
  uint8_t upper;
};

// Table 3-7 of the Unicode standard.
LeadByte ClassifyLead(uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {1, 0x80, 0xBF};
  if (byte == 0xE0) return {2, 0xA0, 0xBF};
  if (byte == 0xED) return {2, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {2, 0x80, 0xBF};
  if (byte == 0xF0) return {3, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {3, 0x80, 0xBF};
  if (byte == 0xF4) return {3, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes at the start of `text` that are ASCII, eight at a time and so possibly a few too few.
size_t AsciiPrefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if (word & 0x8080808080808080ull) break;
  }
  return i;
}

}  // namespace

Utf8Char DecodeUtf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  if (bytes[0] < 0x80) return {bytes[0], 1};
  const LeadByte lead = ClassifyLead(bytes[0]);
  if (lead.continuation_bytes == 0 || static_cast<size_t>(lead.continuation_bytes) >= text.size()) return {};
  if (bytes[1] < lead.lower || bytes[1] > lead.upper) return {};
  uint32_t code_point = bytes[0] & (0x3F >> lead.continuation_bytes);
  code_point = code_point << 6 | (bytes[1] & 0x3F);
  for (int i = 2; i <= lead.continuation_bytes; ++i) {
    if ((bytes[i] & 0xC0) != 0x80) return {};
    code_point = code_point << 6 | (bytes[i] & 0x3F);
  }
  return {code_point, lead.continuation_bytes + 1};
}

size_t ValidUtf8Prefix(std::string_view text) {
  size_t i = 0;
  while (true) {
    i += AsciiPrefix(text.substr(i));
    // Non-ASCII text would look for eight ASCII bytes before each character: take a stretch of characters first.
    for (int n = 0; n < 16; ++n) {
      if (i >= text.size()) return i;
      const int length = DecodeUtf8(text.substr(i)).length;
      if (length == 0) return i;
      i += length;
    }
  }
}

void AppendUtf8(uint32_t code_point, std::string* out) {
  if (code_point < 0x80) {
    out->push_back(static_cast<char>(code_point));
  } else if (code_point < 0x800) {
    out->push_back(static_cast<char>(0xC0 | code_point >> 6));
    out->push_back(static_cast<char>(0x80 | (code_point & 0x3F)));
  } else if (code_point < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | code_point >> 12));
    out->push_back(static_cast<char>(0x80 | (code_point >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code_point & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | code_point >> 18));
    out->push_back(static_cast<char>(0x80 | (code_point >> 12 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code_point >> 6 & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code_point & 0x3F)));
  }
}

void Utf8Stream::Append(std::string_view bytes, std::string* out) {
  size_t i = 0;
  if (needed_ == 0) {
    i = ValidUtf8Prefix(bytes);
    out->append(bytes.substr(0, i));
  }
  for (; i < bytes.size(); ++i) AppendByte(static_cast<uint8_t>(bytes[i]), out);
}

void Utf8Stream::AppendByte(uint8_t byte, std::string* out) {
  if (needed_ > 0 && (byte < lower_ || byte > upper_)) {
    out->append(kReplacementCharacter);  // the pending bytes are one maximal subpart; `byte` starts afresh
    needed_ = pending_size_ = 0;
  }
  if (needed_ > 0) {
    pending_[pending_size_++] = static_cast<char>(byte);
    lower_ = 0x80;
    upper_ = 0xBF;
    if (--needed_ == 0) {
      out->append(pending_, pending_size_);
      pending_size_ = 0;
    }
    return;
  }
  if (byte < 0x80) {
    out->push_back(static_cast<char>(byte));
    return;
  }
  const LeadByte lead = ClassifyLead(byte);
  if (lead.continuation_bytes == 0) {
    out->append(kReplacementCharacter);
    return;
  }
  pending_[0] = static_cast<char>(byte);
  pending_size_ = 1;
  needed_ = lead.continuation_bytes;
  lower_ = lead.lower;
  upper_ = lead.upper;
}

void Utf8Stream::Flush(std::string* out) {
  if (needed_ > 0) out->append(kReplacementCharacter);
  needed_ = pending_size_ = 0;
}

std::string SanitizeUtf8(std::string_view bytes) {
  std::string out;
  Utf8Stream stream;
  stream.Append(bytes, &out);
  stream.Flush(&out);
  return out;
}

}  // namespace k3
