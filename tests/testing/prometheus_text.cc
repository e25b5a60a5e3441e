#include "tests/testing/prometheus_text.h"

#include <cmath>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace k3::testing {
namespace {

absl::Status Bad(std::string_view line, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(std::string(why), ": ", std::string(line)));
}

// Takes a name of [a-zA-Z_:][a-zA-Z0-9_:]* off the front; labels have no colons.
std::string TakeName(std::string_view* text, bool colons) {
  size_t n = 0;
  while (n < text->size()) {
    const auto c = static_cast<unsigned char>((*text)[n]);
    if (!(absl::ascii_isalpha(c) || c == '_' || (colons && c == ':') || (n > 0 && absl::ascii_isdigit(c)))) break;
    ++n;
  }
  std::string name(text->substr(0, n));
  text->remove_prefix(n);
  return name;
}

absl::StatusOr<PrometheusLabels> TakeLabels(std::string_view* text, std::string_view line) {
  PrometheusLabels labels;
  if (text->empty() || text->front() != '{') return labels;
  text->remove_prefix(1);
  while (!text->empty() && text->front() != '}') {
    const std::string name = TakeName(text, false);
    if (name.empty()) return Bad(line, "bad label name");
    if (text->substr(0, 2) != "=\"") return Bad(line, "label without =\"");
    text->remove_prefix(2);
    std::string value;
    while (!text->empty() && text->front() != '"') {
      if (text->front() == '\\') {
        if (text->size() < 2) return Bad(line, "cut escape");
        const char escaped = (*text)[1];
        if (escaped != '\\' && escaped != '"' && escaped != 'n') return Bad(line, "unknown escape");
        value += escaped == 'n' ? '\n' : escaped;
        text->remove_prefix(2);
      } else {
        value += text->front();
        text->remove_prefix(1);
      }
    }
    if (text->empty()) return Bad(line, "label value does not end");
    text->remove_prefix(1);
    if (!labels.emplace(name, value).second) return Bad(line, "label given twice");
    if (!text->empty() && text->front() == ',') text->remove_prefix(1);
  }
  if (text->empty()) return Bad(line, "labels do not end");
  text->remove_prefix(1);
  return labels;
}

bool ParseValue(std::string_view word, double* value) {
  if (word == "+Inf") {
    *value = std::numeric_limits<double>::infinity();
    return true;
  }
  if (word == "NaN" || word == "Nan") {
    *value = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  return absl::SimpleAtod(absl::string_view(word.data(), word.size()), value) && std::isfinite(*value);
}

absl::Status CheckHistogram(const std::string& name, const PrometheusFamily& family) {
  const auto buckets = family.samples.find(name + "_bucket");
  const auto counts = family.samples.find(name + "_count");
  const auto sums = family.samples.find(name + "_sum");
  if (buckets == family.samples.end() || counts == family.samples.end() || sums == family.samples.end()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " lacks _bucket, _sum or _count"));
  }
  std::map<PrometheusLabels, std::map<double, double>> series;  // le -> count
  for (const auto& [labels, value] : buckets->second) {
    PrometheusLabels rest = labels;
    double bound = 0;
    if (rest.count("le") == 0 || !ParseValue(rest["le"], &bound)) {
      return absl::InvalidArgumentError(absl::StrCat(name, " has a bucket without a bound"));
    }
    rest.erase("le");
    series[rest][bound] = value;
  }
  for (const auto& [labels, bounds] : series) {
    double last = 0;
    for (const auto& [bound, value] : bounds) {
      if (value < last) return absl::InvalidArgumentError(absl::StrCat(name, " has buckets that fall"));
      last = value;
    }
    const auto count = counts->second.find(labels);
    if (!std::isinf(bounds.rbegin()->first) || count == counts->second.end() || count->second != last) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": the +Inf bucket and _count differ"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PrometheusText> PrometheusText::Parse(std::string_view text) {
  PrometheusText page;
  if (text.empty() || text.back() != '\n') return absl::InvalidArgumentError("the page does not end with a newline");
  std::string current;
  const std::vector<std::string> lines = absl::StrSplit(absl::string_view(text.data(), text.size() - 1), '\n');
  for (const std::string& line : lines) {
    std::string_view rest(line);
    if (rest.empty()) continue;
    const bool is_help = absl::StartsWith(line, "# HELP ");
    if (is_help || absl::StartsWith(line, "# TYPE ")) {
      rest.remove_prefix(7);
      const std::string name = TakeName(&rest, true);
      if (name.empty() || rest.empty() || rest.front() != ' ') return Bad(line, "bad declaration");
      rest.remove_prefix(1);
      if (name != current) {
        if (page.families_.count(name) > 0) return Bad(line, "family declared twice");
        current = name;
      }
      PrometheusFamily& family = page.families_[name];
      std::string& field = is_help ? family.help : family.type;
      if (!field.empty() || !family.samples.empty()) return Bad(line, "declaration out of place");
      field = std::string(rest);
      if (!is_help && field != "counter" && field != "gauge" && field != "histogram" && field != "summary") {
        return Bad(line, "unknown type");
      }
      continue;
    }
    if (line[0] == '#') continue;
    const std::string name = TakeName(&rest, true);
    if (name.empty()) return Bad(line, "bad sample name");
    absl::StatusOr<PrometheusLabels> labels = TakeLabels(&rest, line);
    if (!labels.ok()) return labels.status();
    if (rest.empty() || rest.front() != ' ') return Bad(line, "no space before the value");
    double value = 0;
    if (!ParseValue(rest.substr(1), &value)) return Bad(line, "bad value");
    const auto it = page.families_.find(current);
    if (it == page.families_.end() || it->second.type.empty()) return Bad(line, "sample before its type");
    PrometheusFamily& family = it->second;
    std::set<std::string> allowed = {current};
    if (family.type == "histogram") allowed = {current + "_bucket", current + "_sum", current + "_count"};
    if (allowed.count(name) == 0) return Bad(line, absl::StrCat("sample outside of its family ", current));
    if (family.type == "counter" && !(value >= 0)) return Bad(line, "negative counter");
    if (!family.samples[name].emplace(*std::move(labels), value).second) return Bad(line, "sample given twice");
  }
  for (const auto& [name, family] : page.families_) {
    if (family.samples.empty()) return absl::InvalidArgumentError(absl::StrCat(name, " has no samples"));
    if (family.type == "histogram") {
      const absl::Status status = CheckHistogram(name, family);
      if (!status.ok()) return status;
    }
  }
  return page;
}

double PrometheusText::Value(const std::string& sample, const PrometheusLabels& labels) const {
  for (const auto& [name, family] : families_) {
    const auto it = family.samples.find(sample);
    if (it == family.samples.end()) continue;
    const auto value = it->second.find(labels);
    if (value != it->second.end()) return value->second;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

double PrometheusText::Sum(const std::string& sample) const {
  double sum = 0;
  for (const auto& [name, family] : families_) {
    const auto it = family.samples.find(sample);
    if (it == family.samples.end()) continue;
    for (const auto& [labels, value] : it->second) sum += value;
  }
  return sum;
}

}  // namespace k3::testing
