#include "engine/model/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/log_capture.h"
#include "tests/testing/paths.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::ReadFile;
using testing::ShardName;
using testing::WriteFile;
using Json = nlohmann::ordered_json;

TEST(CheckpointTest, SingleFile) {
  const auto checkpoint = Checkpoint::Open(testing::TinyK3());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->num_shards(), 1u);
  const auto at = (*checkpoint)->Find("language_model.model.embed_tokens.weight");
  ASSERT_TRUE(at.has_value());
  const HostTensor tensor = (*checkpoint)->View(*at);
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{4096, 256}));
  EXPECT_EQ(tensor.dtype, DType::kBF16);
  EXPECT_FALSE((*checkpoint)->Find("model.embed_tokens.weight").has_value());
}

// B40: a tiny checkpoint in three shards, damaged in one way each.
class ShardedCheckpointTest : public ::testing::Test {
 protected:
  ShardedCheckpointTest() : content_(testing::SmallKimiLinearConfig()) { content_.Write(dir_.path(), 3); }

  std::string Shard(int shard) const { return dir_.File(ShardName(shard, 3)); }
  std::string IndexPath() const { return dir_.File("model.safetensors.index.json"); }
  // A tensor of the given shard.
  std::string NameIn(int shard) const { return content_.tensors[content_.tensors.size() * shard / 3 + 1].name; }
  void ChangeIndex(const std::function<void(Json& map)>& change) {
    Json index = Json::parse(ReadFile(IndexPath()));
    change(index["weight_map"]);
    WriteFile(IndexPath(), index.dump());
  }
  // The message of the failed Open.
  std::string Failure(absl::StatusCode code = absl::StatusCode::kDataLoss) const {
    const auto checkpoint = Checkpoint::Open(dir_.path());
    if (checkpoint.ok()) return "opened without an error";
    EXPECT_EQ(checkpoint.status().code(), code);
    return std::string(checkpoint.status().message());
  }

  testing::TempDir dir_;
  testing::TestCheckpoint content_;
};

TEST_F(ShardedCheckpointTest, OpensAndFindsEveryTensor) {
  const auto checkpoint = Checkpoint::Open(dir_.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->num_shards(), 3u);
  EXPECT_EQ((*checkpoint)->num_tensors(), content_.tensors.size());
  for (const testing::CheckpointTensor& tensor : content_.tensors) {
    const auto at = (*checkpoint)->Find(tensor.name);
    ASSERT_TRUE(at.has_value()) << tensor.name;
    const HostTensor view = (*checkpoint)->View(*at);
    EXPECT_EQ(view.shape, tensor.shape);
    ASSERT_EQ(view.bytes(), tensor.data.size());
    EXPECT_EQ(std::memcmp(view.data, tensor.data.data(), tensor.data.size()), 0) << tensor.name;
  }
}

// The hub's cache: a folder of links to files that are named after their hashes.
TEST_F(ShardedCheckpointTest, FoldersOfLinksAreFollowed) {
  const testing::TempDir cache;
  const std::string snapshot = cache.File("snapshots/0a1b2c");
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directories(cache.File("blobs"));
  int number = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
    const std::string blob = "blobs/" + std::to_string(number++);
    std::filesystem::copy_file(entry.path(), cache.File(blob));
    std::filesystem::create_symlink("../../" + blob, snapshot + "/" + entry.path().filename().string());
  }
  ASSERT_TRUE(LoadModelConfig(snapshot).ok());
  const auto checkpoint = Checkpoint::Open(snapshot);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ((*checkpoint)->num_tensors(), content_.tensors.size());

  std::filesystem::remove_all(cache.File("blobs"));  // as in a container that mounts the snapshot alone
  const auto nowhere = [](const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("(a link to ../../blobs/"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(", which is not there)"));
  };
  nowhere(LoadModelConfig(snapshot).status());
  nowhere(Checkpoint::Open(snapshot).status());
}

TEST_F(ShardedCheckpointTest, ALinkToAMissingShardIsNamed) {
  std::filesystem::remove(Shard(1));
  std::filesystem::create_symlink("../blobs/7", Shard(1));
  EXPECT_THAT(Failure(), AllOf(HasSubstr("names 1 of 3 files that are not in the directory"),
                               HasSubstr(ShardName(1, 3) + " (a link to ../blobs/7, which is not there)")));
}

TEST_F(ShardedCheckpointTest, ShardRemoved) {
  std::filesystem::remove(Shard(1));
  EXPECT_THAT(Failure(),
              AllOf(HasSubstr("names 1 of 3 files that are not in the directory"), HasSubstr(ShardName(1, 3))));
}

TEST_F(ShardedCheckpointTest, ShardRenamed) {
  std::filesystem::rename(Shard(1), dir_.File("model-00002-of-00003.safetensors.part"));
  EXPECT_THAT(Failure(), HasSubstr(ShardName(1, 3)));
}

TEST_F(ShardedCheckpointTest, ShardEmpty) {
  WriteFile(Shard(1), "");
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("the file is empty")));
}

TEST_F(ShardedCheckpointTest, ShardIsADirectory) {
  std::filesystem::remove(Shard(1));
  std::filesystem::create_directory(Shard(1));
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("expected a file")));
}

TEST_F(ShardedCheckpointTest, ShardIsAnLfsPointer) {
  std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 99\n";
  pointer.resize(130, '\n');
  WriteFile(Shard(1), pointer);
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("Git LFS pointer of 130 bytes")));
}

TEST_F(ShardedCheckpointTest, NameMissingFromIndex) {
  ChangeIndex([&](Json& map) { map.erase(NameIn(1)); });
  EXPECT_THAT(Failure(), AllOf(HasSubstr("not in the index"), HasSubstr(NameIn(1)), HasSubstr(ShardName(1, 3))));
}

TEST_F(ShardedCheckpointTest, NamePointsToTheWrongShard) {
  ChangeIndex([&](Json& map) { map[NameIn(1)] = ShardName(2, 3); });
  EXPECT_THAT(Failure(), AllOf(HasSubstr("in another file"), HasSubstr(NameIn(1)),
                               HasSubstr("index: " + ShardName(2, 3)), HasSubstr("found in " + ShardName(1, 3))));
}

TEST_F(ShardedCheckpointTest, IndexNamesWhatTheShardLacks) {
  ChangeIndex([&](Json& map) { map["model.layers.9.extra"] = ShardName(1, 3); });
  EXPECT_THAT(Failure(), AllOf(HasSubstr("not in the file it names"), HasSubstr("model.layers.9.extra")));
}

TEST_F(ShardedCheckpointTest, AtMostTenNamesAreListed) {
  ChangeIndex([&](Json& map) {
    for (int i = 0; i < 25; ++i) map["extra." + std::to_string(i)] = ShardName(1, 3);
  });
  EXPECT_THAT(Failure(), AllOf(HasSubstr("25 tensors"), HasSubstr("'extra.9'"), HasSubstr("and 15 more"),
                               ::testing::Not(HasSubstr("extra.10"))));
}

TEST_F(ShardedCheckpointTest, NameInTheIndexTwice) {
  std::string text = ReadFile(IndexPath());
  const std::string entry = "\"" + NameIn(1) + "\": \"" + ShardName(1, 3) + "\",";
  text.insert(text.find("\"" + NameIn(1)), entry);
  WriteFile(IndexPath(), text);
  EXPECT_THAT(Failure(), AllOf(HasSubstr("in the index twice"), HasSubstr(NameIn(1))));
}

TEST_F(ShardedCheckpointTest, TensorInTwoFiles) {
  const size_t first = content_.tensors.size() / 3;
  std::vector<testing::CheckpointTensor> part(content_.tensors.begin() + first,
                                              content_.tensors.begin() + content_.tensors.size() * 2 / 3);
  part.push_back(content_.tensors[0]);
  testing::WriteSafetensors(Shard(1), part);
  EXPECT_THAT(Failure(), AllOf(HasSubstr("in two files"), HasSubstr(content_.tensors[0].name),
                               HasSubstr(ShardName(0, 3)), HasSubstr(ShardName(1, 3))));
}

TEST_F(ShardedCheckpointTest, IndexIsNotJson) {
  for (const char* text : {"", "{", "not json", "{\"weight_map\": [}", "{\"weight_map\": {\"a\": 1}}",
                           "{\"weight_map\": {\"a\"", "{\"weight_map\": {}} trailing", "[]"}) {
    WriteFile(IndexPath(), text);
    EXPECT_THAT(Failure(), AllOf(HasSubstr("model.safetensors.index.json"), HasSubstr("invalid JSON"))) << text;
  }
  WriteFile(IndexPath(), "{\"metadata\": {}}");
  EXPECT_THAT(Failure(), HasSubstr("weight_map"));
  WriteFile(IndexPath(), "{\"metadata\": " + std::string(1'000'000, '[') + "}");
  EXPECT_THAT(Failure(), HasSubstr("invalid JSON"));
}

TEST_F(ShardedCheckpointTest, IndexPointsOutOfTheDirectory) {
  for (const char* name : {"../model.safetensors", "/etc/passwd", "", ".."}) {
    ChangeIndex([&](Json& map) { map["x"] = name; });
    EXPECT_THAT(Failure(), AllOf(HasSubstr("tensor 'x'"), HasSubstr("a file name in the same directory"))) << name;
  }
}

TEST_F(ShardedCheckpointTest, WrongTotalIsAWarning) {
  Json index = Json::parse(ReadFile(IndexPath()));
  index["metadata"]["total_size"] = 17;
  WriteFile(IndexPath(), index.dump());
  const testing::LogCapture log;
  EXPECT_TRUE(Checkpoint::Open(dir_.path()).ok());
  EXPECT_EQ(log.Count("warn"), 1);
  EXPECT_THAT(log.text(), HasSubstr("total_size is 17"));
  EXPECT_TRUE(Checkpoint::Open(dir_.path()).ok());
  EXPECT_EQ(log.Count("warn"), 1) << "a start opens it more than once";
}

TEST_F(ShardedCheckpointTest, NoIndexOrNoWeights) {
  std::filesystem::remove(IndexPath());
  EXPECT_THAT(Failure(absl::StatusCode::kNotFound),
              AllOf(HasSubstr("model.safetensors.index.json or model.safetensors"), HasSubstr(ShardName(0, 3)),
                    HasSubstr("their index is missing")));
  for (int shard = 0; shard < 3; ++shard) std::filesystem::remove(Shard(shard));
  EXPECT_THAT(Failure(absl::StatusCode::kNotFound), HasSubstr("found neither"));
  EXPECT_FALSE(Checkpoint::Exists(dir_.path()));
  const auto nowhere = Checkpoint::Open(dir_.File("nowhere"));
  EXPECT_EQ(nowhere.status().code(), absl::StatusCode::kNotFound);
}

// B41: one shard damaged inside. The header checks themselves are in safetensors_test; here: through files, naming
// both.
TEST_F(ShardedCheckpointTest, ShardTruncatedOrExtended) {
  const std::string whole = ReadFile(Shard(1));
  const std::string last = content_.tensors[content_.tensors.size() * 2 / 3 - 1].name;
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);

  WriteFile(Shard(1), whole.substr(0, whole.size() - 1));
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr(last), HasSubstr("past the end of the file")));
  WriteFile(Shard(1), whole.substr(0, whole.size() / 2));
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("past the end of the file")));
  WriteFile(Shard(1), whole.substr(0, 8 + header / 2));
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("header length"), HasSubstr("truncated?")));
  WriteFile(Shard(1), whole + "0123456789");
  EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr(last), HasSubstr("10 bytes follow")));
  for (uint64_t length : {uint64_t{0}, uint64_t{1} << 63, static_cast<uint64_t>(whole.size())}) {
    std::string changed = whole;
    std::memcpy(changed.data(), &length, 8);
    WriteFile(Shard(1), changed);
    EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr("header length is " + std::to_string(length))));
  }
}

TEST_F(ShardedCheckpointTest, HeaderEntryDamaged) {
  const std::string whole = ReadFile(Shard(1));
  uint64_t length = 0;
  std::memcpy(&length, whole.data(), 8);
  const Json header = Json::parse(whole.substr(8, length));
  const std::vector<uint8_t> data(whole.begin() + 8 + length, whole.end());
  const std::string name = NameIn(1);
  const auto expect = [&](const std::function<void(Json&)>& change, const std::string& says) {
    Json changed = header;
    change(changed[name]);
    testing::WriteRawSafetensors(Shard(1), changed.dump(), data);
    EXPECT_THAT(Failure(), AllOf(HasSubstr(ShardName(1, 3)), HasSubstr(name), HasSubstr(says)));
  };
  const uint64_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
  expect([&](Json& t) { t["data_offsets"] = Json({end, begin}); }, "end before they start");
  expect([&](Json& t) { t["data_offsets"] = Json({begin, end + data.size()}); }, "past the end of the file");
  expect([&](Json& t) { t["data_offsets"] = Json({begin - 1, end - 1}); }, "overlap");
  expect([&](Json& t) { t["shape"][0] = t["shape"][0].get<int64_t>() + 1; }, "need");
  expect([&](Json& t) { t["shape"][0] = -1; }, "non-negative");
  expect([&](Json& t) { t["shape"][0] = int64_t{1} << 62; }, "4611686018427387904");
  expect([&](Json& t) { t["dtype"] = "F33"; }, "unknown dtype 'F33'");
}

}  // namespace
}  // namespace k3
