#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "server/metrics.h"
#include "server/server_config.h"
#include "tests/testing/paths.h"
#include "tests/testing/prometheus_text.h"

// Files that only a deployment reads, against the code that they speak of.
namespace k3 {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

const char* NoEnvironment(const char*) { return nullptr; }

std::set<std::string> OfferedSamples() {
  Metrics metrics(Metrics::Options{"v", "c", "m", /*vllm_aliases=*/true});
  EngineLoad load;
  load.routing.updates = 1;
  load.routing.layer_groups = 1;
  metrics.WatchEngine([&load] { return load; }, EngineLimits());
  metrics.WatchCollectives([] { return CollectiveTotals(); });
  const auto page = testing::PrometheusText::Parse(metrics.Render());
  EXPECT_TRUE(page.ok()) << page.status();
  std::set<std::string> names;
  if (!page.ok()) return names;
  for (const auto& [name, family] : page->families()) {
    for (const auto& [sample, values] : family.samples) names.insert(sample);
  }
  return names;
}

TEST(DeployFilesTest, DashboardQueriesOnlyMetricsThatExist) {
  const auto dashboard = nlohmann::json::parse(ReadFile(testing::SourcePath("docker/grafana/k3serve.json")));
  const std::set<std::string> offered = OfferedSamples();
  const std::regex metric("(k3serve|process|vllm)[_:][a-z0-9_]+");
  std::set<std::string> queried;
  for (const auto& panel : dashboard.at("panels")) {
    if (panel.at("type") == "row") continue;
    EXPECT_FALSE(panel.at("targets").empty()) << panel.at("title");
    for (const auto& target : panel["targets"]) {
      const std::string expr = target.at("expr");
      const auto begin = std::sregex_iterator(expr.begin(), expr.end(), metric);
      EXPECT_NE(begin, std::sregex_iterator()) << "no metric in " << expr;
      for (auto it = begin; it != std::sregex_iterator(); ++it) {
        queried.insert(it->str());
        EXPECT_EQ(offered.count(it->str()), 1u) << it->str() << " in panel " << panel["title"];
      }
    }
  }
  EXPECT_GE(queried.size(), 30u);
}

TEST(DeployFilesTest, DashboardPanelsDoNotOverlap) {
  const auto dashboard = nlohmann::json::parse(ReadFile(testing::SourcePath("docker/grafana/k3serve.json")));
  std::set<std::pair<int, int>> taken;
  std::set<int> ids;
  for (const auto& panel : dashboard.at("panels")) {
    EXPECT_TRUE(ids.insert(panel.at("id").get<int>()).second) << panel["title"];
    const auto& grid = panel.at("gridPos");
    EXPECT_LE(grid.at("x").get<int>() + grid.at("w").get<int>(), 24);
    for (int y = 0; y < grid["h"]; ++y) {
      for (int x = 0; x < grid["w"]; ++x) {
        EXPECT_TRUE(taken.emplace(grid["x"].get<int>() + x, grid["y"].get<int>() + y).second) << panel["title"];
      }
    }
  }
}

TEST(DeployFilesTest, TheEndpointPickerAsksForMetricsThatExist) {
  const std::string picker = ReadFile(testing::SourcePath("docker/kubernetes-gateway/endpoint-picker.yaml"));
  const std::set<std::string> offered = OfferedSamples();
  const std::regex argument("--[a-z-]+-metric=([^\n]*)");
  int asked = 0;
  for (auto it = std::sregex_iterator(picker.begin(), picker.end(), argument); it != std::sregex_iterator(); ++it) {
    if ((*it)[1].length() == 0) continue;
    ++asked;
    EXPECT_EQ(offered.count((*it)[1]), 1u) << it->str();
  }
  EXPECT_EQ(asked, 4);
}

TEST(DeployFilesTest, EveryShippedConfigurationIsAccepted) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::SourcePath("configs/server"))) {
    ASSERT_EQ(entry.path().extension(), ".toml");
    ++files;
    const auto parsed = ParseServerCommandLine({"/model", "--config", entry.path().string()}, NoEnvironment);
    EXPECT_TRUE(parsed.ok()) << entry.path() << ": " << parsed.status();
  }
  EXPECT_GE(files, 3);
}

TEST(DeployFilesTest, MultiNodeArgumentsAreAccepted) {
  const std::string text = ReadFile(testing::SourcePath("docker/kubernetes-multi-node/leaderworkerset.yaml"));
  const std::regex argument("\n +- (--[^\n]+)");
  for (const size_t begin : {text.find("leaderTemplate:"), text.find("workerTemplate:")}) {
    ASSERT_NE(begin, std::string::npos);
    const std::string part = text.substr(begin, text.find("volumeMounts:", begin) - begin);
    std::vector<std::string> args = {"/model"};
    for (auto it = std::sregex_iterator(part.begin(), part.end(), argument); it != std::sregex_iterator(); ++it) {
      args.push_back((*it)[1]);
    }
    const auto parsed = ParseServerCommandLine(args, NoEnvironment);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->config.tensor_parallel_size, 8);
    EXPECT_EQ(parsed->config.data_parallel_size, 2);
  }
}

TEST(DeployFilesTest, KubernetesArgumentsAndConfigMapAreAccepted) {
  const std::string config_map = ReadFile(testing::SourcePath("docker/kubernetes/configmap.yaml"));
  const std::string key = "  server.toml: |\n";
  const size_t begin = config_map.find(key);
  ASSERT_NE(begin, std::string::npos);
  const std::string toml = ::testing::TempDir() + "/deploy_files_test.toml";
  std::ofstream(toml) << std::regex_replace(config_map.substr(begin + key.size()), std::regex("(^|\n)    "), "$1");

  const std::string deployment = ReadFile(testing::SourcePath("docker/kubernetes/deployment.yaml"));
  std::vector<std::string> args = {"/model"};
  const std::regex argument("\n +- (--[^\n]+)");
  for (auto it = std::sregex_iterator(deployment.begin(), deployment.end(), argument); it != std::sregex_iterator();
       ++it) {
    const std::string word = (*it)[1];
    args.push_back(word.rfind("--config=", 0) == 0 ? "--config=" + toml : word);
  }
  EXPECT_GE(args.size(), 4u);
  const auto parsed = ParseServerCommandLine(args, NoEnvironment);
  std::filesystem::remove(toml);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.metrics_compat, "vllm");
  EXPECT_EQ(parsed->config.device, "cuda");

  std::smatch grace;
  ASSERT_TRUE(std::regex_search(deployment, grace, std::regex("terminationGracePeriodSeconds: ([0-9]+)")));
  EXPECT_GT(std::stod(grace[1]), parsed->config.drain_lag_seconds + parsed->config.shutdown_timeout_seconds)
      << "the pod would be killed before it has drained";
}

}  // namespace
}  // namespace k3
