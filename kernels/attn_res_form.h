#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace k3 {

// Attention residuals either read all sources at every site, or the closed blocks once for several sites (op_params.h).
enum class AttnResForm : uint8_t { kOnePass, kTwoPhases };

// Two phases are faster with `closed` or more closed blocks (up to the next entry's) from `least_rows` rows on.
struct AttnResFormEntry {
  int32_t closed;
  int64_t least_rows;
};

// Measured on an H200 with D = 7168 and eight sites of one closed set, in bf16; ascending in `closed`.
std::span<const AttnResFormEntry> AttnResFormTable();

// What the table says. Wider sums of fewer rows move the same bytes, so rows count by their width; fewer sites than
// kAttnResFormSites, closed blocks beyond what the fast kernel takes, and narrow rows are not worth a first phase.
// Never one pass for more rows where fewer take two phases.
AttnResForm MeasuredAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites);
constexpr int32_t kAttnResFormSites = 6;

// The table as one line of text, without a newline.
std::string AttnResFormText();

}  // namespace k3
