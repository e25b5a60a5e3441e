#pragma once

#include <string>

namespace k3 {

// A description of the HTTP routes as an OpenAPI 3.1 document.
std::string OpenApiDocument();

}  // namespace k3
