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

// K3 on sixteen H200s, by hand from config.json: D 7168, 93 layers of which 69 KDA and 24 MLA, 92 with experts, 96
// heads of 128 (12,288 channels), BF16 unless said otherwise. Steps of 8192 tokens, pages of 64.
//
// Weights. Experts: 92 x 896 / 16 of 17,547,264 bytes. Embedding and head: 2 x 163,840 x 7168 x 2 over the group.
// Cut over the group, bytes:
//   KDA   q, k, v, g, o 5 x 12,288 x 7168, f_b 12,288 x 128, b 96 x 7168        442,662,912 x 2   = 885,325,824
//         F32: taps 3 x 12,288 x 4, dt_bias 12,288, A_log 128                   159,872 x 4       =     639,488
//   MLA   q_b 18,432 x 1536, kv_b 24,576 x 512, g and o 2 x 12,288 x 7168       217,055,232 x 2   = 434,110,464
//   MoE   up 7168 x 3584, shared 3 x 6144 x 7168                                157,810,688 x 2   = 315,621,376
//   dense 3 x 33,792 x 7168                                                     726,663,168 x 2   = 1,453,326,336
//   69 x 885,965,312 + 24 x 434,110,464 + 92 x 315,621,376 + 1,453,326,336                        = 102,040,750,592
// On every rank:
//   KDA   f_a 128 x 7168 x 2 + o_norm 128 x 4                                                     =   1,835,520
//   MLA   q_a 1536 x 7168, kv_a 576 x 7168, norms 1536 + 512                    15,140,864 x 2    =  30,281,728
//   MoE   router 896 x 7168, down 3584 x 7168, norm 3584 (x 2), bias 896 x 4                      =  64,236,032
//   norms 6 x 7168 x 2 a layer, 3 x 7168 x 2 at the end
//   69 x 1,835,520 + 24 x 30,281,728 + 92 x 64,236,032 + 93 x 86,016 + 43,008                     = 6,771,169,792
//
// State slot: 69 x (96 x 128 x 128 x 4 + 3 x 12,288 x 3 x 2) over the group. Page: 24 x 64 x 576 x 2 = 1,769,472.
// Bank: 9 blocks (8 closed, 1 live) x 8192 / tensor x 7168 x 2.
//
// Workspace of TP8 x DP2, 12 heads a rank, 128 sequences and logits rows:
//   hidden, sublayer output 2 x 8192 x 7168 x 2; sums of the rank's tokens 1024 x 7168 x 2              249,561,088
//   merged products 8192 x 8448 (the dense MLP's) x 2, its activation 8192 x 4224 x 2                   207,618,048
//   decay, attention output 2 x 8192 x 1536 x 2; q latent 8192 x 1536 x 2, q 8192 x 2304 x 2            113,246,208
//   latent in and out 2 x 8192 x 3584 x 2, router 8192 x 896 x 4, ids and weights 2 x 8192 x 16 x 4     147,849,216
//   both groups' latents in and out 2 x 16,384 x 3584 x 2, ids and weights 2 x 16,384 x 16 x 4          236,978,176
//   mixes of the residual bank for 8 sites 8 x 1024 x (7168 x 2 + 16)                                   117,571,584
//   head 128 x 7168 x 2, logits and gathered logits 2 x 128 x 163,840 x 4                               169,607,168
//   scratch: 16,384 x 16 picks, an eighth of them here, of 6 x 3584 + 4 x 3072 bytes                  1,107,296,256
//   staging for 8192 + 128 x 128 = 24,576 rows: in 8192 x 16 + 128 x (16,384 x 4 + 256) + rows x 60 + 64 Ki, and edits
//     and a mask of one row 4 x 163,840 x 20 + 163,840 / 8; out rows x 172 + 4 Ki;
//     decode 128 x 256 + 128 x 16,384 x 4 + 4 Mi, its table 128 x 16,384 x 4                             48,455,680
TEST(PlanTest, KimiK3OnSixteenH200s) {
  struct Golden {
    int tensor, data;
    int64_t weights, state_slot, workspace, bank;
    int64_t live, snapshots, pages, fit_8k, fit_128k;
    std::vector<std::string> rows;
  };
  const int64_t experts = int64_t{92} * 896 * 17547264 / 16;
  const Golden goldens[] = {
      {8,
       2,
       experts + 4697620480 / 8 + 102040750592 / 8 + 6771169792,
       69 * (6291456 + 221184) / 8,
       2398183424,
       int64_t{9} * 1024 * 7168 * 2,
       // Pools: 134,325,102,182 - 110,516,970,304 - 2,398,183,424 - 132,120,576 = 21,277,827,878 bytes. 40 % hold 151
       // slots, 128 sequences need no more; 15 % 56 snapshots; 10,942,268,198 are left, 6183 pages: 48 sequences of
       // 128 pages or 3 of 2048 in each of two groups.
       128,
       56,
       6183,
       96,
       6,
       {"weights", "102.93 GiB", "84.19 GiB", "560.000 MiB", "2.23 GiB   steps of at most 8192 tokens", "0.12 GiB",
        "128 live + 56 snapshot slots of 53.569 MiB", "6183 pages of 64 tokens, 1.688 MiB each", "of 125.10 GiB"}},
      // 6 heads a rank, 256 sequences, one group: no gathered tokens, half of the widths, twice the logits:
      //   242,221,056 + 103,809,024 + 69,206,016 + 147,849,216 + 339,214,336 + scratch 553,648,128 + staging
      //   77,488,128 + mixes of the bank 58,785,792.
      {16,
       1,
       experts + 4697620480 / 16 + 102040750592 / 16 + 6771169792,
       69 * (6291456 + 221184) / 16,
       1592221696,
       int64_t{9} * 512 * 7168 * 2,
       // 28,820,998,086 for pools: 256 slots, 153 snapshots, 17,333,922,246 bytes of pages: 76 x 128 or 4 x 2048.
       256,
       153,
       9796,
       76,
       4,
       {"96.71 GiB", "84.19 GiB", "280.000 MiB", "1.48 GiB   steps of at most 8192 tokens", "0.06 GiB",
        "256 live + 153 snapshot slots of 26.785 MiB", "9796 pages of 64 tokens, 1.688 MiB each", "of 125.10 GiB"}}};
  for (const Golden& golden : goldens) {
    SCOPED_TRACE(std::to_string(golden.tensor) + "x" + std::to_string(golden.data));
    std::vector<std::string> args = {Model("kimi-k3"),
                                     "--tensor-parallel-size",
                                     std::to_string(golden.tensor),
                                     "--data-parallel-size",
                                     std::to_string(golden.data),
                                     "--gpu-memory-gib",
                                     "139"};
    const PlanRun table(args);
    ASSERT_EQ(table.code, kExitOk) << table.err.str();
    args.push_back("--json");
    const PlanRun run(args);
    const Json json = run.json(), rank = json["per_rank"];
    EXPECT_EQ(rank["weights_bytes"], golden.weights);
    EXPECT_EQ(rank["state_slot_bytes"], golden.state_slot);
    EXPECT_EQ(rank["page_bytes"], 1769472);
    EXPECT_EQ(rank["residual_bank_bytes"], golden.bank);
    EXPECT_EQ(rank["closed_mix_bytes"], int64_t{8} * (golden.bank / (9 * 7168 * 2)) * (7168 * 2 + 16));
    EXPECT_THAT(table.out.str(), HasSubstr(AttnResFormText()));
    EXPECT_EQ(rank["budget_bytes"], 134325102182);
    // What follows holds where there is no device to ask for the size of its kernels' scratch memory.
    if (!rank["workspace_estimated"]) continue;
    EXPECT_EQ(rank["workspace_bytes"], golden.workspace);
    EXPECT_EQ(rank["state_slots"], golden.live);
    EXPECT_EQ(rank["snapshot_slots"], golden.snapshots);
    EXPECT_EQ(rank["latent_pages"], golden.pages);
    EXPECT_EQ(json["sequences"][0]["count"], golden.fit_8k);
    EXPECT_EQ(json["sequences"][1]["count"], golden.fit_128k);
    EXPECT_EQ(json["sequences"][2]["count"], 0);
    for (const std::string& row : golden.rows) EXPECT_THAT(table.out.str(), HasSubstr(row));
  }
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
