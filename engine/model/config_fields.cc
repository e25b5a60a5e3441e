#include "engine/model/config_fields.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

// Enough of a value to recognise it in an error message.
std::string Shorten(const Json& value) {
  constexpr size_t kLimit = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kLimit) text = text.substr(0, kLimit) + "...";
  return text;
}

}  // namespace

const Json* ConfigFields::Find(const char* name) const {
  auto it = object_.find(name);
  if (it == object_.end() || it->is_null()) return nullptr;
  return &*it;
}

bool ConfigFields::Has(const char* name) const { return Find(name) != nullptr; }

void ConfigFields::Fail(const char* name, const std::string& expected) {
  const auto it = object_.find(name);
  Fail(name, expected, it == object_.end() ? "no such field" : Shorten(*it));
}

void ConfigFields::Fail(const char* name, const std::string& expected, const std::string& found) {
  if (!status_->ok()) return;
  *status_ =
      absl::InvalidArgumentError(absl::StrCat(file_, ": ", path_, name, ": expected ", expected, ", found ", found));
}

int64_t ConfigFields::Int(const char* name, int64_t min, int64_t max) {
  const Json* value = Find(name);
  const bool fits = value != nullptr && value->is_number_integer() &&
                    !(value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX));
  if (fits) {
    const int64_t number = value->get<int64_t>();
    if (number >= min && number <= max) return number;
  }
  Fail(name, absl::StrCat("an integer from ", min, " to ", max));
  return min;
}

int64_t ConfigFields::IntOr(const char* name, int64_t absent, int64_t min, int64_t max) {
  return Has(name) ? Int(name, min, max) : absent;
}

double ConfigFields::Number(const char* name, double min, double max) {
  const Json* value = Find(name);
  if (value != nullptr && value->is_number()) {
    const double number = value->get<double>();
    if (std::isfinite(number) && number >= min && number <= max) return number;
  }
  Fail(name, absl::StrCat("a number from ", min, " to ", max));
  return min;
}

double ConfigFields::NumberOr(const char* name, double absent, double min, double max) {
  return Has(name) ? Number(name, min, max) : absent;
}

bool ConfigFields::BoolOr(const char* name, bool absent) {
  const Json* value = Find(name);
  if (value == nullptr) return absent;
  if (value->is_boolean()) return value->get<bool>();
  Fail(name, "true or false");
  return absent;
}

std::string ConfigFields::String(const char* name) {
  const Json* value = Find(name);
  if (value != nullptr && value->is_string()) return value->get<std::string>();
  Fail(name, "a string");
  return "";
}

std::string ConfigFields::StringOr(const char* name, std::string absent) {
  return Has(name) ? String(name) : std::move(absent);
}

std::vector<int64_t> ConfigFields::Ints(const char* name, int64_t min, int64_t max) {
  std::vector<int64_t> numbers;
  const Json* value = Find(name);
  if (value == nullptr || !value->is_array()) {
    Fail(name, "a list of integers");
    return numbers;
  }
  for (const Json& entry : *value) {
    if (!entry.is_number_integer() ||
        (entry.is_number_unsigned() && entry.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) ||
        entry.get<int64_t>() < min || entry.get<int64_t>() > max) {
      Fail(name, absl::StrCat("integers from ", min, " to ", max), absl::StrCat("the entry ", Shorten(entry)));
      return {};
    }
    numbers.push_back(entry.get<int64_t>());
  }
  return numbers;
}

std::vector<int64_t> ConfigFields::IntOrInts(const char* name, int64_t min, int64_t max) {
  const Json* value = Find(name);
  if (value == nullptr) return {};
  if (value->is_array()) return Ints(name, min, max);
  return {Int(name, min, max)};
}

std::vector<std::string> ConfigFields::Others(std::span<const char* const> known) const {
  std::vector<std::string> others;
  for (const auto& [name, value] : object_.items()) {
    if (value.is_null()) continue;
    if (std::find(known.begin(), known.end(), name) == known.end()) others.push_back(name);
  }
  return others;
}

const Json& ConfigFields::Object(const char* name) {
  static const Json kEmpty = Json::object();
  const Json* value = Find(name);
  if (value != nullptr && value->is_object()) return *value;
  Fail(name, "an object");
  return kEmpty;
}

}  // namespace k3
