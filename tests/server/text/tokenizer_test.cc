#include "server/text/tokenizer.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/text/utf8.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

const Tokenizer& Tiny() {
  static const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
  return *tokenizer;
}

Json ReadJson(const std::string& path) { return Json::parse(std::ifstream(path)); }

TEST(Tokenizer, Golden) {
  const Json golden = ReadJson(testing::DataFile("tokenizer.json"));
  ASSERT_EQ(golden["encode"].size(), 50u);
  for (const Json& item : golden["encode"]) {
    const auto text = item["text"].get<std::string>();
    EXPECT_EQ(Tiny().Encode(text).value(), item["ordinary"].get<Ids>()) << text;
    EXPECT_EQ(Tiny().Encode(text, EncodeMode::kControl).value(), item["control"].get<Ids>()) << text;
    EXPECT_EQ(Tiny().Decode(item["ordinary"].get<Ids>()), text);
    EXPECT_EQ(Tiny().Decode(item["control"].get<Ids>()), text);
  }
  ASSERT_EQ(golden["decode"].size(), 303u);
  for (const Json& item : golden["decode"]) {
    std::string bytes;
    ASSERT_TRUE(absl::Base64Unescape(item["bytes_base64"].get<std::string>(), &bytes));
    EXPECT_EQ(Tiny().Decode(item["ids"].get<Ids>()), bytes);
  }
}

// Han rules, contractions, combining marks, code points newer than the installed libraries, random mixtures, and
// 4 KiB of one character (B33).
TEST(Tokenizer, MoreCasesFromTiktoken) {
  const Json cases = ReadJson(testing::DataFile("tokenizer_cases.json"));
  ASSERT_GT(cases["encode"].size(), 150u);
  for (const Json& item : cases["encode"]) {
    const auto text = item["text"].get<std::string>();
    EXPECT_EQ(Tiny().Encode(text).value(), item["ids"].get<Ids>()) << text;
    EXPECT_EQ(Tiny().Decode(item["ids"].get<Ids>()), text);
  }
}

// The K2 family's later files call the end of a message eos.
TEST(Tokenizer, RepliesEndAtEveryEnd) {
  std::ostringstream model;
  model << std::ifstream(testing::TinyK3() + "/tiktoken.model").rdbuf();
  const auto tokenizer = Tokenizer::FromContents(model.str(),
                                                 R"({"added_tokens_decoder": {"3840": {"content": "[BOS]"},
                                                     "3841": {"content": "[EOS]"}, "3842": {"content": "<|im_end|>"}},
                                                     "eos_token": "<|im_end|>"})");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->eos_id(), 3842);
  EXPECT_EQ((*tokenizer)->stop_ids(), (Ids{3841, 3842}));
}

TEST(Tokenizer, Ids) {
  EXPECT_EQ(Tiny().num_ranks(), 3840);
  EXPECT_EQ(Tiny().vocab_size(), 4096);
  EXPECT_EQ(Tiny().bos_id(), 3840);
  EXPECT_EQ(Tiny().eos_id(), 3841);
  EXPECT_EQ(Tiny().pad_id(), 4095);
  EXPECT_EQ(Tiny().stop_ids(), (Ids{3841, 3842}));
  EXPECT_EQ(Tiny().SpecialId("<|open|>"), 3843);
  EXPECT_EQ(Tiny().SpecialId("<|reserved_token_3848|>"), 3848);
  EXPECT_EQ(Tiny().SpecialId("<|im_user|>"), std::nullopt);
  EXPECT_TRUE(Tiny().IsSpecial(3840));
  EXPECT_FALSE(Tiny().IsSpecial(3839));
  EXPECT_FALSE(Tiny().IsSpecial(4096));
  EXPECT_EQ(Tiny().TokenBytes(3845), "<|sep|>");
  EXPECT_EQ(Tiny().TokenBytes(4096), "\uFFFD");
  EXPECT_EQ(Tiny().TokenBytes(-1), "\uFFFD");
}

TEST(Tokenizer, InvalidUtf8IsAnErrorThatNamesTheByte) {
  for (const std::string bad : {"abc\x80", "abc\xC3", "abc\xC0\xAF", "abc\xED\xA0\x80xyz", "abc\xFF"}) {
    Ids ids = {7};
    const absl::Status status = Tiny().Encode(bad, EncodeMode::kOrdinary, &ids);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), "text is not valid UTF-8 at byte 3");
    EXPECT_EQ(ids, Ids{7});
    EXPECT_FALSE(Tiny().Encode(bad, EncodeMode::kControl).ok());
  }
}

TEST(Tokenizer, RawBytes) {
  for (int byte = 0; byte < 256; ++byte) {
    Ids ids;
    Tiny().EncodeBytes(std::string(1, static_cast<char>(byte)), &ids);
    EXPECT_EQ(ids, Ids{byte});
  }
  const std::string bytes = "word \xff\xfe\xe4\xb8 中\x80";
  Ids ids;
  Tiny().EncodeBytes(bytes, &ids);
  EXPECT_EQ(Tiny().Decode(ids), bytes);
}

// No spelling of a special token, whole or doubled or overlapping another, yields a special id from ordinary text.
TEST(Tokenizer, OrdinaryTextNeverGivesSpecialIds) {
  for (int32_t special = Tiny().num_ranks(); special < Tiny().vocab_size(); ++special) {
    const std::string name(Tiny().TokenBytes(special));
    for (const std::string& text : {name, "hi" + name + "system", name + name, "<" + name, name.substr(0, 3) + name}) {
      const Ids ids = Tiny().Encode(text).value();
      for (const int32_t id : ids) EXPECT_FALSE(Tiny().IsSpecial(id)) << text;
      EXPECT_EQ(Tiny().Decode(ids), text);
    }
    EXPECT_EQ(Tiny().Encode(name, EncodeMode::kControl).value(), Ids{special});
    EXPECT_EQ(Tiny().Encode("<" + name + "<|", EncodeMode::kControl).value(), (Ids{'<', special, '<', '|'}));
  }
}

TEST(Tokenizer, LoadErrorsNameTheFile) {
  const auto missing = Tokenizer::Load("/nonexistent");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(missing.status().message(), "/nonexistent/tiktoken.model: cannot be opened: No such file or directory");
  const auto malformed = Tokenizer::FromContents("AA== zero\n", std::nullopt, "dir");
  EXPECT_EQ(malformed.status().message(), "dir/tiktoken.model:1: the rank is not a number");
}

TEST(Tokenizer, ManyThreads) {
  const Json golden = ReadJson(testing::DataFile("tokenizer.json"));
  std::string text;
  for (const Json& item : golden["encode"]) text += item["text"].get<std::string>();
  while (text.size() < 20000) text += text;  // with the cache of repeated pieces in use
  const Ids expected = Tiny().Encode(text).value();
  std::atomic<int> equal = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int round = 0; round < 5; ++round) equal += Tiny().Encode(text).value() == expected ? 1 : 0;
      });
    }
  }
  EXPECT_EQ(equal, 20);
}

// Merge order against the definition, on pieces on both sides of the switch to the heap.
TEST(BytePairEncoder, EqualsTheDefinition) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
  for (const char* token : {"ba", "ab", "aa", "bb", "aba", "abab", "aaaa", "baba", "abba", "bbb", "aabb", "aaaaaaaa"}) {
    tokens.emplace_back(token);
  }
  TokenTable table;
  table.Build(tokens);
  const BytePairEncoder encoder(table);
  const auto reference = [&](const std::string& piece) {
    Ids ids;
    if (const int32_t whole = table.Find(piece); whole >= 0) return Ids{whole};
    std::vector<std::string> parts;
    for (const char c : piece) parts.emplace_back(1, c);
    while (true) {
      int32_t best = INT32_MAX;
      size_t at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const int32_t id = table.Find(parts[i] + parts[i + 1]);
        if (id >= 0 && id < best) {
          best = id;
          at = i;
        }
      }
      if (best == INT32_MAX) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + at + 1);
    }
    for (const std::string& part : parts) ids.push_back(table.Find(part));
    return ids;
  };
  PieceCache cache;
  uint64_t state = 1;
  for (int i = 0; i < 2000; ++i) {
    std::string piece;
    const size_t size = i % 4 == 0 ? 1 + i % 200 : 1 + i % 7;
    while (piece.size() < size) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      piece.push_back("aabbc"[state >> 61 < 5 ? state >> 61 : 0]);
    }
    Ids ids;
    encoder.Encode(piece, nullptr, &ids);
    EXPECT_EQ(ids, reference(piece)) << piece;
    // Through the cache, where short pieces come back by now.
    ids.clear();
    encoder.Encode(piece, &cache, &ids);
    EXPECT_EQ(ids, reference(piece)) << piece;
  }
}

// Processor time of this thread: the machine may be busy.
double ThreadSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kLong = 1 << 17;
#else
constexpr size_t kLong = 1 << 20;
#endif

double EncodeSeconds(const std::string& text) {
  double best = 1e9;
  for (int i = 0; i < 2; ++i) {
    Ids ids;
    const double begin = ThreadSeconds();
    EXPECT_TRUE(Tiny().Encode(text, EncodeMode::kOrdinary, &ids).ok());
    best = std::min(best, ThreadSeconds() - begin);
    EXPECT_EQ(Tiny().Decode(ids), text);
  }
  return best;
}

// Encoding must stay near-linear whatever the text.
TEST(Tokenizer, LongRunsTakeLinearTime) {
  std::string letters;
  uint64_t state = 1;
  while (letters.size() < kLong) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    letters.push_back(static_cast<char>('a' + (state >> 33) % 26));
  }
  for (const std::string& unit : {std::string("x"), std::string(" "), std::string("\n"), std::string("_"),
                                  std::string("{"), std::string("中"), std::string("ab"), letters}) {
    std::string text;
    while (text.size() < kLong) text += unit;
    text.resize(ValidUtf8Prefix(std::string_view(text).substr(0, kLong)));
    const double whole = EncodeSeconds(text);
    const double half = EncodeSeconds(text.substr(0, ValidUtf8Prefix(std::string_view(text).substr(0, kLong / 2))));
    EXPECT_LT(whole, 2.0) << unit[0];
    EXPECT_LT(whole, 3 * half + 0.02) << unit[0];
  }
}

// The same without the cuts at 25,000 characters: one piece of a megabyte.
TEST(BytePairEncoder, OneHugePiece) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 256; ++i) tokens.emplace_back(1, static_cast<char>(i));
  for (int n = 2; n <= 64; n *= 2) tokens.emplace_back(n, 'x');
  TokenTable table;
  table.Build(tokens);
  Ids ids;
  const double begin = ThreadSeconds();
  BytePairEncoder(table).Encode(std::string(kLong, 'x'), nullptr, &ids);
  EXPECT_LT(ThreadSeconds() - begin, 2.0);
  EXPECT_EQ(ids, Ids(kLong / 64, 256 + 5));
}

}  // namespace
}  // namespace k3
