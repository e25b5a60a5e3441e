#include "server/text/pretokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "server/text/unicode_classes.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

std::vector<std::string> Pieces(const Pretokenizer& pretokenizer, std::string_view text) {
  std::vector<uint32_t> ends;
  pretokenizer.Split(text, &ends);
  std::vector<std::string> pieces;
  uint32_t begin = 0;
  for (const uint32_t end : ends) {
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  EXPECT_EQ(begin, text.size());
  return pieces;
}

std::vector<std::string> Pieces(std::string_view text) {
  static const auto pretokenizer = Pretokenizer::Create().value();
  return Pieces(*pretokenizer, text);
}

using List = std::vector<std::string>;

TEST(Pretokenizer, Words) {
  EXPECT_EQ(Pieces("Hello, world!"), (List{"Hello", ",", " world", "!"}));
  EXPECT_EQ(Pieces("MixedCASEwords HTTPServer iPhone"), (List{"Mixed", "CASEwords", " HTTPServer", " i", "Phone"}));
  EXPECT_EQ(Pieces("I'LL we've DON'T it's x'sy"), (List{"I'LL", " we've", " DON'T", " it's", " x's", "y"}));
  EXPECT_EQ(Pieces("it'ſ"), (List{"it'ſ"}));  // long s folds to s
  EXPECT_EQ(Pieces("1234567 ½٣"), (List{"123", "456", "7", " ", "½٣"}));
}

TEST(Pretokenizer, HanIsApart) {
  EXPECT_EQ(Pieces("世界Hello世界"), (List{"世界", "Hello", "世界"}));
  EXPECT_EQ(Pieces("2026年11月29日"), (List{"202", "6", "年", "11", "月", "29", "日"}));
  EXPECT_EQ(Pieces("カタカナとひらがなと漢字"), (List{"カタカナとひらがなと", "漢字"}));
  EXPECT_EQ(Pieces("々〆。"), (List{"々", "〆", "。"}));  // only the first is of the Han script
  EXPECT_EQ(Pieces("9〇"), (List{"9〇"}));                // a Han numeral is also a number
  EXPECT_EQ(Pieces("𠀀𪛖a"), (List{"𠀀𪛖", "a"}));
}

TEST(Pretokenizer, WhiteSpace) {
  EXPECT_EQ(Pieces("  a   b "), (List{" ", " a", "  ", " b", " "}));
  EXPECT_EQ(Pieces("x\r\n\r\n  y"), (List{"x", "\r\n\r\n", " ", " y"}));
  EXPECT_EQ(Pieces("   \n   \n x"), (List{"   \n   \n", " x"}));
  EXPECT_EQ(Pieces("a.\n\nb"), (List{"a", ".\n\n", "b"}));
  EXPECT_EQ(Pieces("\u00a0\u3000x"), (List{"\u00a0", "\u3000x"}));
  EXPECT_EQ(Pieces("\u180ex"), (List{"\u180ex"}));  // Mongolian vowel separator: no white space since Unicode 6.3
}

TEST(Pretokenizer, BytesOutsideUtf8AreSymbols) {
  EXPECT_EQ(Pieces("ab\xff\xfe c"), (List{"ab", "\xff\xfe", " c"}));
  EXPECT_EQ(Pieces("\xe4\xb8"), (List{"\xe4\xb8"}));
}

TEST(Pretokenizer, InterpreterGivesTheSamePieces) {
  const auto interpreter = Pretokenizer::Create(Pretokenizer::Engine::kInterpreter).value();
  ASSERT_EQ(interpreter->engine(), Pretokenizer::Engine::kInterpreter);
  std::mt19937 random(1);
  const std::vector<std::string> alphabet = {"a", "B", "s",    "T",  "'", " ", "\n", "\r",     "\t",
                                             "1", ".", "中",   "〇", "é", "É", "か", "\u0301", "\u3000",
                                             "ſ", "ǅ", "\xff", "r",  "e", "L", "l"};
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (int n = random() % 20; n > 0; --n) text += alphabet[random() % alphabet.size()];
    EXPECT_EQ(Pieces(*interpreter, text), Pieces(text)) << text;
  }
}

// A piece may be as long as the text; neither engine has a limit on the way.
TEST(Pretokenizer, MegabyteRuns) {
  const auto interpreter = Pretokenizer::Create(Pretokenizer::Engine::kInterpreter).value();
  for (const std::string unit : {"x", "X", " ", "\n", "_", "中", "\u0301", "'", "か"}) {
    std::string text;
    while (text.size() < 1 << 20) text += unit;
    EXPECT_EQ(Pieces(text), List{text}) << unit;
    EXPECT_EQ(Pieces(*interpreter, text), List{text}) << unit;
  }
  std::string text(1 << 20, ' ');
  EXPECT_EQ(Pieces(*interpreter, text + "x").size(), 2u);
  EXPECT_EQ(Pieces(*interpreter, "x" + text + "\nx").size(), 3u);
}

TEST(UnicodeClasses, RangesCoverEverything) {
  const auto ranges = CharClassRanges();
  ASSERT_EQ(ranges[0].first, 0u);
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LT(ranges[i - 1].first, ranges[i].first);
  for (const CharClassRange& range : ranges) {
    EXPECT_NE(std::string(" \n\t'strevmldSTREVMLDAaok1.HJKP").find(range.char_class), std::string::npos);
  }
}

}  // namespace
}  // namespace k3
