#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace k3 {

// Typed reads of one JSON object's fields. The first wrong field ends up in `status`, named with its path, what was
// expected and what is there; later reads then still return something harmless, so a parser can read straight through
// and look at the status once. A field that is null counts as absent, as in the files that transformers writes.
class ConfigFields {
 public:
  // All three outlive the reader. `path` is "" or ends in a dot.
  ConfigFields(const nlohmann::json& object, std::string file, std::string path, absl::Status* status)
      : object_(object), file_(std::move(file)), path_(std::move(path)), status_(status) {}

  bool Has(const char* name) const;

  int64_t Int(const char* name, int64_t min, int64_t max);
  int64_t IntOr(const char* name, int64_t absent, int64_t min, int64_t max);
  // Bounds are inclusive.
  double Number(const char* name, double min, double max);
  double NumberOr(const char* name, double absent, double min, double max);
  bool BoolOr(const char* name, bool absent);
  std::string String(const char* name);
  std::string StringOr(const char* name, std::string absent);
  std::vector<int64_t> Ints(const char* name, int64_t min, int64_t max);
  // A single integer or a list of them; empty when absent.
  std::vector<int64_t> IntOrInts(const char* name, int64_t min, int64_t max);
  // An empty object when it is missing or none.
  const nlohmann::json& Object(const char* name);

  // Fields of the object that are neither null nor among `known`, in the file's order.
  std::vector<std::string> Others(std::span<const char* const> known) const;
  // The object `name` as fields of its own, which report to the same status.
  ConfigFields Inner(const char* name) { return {Object(name), file_, path_ + name + ".", status_}; }

  // Records "file: path.name: expected ..., found ..." unless an earlier field was wrong already.
  void Fail(const char* name, const std::string& expected);
  void Fail(const char* name, const std::string& expected, const std::string& found);

  bool ok() const { return status_->ok(); }

 private:
  const nlohmann::json* Find(const char* name) const;

  const nlohmann::json& object_;
  std::string file_;
  std::string path_;
  absl::Status* status_;
};

}  // namespace k3
