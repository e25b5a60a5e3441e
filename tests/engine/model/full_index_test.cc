// The full K3 checkpoint by its headers: 96 files with 497,220 tensors that exist as sparse files only.

#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/model/checkpoint.h"
#include "engine/model/json_cursor.h"
#include "engine/model/tensor_match.h"
#include "engine/model/tensor_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

constexpr int kShards = 96;
constexpr uint64_t kReleasedTensors = 497220;
constexpr uint64_t kReleasedBytes = 1560860324864;
constexpr uint64_t kVisionBytes =
    2 * (1024 * 3 * 14 * 14 + 64 * 64 * 1024 + 27 * (2 * 1024 + 4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024) + 1024 +
         4096 * 4096 + 7168 * 4096 + 7168);
constexpr uint64_t kMiB = 1 << 20;

// Sanitizers keep shadow memory and run several times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kMemoryLimit = 2000 * kMiB;
constexpr double kSecondsLimit = 30;
#else
constexpr uint64_t kMemoryLimit = 300 * kMiB;
constexpr double kSecondsLimit = 3;
#endif

// One shard to be: header entries and the size of the data behind them.
struct Shard {
  std::string header = "{";
  uint64_t bytes = 0;
};

// Shards and index in the released placement (spec 2.1): layer L in shard L + 1, then one for the rest of the language
// model, one for the projector, one for the vision tower.
class HeaderWriter {
 public:
  HeaderWriter() : shards_(kShards) {}

  void Add(int shard, const std::string& name, const char* dtype, size_t element_bytes,
           const std::vector<int64_t>& shape) {
    uint64_t bytes = element_bytes;
    for (int64_t dim : shape) bytes *= static_cast<uint64_t>(dim);
    Shard& out = shards_[shard];
    absl::StrAppend(&out.header, out.header.size() > 1 ? "," : "", "\"", name, "\":{\"dtype\":\"", dtype,
                    "\",\"shape\":[", absl::StrJoin(shape, ","), "],\"data_offsets\":[", out.bytes, ",",
                    out.bytes + bytes, "]}");
    out.bytes += bytes;
    absl::StrAppend(&map_, map_.empty() ? "" : ",\n", "    \"", name, "\": \"", testing::ShardName(shard, kShards),
                    "\"");
    total_ += bytes;
    ++count_;
  }

  void Add(int shard, const TensorSpec& spec) {
    if (spec.form == TensorForm::kExpert) {
      Add(shard, spec.name + "_packed", "U8", 1, {spec.shape[0], spec.shape[1] / 2});
      Add(shard, spec.name + "_scale", "U8", 1, {spec.shape[0], spec.shape[1] / kMxfp4BlockSize});
    } else if (spec.form == TensorForm::kALog) {
      Add(shard, spec.name, "F32", 4, {spec.elements() + spec.padding});
    } else if (spec.form == TensorForm::kConvTaps) {
      Add(shard, spec.name, "F32", 4, {spec.shape[0], 1, spec.shape[1]});
    } else {
      Add(shard, spec.name, Name(spec.released), SizeOf(spec.released), spec.shape);
    }
  }

  void AddVision() {
    const auto add = [&](int shard, const std::string& name, const std::vector<int64_t>& shape) {
      Add(shard, name, "BF16", 2, shape);
    };
    add(94, "mm_projector.proj.0.weight", {4096, 4096});
    add(94, "mm_projector.proj.2.weight", {7168, 4096});
    add(94, "mm_projector.post_norm.weight", {7168});
    add(95, "vision_tower.patch_embed.proj.weight", {1024, 3, 14, 14});
    add(95, "vision_tower.patch_embed.pos_emb.weight", {64, 64, 1024});
    add(95, "vision_tower.encoder.final_layernorm.weight", {1024});
    for (int block = 0; block < 27; ++block) {
      const std::string prefix = absl::StrCat("vision_tower.encoder.blocks.", block, ".");
      add(95, prefix + "norm0.weight", {1024});
      add(95, prefix + "norm1.weight", {1024});
      add(95, prefix + "wqkv.weight", {4608, 1024});
      add(95, prefix + "wo.weight", {1024, 1536});
      add(95, prefix + "mlp.fc0.weight", {4096, 1024});
      add(95, prefix + "mlp.fc1.weight", {1024, 4096});
    }
  }

  // Headers with holes for data. `index` false leaves the index to the caller.
  void Write(const std::string& dir, bool index) const {
    for (int shard = 0; shard < kShards; ++shard) {
      const std::string path = dir + "/" + testing::ShardName(shard, kShards);
      testing::WriteRawSafetensors(path, shards_[shard].header + "}", {});
      const uint64_t size = 8 + shards_[shard].header.size() + 1 + shards_[shard].bytes;
      ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size)), 0) << path;
    }
    if (!index) return;
    testing::WriteFile(dir + "/model.safetensors.index.json",
                       absl::StrCat("{\n  \"metadata\": {\n    \"total_size\": ", total_,
                                    "\n  },\n  \"weight_map\": {\n", map_, "\n  }\n}\n"));
  }

  uint64_t count() const { return count_; }
  uint64_t total() const { return total_; }

 private:
  std::vector<Shard> shards_;
  std::string map_;
  uint64_t count_ = 0;
  uint64_t total_ = 0;
};

uint64_t StatusBytes(const char* field) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word != field) continue;
    uint64_t kib = 0;
    status >> kib;
    return kib * 1024;
  }
  return 0;
}

// Of the processor, not of the clock: what else runs on the machine must not fail the test.
double CpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void ResetPeakMemory() { std::ofstream("/proc/self/clear_refs") << 5; }

class FullIndexTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto config = LoadModelConfig(testing::SourcePath("configs/models/kimi-k3"));
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *config;
  }

  // Writes the files; the writer's own memory is gone afterwards.
  void WriteHeaders(bool index) {
    HeaderWriter writer;
    for (const TensorSpec& spec : ModelTensors(config_)) writer.Add(93, spec);
    for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
      for (const TensorSpec& spec : LayerTensors(config_, layer)) writer.Add(layer, spec);
      for (int32_t expert = 0; config_.IsMoe(layer) && expert < config_.num_experts; ++expert) {
        for (const TensorSpec& spec : ExpertTensors(config_, layer, expert)) writer.Add(layer, spec);
      }
    }
    writer.AddVision();
    EXPECT_EQ(writer.count(), kReleasedTensors);
    EXPECT_EQ(writer.total(), kReleasedBytes);
    writer.Write(dir_.path(), index);
  }

  void OpenAndMatch() {
    malloc_trim(0);  // what the writer left in the heap must not serve the loader
    ResetPeakMemory();
    const uint64_t before = StatusBytes("VmRSS:");
    const double start = CpuSeconds();
    const auto checkpoint = Checkpoint::Open(dir_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const double opened = CpuSeconds();
    const auto match = MatchTensors(**checkpoint, config_);
    ASSERT_TRUE(match.ok()) << match.status();
    const double matched = CpuSeconds();
    const double open_seconds = opened - start;
    const double match_seconds = matched - opened;
    const uint64_t peak = StatusBytes("VmHWM:") - before;
    std::printf("open %.2f s, match %.2f s, peak memory %.0f MiB above the start\n", open_seconds, match_seconds,
                static_cast<double>(peak) / kMiB);
    EXPECT_EQ((*checkpoint)->num_tensors(), kReleasedTensors);
    EXPECT_EQ((*checkpoint)->total_bytes(), kReleasedBytes);
    EXPECT_EQ(match->bytes, kReleasedBytes - kVisionBytes);
    EXPECT_EQ(match->vision_bytes, kVisionBytes);
    EXPECT_FALSE(match->mxfp4_experts[0]);
    EXPECT_TRUE(match->mxfp4_experts[1]);
    EXPECT_LT(open_seconds + match_seconds, kSecondsLimit);
    EXPECT_LT(peak, kMemoryLimit);
  }

  testing::TempDir dir_;
  ModelConfig config_;
};

TEST_F(FullIndexTest, HalfAMillionNamesInThreeSecondsAndFewMemory) {
  WriteHeaders(/*index=*/true);
  OpenAndMatch();
}

// The released index itself, where the folder of K3_KIMI_K3_INDEX holds model.safetensors.index.json (unpacked or .gz).
TEST_F(FullIndexTest, TheReleasedIndexAgreesWithTheTable) {
  const char* env = std::getenv("K3_KIMI_K3_INDEX");
  if (env == nullptr) GTEST_SKIP() << "K3_KIMI_K3_INDEX does not name the released index";
  const std::string source = env, target = dir_.File("model.safetensors.index.json");
  if (source.ends_with(".gz")) {
    ASSERT_EQ(std::system(absl::StrCat("gzip -dc '", source, "' > '", target, "'").c_str()), 0);
  } else {
    std::filesystem::copy_file(source, target);
  }
  WriteHeaders(/*index=*/false);
  OpenAndMatch();
}

}  // namespace
}  // namespace k3
