#include "engine/model/mapped_file.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/checkpoint_writer.h"
#include "tests/testing/temp_dir.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;

TEST(MappedFileTest, BytesStayReadableThroughHints) {
  const testing::TempDir dir;
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += static_cast<char>(i * 7);
  testing::WriteFile(dir.File("data"), bytes);
  const auto file = MappedFile::Open(dir.File("data"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->size(), bytes.size());
  const auto equal = [&] {
    return std::equal(bytes.begin(), bytes.end(), reinterpret_cast<const char*>((*file)->data()));
  };
  EXPECT_TRUE(equal());
  (*file)->Prefetch(5, 70000);
  (*file)->Release(5, 70000);
  EXPECT_TRUE(equal());
  // Ranges that are empty, past the end or inside one page do nothing.
  (*file)->Prefetch(99999, 5);
  (*file)->Prefetch(0, UINT64_MAX);
  (*file)->Release(0, UINT64_MAX);
  (*file)->Release(10, 20);
  (*file)->Release(99999, 5);
  EXPECT_TRUE(equal());
}

TEST(MappedFileTest, EmptyMissingAndForeignFiles) {
  const testing::TempDir dir;
  testing::WriteFile(dir.File("empty"), "");
  const auto empty = MappedFile::Open(dir.File("empty"));
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ((*empty)->size(), 0u);
  EXPECT_EQ((*empty)->data(), nullptr);
  (*empty)->Prefetch(0, 10);
  (*empty)->Release(0, 10);

  const auto missing = MappedFile::Open(dir.File("missing"));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("missing"));
  const auto folder = MappedFile::Open(dir.path());
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace k3
