#include "server/text/detokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/text/utf8.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

std::shared_ptr<const Tokenizer> Tiny() {
  static const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
  return tokenizer;
}

// The tiny vocabulary's ranks 0..255 are the single bytes.
std::vector<std::string> Deltas(const std::vector<std::string>& pieces) {
  Utf8Stream stream;
  std::vector<std::string> deltas;
  for (const std::string& piece : pieces) stream.Append(piece, &deltas.emplace_back());
  stream.Flush(&deltas.emplace_back());
  return deltas;
}

std::string Joined(const std::vector<std::string>& pieces) {
  std::string text;
  for (const std::string& piece : Deltas(pieces)) text += piece;
  return text;
}

TEST(Utf8Stream, HoldsACharacterUntilItsLastByte) {
  EXPECT_EQ(Deltas({"\xF0", "\x9F", "\x98", "\x80"}), (std::vector<std::string>{"", "", "", "😀", ""}));
  EXPECT_EQ(Deltas({"\xE4\xB8", "\xAD\xE5\x9B", "\xBD"}), (std::vector<std::string>{"", "中", "国", ""}));
}

TEST(Utf8Stream, InvalidBytesBecomeOneReplacementPerMaximalSubpart) {
  EXPECT_EQ(Deltas({"\xF0", " a"}), (std::vector<std::string>{"", "\uFFFD a", ""}));
  EXPECT_EQ(Joined({"\x80\x80"}), "\uFFFD\uFFFD");
  EXPECT_EQ(Joined({"\xC0\xAF"}), "\uFFFD\uFFFD");                      // no overlong forms
  EXPECT_EQ(Joined({"\xED\xA0\x80"}), "\uFFFD\uFFFD\uFFFD");            // no surrogates
  EXPECT_EQ(Joined({"\xF4\x90\x80\x80"}), "\uFFFD\uFFFD\uFFFD\uFFFD");  // nothing above U+10FFFF
  EXPECT_EQ(Joined({"\xF0\x9F\x98", "\xF0\x9F\x98\x80"}), "\uFFFD😀");   // a cut character, then a whole one
  EXPECT_EQ(Joined({"a\xF0\x80z"}), "a\uFFFD\uFFFDz");
  EXPECT_EQ(Joined({"\xE4\xB8"}), "\uFFFD");  // cut by the end
}

// What the Unicode standard shows as the recommended practice (table 3-8).
TEST(Utf8Stream, StandardExample) {
  EXPECT_EQ(Joined({"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"}),
            "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd");
}

TEST(Utf8Stream, TextDoesNotDependOnTheCuts) {
  const std::string bytes =
      "x\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9 \xF0\x9F\xE4\xB8\xAD\xC3(\xED\xA0\x80 end\xE2\x80";
  const std::string whole = SanitizeUtf8(bytes);
  EXPECT_TRUE(IsValidUtf8(whole));
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      EXPECT_EQ(Joined({bytes.substr(0, first), bytes.substr(first, second - first), bytes.substr(second)}), whole);
    }
  }
}

TEST(Utf8, ValidityAtEveryLengthAndOffset) {
  for (const std::string bad : {"\x80", "\xC3", "\xC0\xAF", "\xE4\xB8", "\xED\xB0\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    for (size_t before = 0; before < 40; ++before) {
      const std::string prefix(before, 'a');
      EXPECT_EQ(ValidUtf8Prefix(prefix + bad), before);
      EXPECT_EQ(ValidUtf8Prefix(prefix + bad + "after it"), before);
      EXPECT_TRUE(IsValidUtf8(prefix + "é中😀" + prefix));
    }
  }
}

TEST(Utf8, DecodeAndAppendAreInverse) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string bytes;
    AppendUtf8(c, &bytes);
    const Utf8Char decoded = DecodeUtf8(bytes);
    ASSERT_EQ(decoded.code_point, c);
    ASSERT_EQ(decoded.length, static_cast<int>(bytes.size()));
  }
}

TEST(Detokenizer, StreamEqualsWhole) {
  const std::string text = "An emoji 👨\u200d👩\u200d👧\u200d👦 joined from parts, 漢字, and plain words.";
  const std::vector<int32_t> ids = Tiny()->Encode(text).value();
  Detokenizer detokenizer(Tiny());
  std::string joined;
  std::string bytes;
  for (const int32_t id : ids) {
    detokenizer.Append(id, &joined);
    bytes += Tiny()->TokenBytes(id);
    EXPECT_TRUE(IsValidUtf8(joined));
  }
  detokenizer.Flush(&joined);
  EXPECT_EQ(joined, text);
  EXPECT_EQ(bytes, text);
  EXPECT_EQ(DetokenizeAll(*Tiny(), ids), text);
}

TEST(Detokenizer, ForcedBytes) {
  Detokenizer detokenizer(Tiny());
  std::string text;
  detokenizer.Append(0xF0, &text);
  EXPECT_EQ(text, "");
  EXPECT_EQ(detokenizer.pending(), "\xF0");
  detokenizer.Append(Tiny()->Encode(" a").value()[0], &text);
  EXPECT_EQ(text, "\uFFFD a");
  detokenizer.Append(0x9F, &text);
  detokenizer.Append(0xF0, &text);
  detokenizer.Append(0x9F, &text);
  detokenizer.Flush(&text);
  EXPECT_EQ(text, "\uFFFD a\uFFFD\uFFFD");
}

TEST(Detokenizer, IdsOutsideTheVocabulary) {
  EXPECT_EQ(DetokenizeAll(*Tiny(), std::vector<int32_t>{-1, 1 << 20, Tiny()->vocab_size()}), "\uFFFD\uFFFD\uFFFD");
}

}  // namespace
}  // namespace k3
