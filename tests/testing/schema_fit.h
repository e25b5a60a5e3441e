#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace k3::testing {

using Json = nlohmann::json;

// Whether `value` fits `schema`, for the keywords that the tests' own schemas use; `root` resolves references.
bool Fits(const Json& value, const Json& schema, const Json& root);

// Whether some object in the text names a member twice.
bool NamesTwice(const std::string& text);

void ExpectFits(const std::string& text, const Json& schema);

}  // namespace k3::testing
