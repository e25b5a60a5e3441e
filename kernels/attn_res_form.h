#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace k3 {

// Attention residuals either read all sources at every site, or the closed blocks once for several sites (op_params.h).
enum class AttnResForm : uint8_t { kOnePass, kTwoPhases };

// With `closed` or more closed blocks, up to the next entry's, two phases are faster from `least_rows` rows and
// `least_sites` sites on.
struct AttnResFormEntry {
  int32_t closed;
  int64_t least_rows;
  int32_t least_sites;
};

// From times in bf16 on an H200 with D = 7168 (kernels/README.md; cuda_bench --only attn_res_sites measures both
// forms). Ascending in `closed`.
std::span<const AttnResFormEntry> AttnResFormTable();

// What the table says; rows count by their width. One pass where nothing was measured: rows of at most half that width,
// or more columns or closed blocks than the fast kernel takes. Never one pass for more rows, or more sites, where fewer
// take two phases.
AttnResForm MeasuredAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites);

// The table as one line of text, without a newline.
std::string AttnResFormText();

}  // namespace k3
