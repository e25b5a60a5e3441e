#include "server/commands/plan.h"

#include <filesystem>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/exit_codes.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

struct PlanRun {
  std::ostringstream out, err;
  int code;
  explicit PlanRun(const std::vector<std::string>& args) : code(RunPlan(args, out, err)) {}
  Json json() const { return Json::parse(out.str()); }
};

std::string Model(const std::string& name) { return testing::SourcePath("configs/models/" + name); }

TEST(PlanTest, KimiK3FromItsConfigAlone) {
  const PlanRun run({Model("kimi-k3"), "--tensor-parallel-size", "8", "--data-parallel-size", "2", "--gpu-memory-gib",
                     "139", "--json"});
  ASSERT_EQ(run.code, kExitOk) << run.err.str();
  const Json json = run.json();
  EXPECT_EQ(json["sizes_from"], "config");
  EXPECT_EQ(json["model_bytes"], 1560860324864 - 894717952);
  EXPECT_EQ(json["expert_bytes"], 17547264);
  EXPECT_EQ(json["per_rank"]["expert_weights_bytes"], 1446456066048 / 16);
  ASSERT_EQ(json["sequences"].size(), 3u);
  EXPECT_EQ(json["sequences"][0]["context"], 8192);
  EXPECT_GT(json["sequences"][0]["count"], json["sequences"][1]["count"]);
  EXPECT_TRUE(json["fits"]);
}

TEST(PlanTest, TableShowsEveryPart) {
  const PlanRun run({Model("kimi-linear-48b"), "--gpu-memory-gib", "139"});
  ASSERT_EQ(run.code, kExitOk) << run.err.str();
  EXPECT_THAT(run.out.str(), AllOf(HasSubstr("98.25 GB in all"), HasSubstr("workspace"), HasSubstr("residual bank"),
                                   HasSubstr("state pool"), HasSubstr("page pool"), HasSubstr("8192 tokens"),
                                   HasSubstr("131072 tokens"), HasSubstr("1048576 tokens")));
}

TEST(PlanTest, DoesNotFitIsExitThreeWithNumbers) {
  const PlanRun run({Model("kimi-k3"), "--gpu-memory-gib", "139", "--json"});
  EXPECT_EQ(run.code, kExitDoesNotFit);
  EXPECT_THAT(run.err.str(), AllOf(HasSubstr("does not fit"), HasSubstr("139.00 GiB"), HasSubstr("weights (")));
  EXPECT_FALSE(run.json()["fits"]);
  const PlanRun longest({Model("kimi-linear-48b"), "--gpu-memory-gib", "105", "--max-model-len", "1048576"});
  EXPECT_EQ(longest.code, kExitDoesNotFit);
  EXPECT_THAT(longest.err.str(), HasSubstr("one sequence of 1048576 tokens"));
}

TEST(PlanTest, TinyK3OnTheCpuReadsHeaders) {
  const PlanRun run({Model("tiny-k3"), "--device", "cpu", "--json", "--cpu-memory-gib", "0.5"});
  ASSERT_EQ(run.code, kExitOk) << run.err.str();
  const Json json = run.json();
  EXPECT_EQ(json["sizes_from"], "headers");
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["model_bytes"], 22733440);
  EXPECT_FALSE(json["per_rank"]["workspace_estimated"]);
}

TEST(PlanTest, WrongUse) {
  EXPECT_EQ(PlanRun({}).code, kExitUsage);
  EXPECT_EQ(PlanRun({"a", "b"}).code, kExitUsage);
  const PlanRun unknown({Model("tiny-k3"), "--max-num-seq", "3"});
  EXPECT_EQ(unknown.code, kExitUsage);
  EXPECT_THAT(unknown.err.str(), HasSubstr("max-num-seqs"));
  const PlanRun uneven({Model("kimi-linear-48b"), "--tensor-parallel-size", "7"});
  EXPECT_EQ(uneven.code, kExitUsage);
  EXPECT_THAT(uneven.err.str(), HasSubstr("does not divide"));
  const PlanRun help({"--help"});
  EXPECT_EQ(help.code, kExitOk);
  EXPECT_THAT(help.out.str(), HasSubstr("--gpu-memory-gib"));
}

TEST(PlanTest, BadModels) {
  const testing::TempDir dir;
  const PlanRun empty({dir.path()});
  EXPECT_EQ(empty.code, kExitBadCheckpoint);
  EXPECT_THAT(empty.err.str(), HasSubstr("config.json"));
  testing::TestCheckpoint content(testing::SmallK3Config());
  content.Remove("language_model.model.norm.weight");
  content.Write(dir.path());
  const PlanRun missing({dir.path()});
  EXPECT_EQ(missing.code, kExitBadCheckpoint);
  EXPECT_THAT(missing.err.str(), HasSubstr("language_model.model.norm.weight"));
  // Without the weights the same configuration can be planned.
  std::filesystem::remove(dir.File("model.safetensors"));
  EXPECT_EQ(PlanRun({dir.path(), "--gpu-memory-gib", "1"}).code, kExitOk);
  // So it can beside an index of which no file is there; once one is, all must be.
  testing::TestCheckpoint whole(testing::SmallK3Config());
  whole.Write(dir.path(), 3);
  EXPECT_EQ(PlanRun({dir.path(), "--gpu-memory-gib", "1"}).code, kExitOk);
  std::filesystem::remove(dir.File(testing::ShardName(1, 3)));
  EXPECT_EQ(PlanRun({dir.path(), "--gpu-memory-gib", "1"}).code, kExitBadCheckpoint);
  std::filesystem::remove(dir.File(testing::ShardName(0, 3)));
  std::filesystem::remove(dir.File(testing::ShardName(2, 3)));
  EXPECT_EQ(PlanRun({dir.path(), "--gpu-memory-gib", "1"}).code, kExitOk);
}

}  // namespace
}  // namespace k3
