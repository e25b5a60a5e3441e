#include "server/text/encode_chunks.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace k3 {
namespace {

std::vector<size_t> ChunkBytes(const std::string& text) {
  EncodeChunks chunks(text);
  std::vector<size_t> sizes;
  std::string joined;
  for (std::string_view chunk; chunks.Next(&chunk);) {
    sizes.push_back(chunk.size());
    joined += chunk;
  }
  EXPECT_EQ(joined, text);
  return sizes;
}

std::string Repeat(const std::string& unit, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += unit;
  return text;
}

using Sizes = std::vector<size_t>;

TEST(EncodeChunks, ShortText) {
  EXPECT_EQ(ChunkBytes(""), Sizes{});
  EXPECT_EQ(ChunkBytes("a"), Sizes{1});
  EXPECT_EQ(ChunkBytes(Repeat("a", 25000)), Sizes{25000});
}

TEST(EncodeChunks, RunsOfOneKind) {
  EXPECT_EQ(ChunkBytes(Repeat("a", 25001)), (Sizes{25000, 1}));
  EXPECT_EQ(ChunkBytes(Repeat(" ", 75001)), (Sizes{25000, 25000, 25000, 1}));
  EXPECT_EQ(ChunkBytes(Repeat("中", 50001)), (Sizes{75000, 75000, 3}));
  EXPECT_EQ(ChunkBytes(Repeat("\u3000", 25001)), (Sizes{75000, 3}));
  EXPECT_EQ(ChunkBytes("ab " + Repeat("c", 25001)), (Sizes{25003, 1}));
  EXPECT_EQ(ChunkBytes(Repeat("a ", 30000)), Sizes{60000});
  // White space as Python sees it: the unit separator counts, the zero-width space does not.
  EXPECT_EQ(ChunkBytes(Repeat(" ", 20000) + Repeat("\x1f", 5001)), (Sizes{25000, 1}));
  EXPECT_EQ(ChunkBytes(Repeat("\u200b", 25001)), (Sizes{75000, 3}));
  EXPECT_EQ(ChunkBytes(Repeat(" ", 20000) + Repeat("\u200b", 5001)), Sizes{20000 + 15003});
}

TEST(EncodeChunks, SlicesRestartTheRuns) {
  EXPECT_EQ(ChunkBytes(Repeat("a ", 250000)), (Sizes{400000, 100000}));
  // 16 runs of 25,000 fill a slice exactly; the next slice begins with a new run.
  EXPECT_EQ(ChunkBytes(Repeat("a", 400001)).back(), 1u);
  EXPECT_EQ(ChunkBytes(Repeat("a", 400001)).size(), 17u);
  const std::string text = Repeat("a ", 195000) + Repeat("b", 35001);
  EXPECT_EQ(ChunkBytes(text), (Sizes{400000, 25000, 1}));
}

TEST(EncodeChunks, PythonSpace) {
  std::vector<char32_t> spaces;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (IsPythonSpace(c)) spaces.push_back(c);
  }
  EXPECT_EQ(spaces.size(), 29u);
  EXPECT_TRUE(IsPythonSpace(0x1C));
  EXPECT_TRUE(IsPythonSpace(0x2029));
  EXPECT_FALSE(IsPythonSpace(0x180E));
  EXPECT_FALSE(IsPythonSpace(0xFEFF));
}

}  // namespace
}  // namespace k3
