#include "server/commands/bench_plot.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace k3 {
namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 720;
constexpr double kPanelWidth = 380;
constexpr double kPanelHeight = 230;
constexpr double kLogFrom = 30;  // a spread above this is drawn on a log axis

struct Line {
  std::string name;
  std::string color;
  std::vector<std::pair<double, double>> points;  // by ascending x
};

struct Panel {
  std::string title;
  std::string unit;
  double left = 0;
  double top = 0;
  std::vector<Line> lines;
};

std::string Number(double value) { return absl::StrFormat("%g", value); }

// One axis: maps [low, high] to [0, 1].
struct Axis {
  double low = 0;
  double high = 1;
  bool log = false;
  std::vector<double> ticks;

  double operator()(double value) const {
    return log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }
};

Axis MakeAxis(const std::vector<double>& values, bool may_be_log) {
  Axis axis;
  if (values.empty()) {
    axis.ticks = LinearTicks(axis.low, axis.high, 5);
    return axis;
  }
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  axis.log = may_be_log && *least > 0 && *most > kLogFrom * *least;
  if (axis.log) {
    axis.ticks = LogTicks(*least, *most);
    axis.low = axis.ticks.front();
  } else {
    axis.ticks = LinearTicks(0, *most > 0 ? *most : 1, 5);
  }
  axis.high = axis.ticks.back();
  return axis;
}

void DrawPanel(const Panel& panel, const std::string& x_name, std::string* svg) {
  std::vector<double> xs;
  std::vector<double> ys;
  for (const Line& line : panel.lines) {
    for (const auto& [x, y] : line.points) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  const Axis x_axis = MakeAxis(xs, false);
  const Axis y_axis = MakeAxis(ys, true);
  const auto px = [&](double x) { return panel.left + kPanelWidth * x_axis(x); };
  const auto py = [&](double y) { return panel.top + kPanelHeight * (1 - y_axis(y)); };
  const auto text = [svg](double x, double y, const char* anchor, const std::string& content, const char* extra = "") {
    absl::StrAppendFormat(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y, anchor, extra,
                          XmlText(content));
  };
  text(panel.left, panel.top - 10, "start", absl::StrCat(panel.title, " (", panel.unit, y_axis.log ? ", log" : "", ")"),
       " font-weight=\"bold\"");
  for (const double tick : y_axis.ticks) {
    absl::StrAppendFormat(svg, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", panel.left,
                          py(tick), panel.left + kPanelWidth, py(tick));
    text(panel.left - 6, py(tick) + 4, "end", Number(tick));
  }
  for (const double tick : x_axis.ticks) text(px(tick), panel.top + kPanelHeight + 16, "middle", Number(tick));
  text(panel.left + kPanelWidth / 2, panel.top + kPanelHeight + 34, "middle", x_name);
  absl::StrAppendFormat(svg,
                        "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#888\"/>\n",
                        panel.left, panel.top, kPanelWidth, kPanelHeight);
  double legend = panel.left + kPanelWidth;
  for (auto line = panel.lines.rbegin(); line != panel.lines.rend(); ++line) {
    text(legend, panel.top - 10, "end", line->name, absl::StrCat(" fill=\"", line->color, "\"").c_str());
    legend -= 8.0 * static_cast<double>(line->name.size()) + 10;
    std::string points;
    for (const auto& [x, y] : line->points) {
      absl::StrAppendFormat(&points, "%s%.1f,%.1f", points.empty() ? "" : " ", px(x), py(y));
      absl::StrAppendFormat(svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", px(x), py(y), line->color);
    }
    absl::StrAppendFormat(svg, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\"/>\n", points,
                          line->color);
  }
}

double LoadOf(const BenchRun& run) {
  if (run.load.concurrency.has_value()) return static_cast<double>(*run.load.concurrency);
  if (run.load.rate.has_value() && std::isfinite(*run.load.rate)) return *run.load.rate;
  return run.summary.requests_per_second();  // all at once and traces: what was reached
}

}  // namespace

std::vector<double> LinearTicks(double low, double high, int count) {
  const double raw = (high - low) / count;
  const double decade = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * decade;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * decade >= raw * (1 - 1e-9)) {
      step = factor * decade;
      break;
    }
  }
  std::vector<double> ticks;
  const auto first = static_cast<int64_t>(std::floor(low / step + 1e-9));
  const auto last = static_cast<int64_t>(std::ceil(high / step - 1e-9));
  for (int64_t i = first; i <= last; ++i) ticks.push_back(static_cast<double>(i) * step);
  return ticks;
}

std::vector<double> LogTicks(double low, double high) {
  std::vector<double> ticks;
  for (int decade = static_cast<int>(std::floor(std::log10(low))); ticks.empty() || ticks.back() < high; ++decade) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10, decade);
      if (tick <= low) ticks.clear();
      ticks.push_back(tick);
      if (tick >= high) break;
    }
  }
  return ticks;
}

std::string XmlText(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) {
      out += '?';  // also every byte of UTF-8, which may be cut or broken
    } else {
      out += c;
    }
  }
  return out;
}

std::string BenchPlot(const std::string& title, const std::vector<BenchRun>& runs) {
  std::vector<const BenchRun*> sorted;
  for (const BenchRun& run : runs) sorted.push_back(&run);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const BenchRun* a, const BenchRun* b) { return LoadOf(*a) < LoadOf(*b); });
  const auto line = [&](const char* name, const char* color, const std::function<bool(const BenchSummary&)>& has,
                        const std::function<double(const BenchSummary&)>& value) {
    Line made{name, color, {}};
    for (const BenchRun* run : sorted) {
      if (has(run->summary)) made.points.emplace_back(LoadOf(*run), value(run->summary));
    }
    return made;
  };
  const auto latency = [&](const char* name, double left, double top, LatencySummary BenchSummary::*field) {
    const auto has = [field](const BenchSummary& s) { return (s.*field).count > 0; };
    Panel panel{name, "ms", left, top, {}};
    panel.lines.push_back(line("p50", "#1b7837", has, [field](const BenchSummary& s) { return (s.*field).p50; }));
    panel.lines.push_back(line("p90", "#2166ac", has, [field](const BenchSummary& s) { return (s.*field).p90; }));
    panel.lines.push_back(line("p99", "#b2182b", has, [field](const BenchSummary& s) { return (s.*field).p99; }));
    return panel;
  };
  const bool closed = !runs.empty() && runs[0].load.concurrency.has_value();
  const std::string x_name = closed ? "requests in flight" : "requests per second";
  Panel throughput{"Throughput", "output tokens/s", 560, 440, {}};
  throughput.lines.push_back(line(
      "", "#762a83", [](const BenchSummary&) { return true; },
      [](const BenchSummary& s) { return s.output_tokens_per_second(); }));

  std::string svg;
  absl::StrAppendFormat(&svg,
                        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
                        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g %g\" "
                        "font-family=\"sans-serif\" font-size=\"12\">\n"
                        "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
                        kWidth, kHeight, kWidth, kHeight);
  absl::StrAppendFormat(&svg, "<text x=\"%g\" y=\"28\" text-anchor=\"middle\" font-size=\"15\">%s</text>\n", kWidth / 2,
                        XmlText(title));
  DrawPanel(latency("Time to first token", 80, 80, &BenchSummary::ttft), x_name, &svg);
  DrawPanel(latency("Inter-token latency", 560, 80, &BenchSummary::itl), x_name, &svg);
  DrawPanel(latency("End to end", 80, 440, &BenchSummary::e2e), x_name, &svg);
  DrawPanel(throughput, x_name, &svg);
  svg += "</svg>\n";
  return svg;
}

}  // namespace k3
