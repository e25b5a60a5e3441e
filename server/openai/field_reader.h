#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/text/json_value.h"

namespace k3 {

// Reads the members of one JSON object by name, with the types that a client may send: null counts as absent, a whole
// number may be written as a float, any member may be missing. Remembers the first error, a FieldError with the
// member's path; after it all reads give nothing.
class FieldReader {
 public:
  // `object` must outlive the reader. When it is no object that is the first error. `path` is "" for the body itself.
  FieldReader(const JsonValue& object, std::string path);

  // The member, whatever it is; null when absent or JSON null.
  const JsonValue* Get(std::string_view key) const;
  bool Has(std::string_view key) const { return Get(key) != nullptr; }

  std::optional<std::string> String(std::string_view key);
  std::optional<bool> Bool(std::string_view key);
  std::optional<double> Number(std::string_view key, double low, double high);
  std::optional<int64_t> Integer(std::string_view key, int64_t low, int64_t high);
  // Any whole number from `low` up; those above `cap` come back as `cap`.
  std::optional<int64_t> CappedInteger(std::string_view key, int64_t low, int64_t cap);
  const JsonValue* Object(std::string_view key);
  const JsonValue* Array(std::string_view key);

  // For checks of the caller's own.
  void Fail(std::string_view key, std::string_view what);
  // Takes over the first error of a reader of a nested object, or of any other check; OK changes nothing.
  void Adopt(const absl::Status& status);
  std::string Path(std::string_view key) const;
  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

 private:
  // The member if it is a whole number, also when only its `overflow` is known; anything else but null is an error.
  std::optional<int64_t> WholeValue(std::string_view key, const JsonValue** value, int* overflow);

  std::string path_;
  // Built once for wide objects, so that a hostile one costs no scan per name.
  absl::flat_hash_map<std::string_view, const JsonValue*> members_;
  absl::Status status_;
};

// What kind of value this is, for messages: "a string", "an object", ...
std::string_view KindName(const JsonValue& value);

// The value itself, as far as it is short, for messages about what came instead: 1.5, the string "x", an object.
std::string Described(const JsonValue& value);

// The number if it is whole and fits; 5.0 and 1e3 count. `overflow` (may be null) is set to -1 or 1 when it is whole
// but lies outside int64.
std::optional<int64_t> WholeNumber(const JsonValue& value, int* overflow = nullptr);

}  // namespace k3
