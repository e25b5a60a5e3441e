#include "server/grammar/schema_reference.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "absl/strings/str_replace.h"

namespace k3 {
namespace {

// Of a URI's fragment, in which a JSON pointer is written. A malformed escape stays what it is.
std::string PercentDecoded(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    uint8_t byte = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() && std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      out.push_back(static_cast<char>(byte));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

}  // namespace

const JsonValue* ResolveSchemaReference(const JsonValue& root, const std::string& reference) {
  if (reference == "#") return &root;
  if (!reference.starts_with("#/")) return nullptr;
  const JsonValue* place = &root;
  size_t begin = 2;
  while (place != nullptr) {
    const size_t end = std::min(reference.find('/', begin), reference.size());
    const std::string name =
        absl::StrReplaceAll(PercentDecoded(reference.substr(begin, end - begin)), {{"~1", "/"}, {"~0", "~"}});
    if (place->is_array()) {
      size_t index = 0;
      const auto parsed = std::from_chars(name.data(), name.data() + name.size(), index);
      const bool number =
          parsed.ec == std::errc() && parsed.ptr == name.data() + name.size() && (name.size() == 1 || name[0] != '0');
      place = number && index < place->items.size() ? &place->items[index] : nullptr;
    } else {
      place = place->Find(name);
    }
    if (end == reference.size()) return place;
    begin = end + 1;
  }
  return nullptr;
}

const JsonValue& FollowSchemaReferences(const JsonValue& root, const JsonValue& schema) {
  constexpr int kMost = 32;
  const JsonValue* place = &schema;
  for (int i = 0; i < kMost; ++i) {
    const JsonValue* reference = place->Find("$ref");
    const JsonValue* target =
        reference != nullptr && reference->is_string() ? ResolveSchemaReference(root, reference->text) : nullptr;
    if (target == nullptr) break;
    place = target;
  }
  return *place;
}

}  // namespace k3
