#include "kernels/attn_res_form.h"

namespace k3 {
namespace {

constexpr int64_t kMeasuredCols = 7168;
constexpr int32_t kMostClosed = 8;  // of the fast kernel

constexpr AttnResFormEntry kTable[] = {{6, 256, 8}, {8, 128, 6}};

}  // namespace

std::span<const AttnResFormEntry> AttnResFormTable() { return kTable; }

AttnResForm MeasuredAttnResForm(int64_t rows, int64_t cols, int32_t closed, int32_t sites) {
  if (closed > kMostClosed || cols > kMeasuredCols || 2 * cols <= kMeasuredCols) return AttnResForm::kOnePass;
  AttnResForm form = AttnResForm::kOnePass;
  for (const AttnResFormEntry& entry : kTable) {
    if (closed < entry.closed) break;
    const bool enough = rows * cols >= entry.least_rows * kMeasuredCols && sites >= entry.least_sites;
    form = enough ? AttnResForm::kTwoPhases : AttnResForm::kOnePass;
  }
  return form;
}

std::string AttnResFormText() {
  std::string text;
  int32_t from = 1;
  std::string form = "one pass";
  const auto line = [&](int32_t to) {
    if (to < from) return;
    text += (text.empty() ? "" : "; ") + std::to_string(from) + (to > from ? " to " + std::to_string(to) : "") +
            " closed blocks: " + form;
  };
  for (const AttnResFormEntry& entry : kTable) {
    line(entry.closed - 1);
    from = entry.closed;
    form = "two phases from " + std::to_string(entry.least_rows) + " rows and " + std::to_string(entry.least_sites) +
           " sites on";
  }
  line(kMostClosed);
  return text;
}

}  // namespace k3
