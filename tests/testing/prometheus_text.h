#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace k3::testing {

using PrometheusLabels = std::map<std::string, std::string>;

struct PrometheusFamily {
  std::string type;
  std::string help;
  // Sample name (with _bucket, _sum, _count) -> labels -> value.
  std::map<std::string, std::map<PrometheusLabels, double>> samples;
};

// A page of the text format 0.0.4, read strictly: names and labels are well-formed, a family is declared once and its
// samples follow it, no sample repeats, counters are not negative, and the buckets of every histogram are cumulative,
// end at +Inf and agree with _count.
class PrometheusText {
 public:
  static absl::StatusOr<PrometheusText> Parse(std::string_view text);

  const std::map<std::string, PrometheusFamily>& families() const { return families_; }
  // The value of a sample; NaN when it is not there.
  double Value(const std::string& sample, const PrometheusLabels& labels = {}) const;
  // The sum over all labels; 0 when there is none.
  double Sum(const std::string& sample) const;

 private:
  std::map<std::string, PrometheusFamily> families_;
};

}  // namespace k3::testing
