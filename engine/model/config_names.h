#pragma once

#include <span>

namespace k3 {

// Names of config.json's fields whose meaning is settled: read into ModelConfig, or known to have no effect on the text
// model's computation, such as what the base class of transformers writes into every file.

// The outermost object: of K3 (`nested`), or of Kimi-Linear, which holds the text fields too.
std::span<const char* const> TopLevelFields(bool nested);
// The text model's object.
std::span<const char* const> TextFields();
std::span<const char* const> LinearAttentionFields();

}  // namespace k3
