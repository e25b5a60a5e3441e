#include "server/commands/bench_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/property_tree/ptree.hpp>
#include <boost/property_tree/xml_parser.hpp>
#include <cmath>
#include <sstream>

namespace k3 {
namespace {

using boost::property_tree::ptree;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

BenchRun MakeRun(double rate, double latency) {
  BenchRun run;
  run.load.rate = rate;
  run.summary.completed = 10;
  run.summary.seconds = 2;
  run.summary.output_tokens = 100;
  run.summary.ttft = SummarizeLatency({latency, 2 * latency, 3 * latency});
  run.summary.itl = SummarizeLatency({latency / 10});
  run.summary.e2e = SummarizeLatency({5 * latency});
  return run;
}

// Throws when the text is not well-formed.
ptree Parse(const std::string& svg) {
  std::istringstream in(svg);
  ptree tree;
  boost::property_tree::read_xml(in, tree);
  return tree.get_child("svg");
}

int CountElements(const ptree& tree, const std::string& name) {
  int count = 0;
  for (const auto& [key, child] : tree) count += key == name ? 1 : 0;
  return count;
}

TEST(BenchPlotTest, IsWellFormedWithAPointPerRunAndLine) {
  const ptree svg = Parse(BenchPlot("a < b & \"c\" \x01\xff", {MakeRun(4, 30), MakeRun(1, 10), MakeRun(2, 15)}));
  EXPECT_EQ(svg.get<std::string>("<xmlattr>.xmlns"), "http://www.w3.org/2000/svg");
  EXPECT_EQ(CountElements(svg, "polyline"), 3 * 3 + 1);
  EXPECT_EQ(CountElements(svg, "circle"), 3 * 10);
  for (const auto& [key, child] : svg) {
    if (key != "circle") continue;
    const double x = child.get<double>("<xmlattr>.cx");
    const double y = child.get<double>("<xmlattr>.cy");
    EXPECT_TRUE(x >= 0 && x <= 960 && y >= 0 && y <= 720) << x << "," << y;
  }
}

TEST(BenchPlotTest, HigherLatencyIsHigherUp) {
  const ptree svg = Parse(BenchPlot("t", {MakeRun(1, 10), MakeRun(2, 20)}));
  for (const auto& [key, child] : svg) {
    if (key != "polyline") continue;
    // The first line drawn is TTFT's p99: left and low, then right and high.
    double x0 = 0, y0 = 0, x1 = 0, y1 = 0;
    ASSERT_EQ(std::sscanf(child.get<std::string>("<xmlattr>.points").c_str(), "%lf,%lf %lf,%lf", &x0, &y0, &x1, &y1),
              4);
    EXPECT_LT(x0, x1);
    EXPECT_GT(y0, y1);
    break;
  }
}

TEST(BenchPlotTest, OddRunsStillDraw) {
  BenchRun failed;
  failed.load.concurrency = 4;
  EXPECT_EQ(CountElements(Parse(BenchPlot("t", {failed})), "circle"), 1);  // a throughput of zero
  EXPECT_EQ(CountElements(Parse(BenchPlot("t", {})), "circle"), 0);
  const std::string spread = BenchPlot("t", {MakeRun(1, 1), MakeRun(2, 10000)});
  EXPECT_THAT(spread, HasSubstr("(ms, log)"));
  Parse(spread);
  Parse(BenchPlot("t", {MakeRun(HUGE_VAL, 5)}));
}

TEST(BenchPlotTest, TicksCoverTheRange) {
  EXPECT_THAT(LinearTicks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(LinearTicks(0, 11, 5), ElementsAre(0, 5, 10, 15));
  EXPECT_THAT(LogTicks(3, 70), ElementsAre(2, 5, 10, 20, 50, 100));
  EXPECT_THAT(LogTicks(1, 1.5), ElementsAre(1, 2));
}

}  // namespace
}  // namespace k3
