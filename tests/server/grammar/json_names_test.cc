#include "server/grammar/json_names.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "server/text/tokenizer.h"
#include "tests/testing/paths.h"

namespace k3 {
namespace {

bool Repeats(const std::string& text, const std::string& next) {
  JsonNames names;
  names.Append(text);
  return names.Repeats(next);
}

TEST(JsonNamesTest, NamesAreThoseOfTheirObject) {
  EXPECT_TRUE(Repeats(R"({"a":1,"a)", "\""));
  EXPECT_TRUE(Repeats(R"({"a":1,)", R"("a":)"));
  EXPECT_TRUE(Repeats(R"({"a":{"b":[{"a":1}]}, )", R"("a")"));
  EXPECT_TRUE(Repeats(R"({"a":[1,{"b":"x\"","c":null}],"d":tr)", R"(ue,"d")"));
  EXPECT_TRUE(Repeats("", R"({"a":1,"a":)"));
  EXPECT_TRUE(Repeats(R"({"":0,")", "\":"));
  EXPECT_TRUE(Repeats(R"([{"a":1,"b":{"a":2},)", R"("b")"));
  // Other objects, values, longer names.
  EXPECT_FALSE(Repeats(R"({"a":{)", R"("a":)"));
  EXPECT_FALSE(Repeats(R"([{"a":1},{)", R"("a":)"));
  EXPECT_FALSE(Repeats(R"({"a":)", R"("a")"));
  EXPECT_FALSE(Repeats(R"({"a":["a","b",)", R"("a")"));
  EXPECT_FALSE(Repeats(R"({"a":1,"a)", "b\""));
  EXPECT_FALSE(Repeats(R"({"a":{"b":1},"c":{)", R"("b":)"));
  EXPECT_FALSE(Repeats(R"({"a":1,"x":{"a":1}},)", R"("a")"));  // behind the end
  // No JSON.
  EXPECT_FALSE(Repeats(R"(The object {"a":1,)", R"("a")"));
  EXPECT_FALSE(Repeats(R"({a:1,)", R"("a")"));
}

TEST(JsonNamesTest, ArgumentElementsOfOneCall) {
  JsonNames names;
  const auto element = [&](const std::string& key) {
    names.Begin(/*opens_tag=*/true);
    names.Append("argument key=\"" + key);
  };
  names.Begin(true);
  names.Append(R"(call tool="f" index="1")");
  element("x");
  EXPECT_FALSE(names.Repeats("\" type="));
  names.Append(R"(" type="string")");
  names.Begin(false);
  names.Append(R"(argument key="x")");  // a value that looks like one
  element("x");
  EXPECT_TRUE(names.Repeats("\""));
  EXPECT_FALSE(names.Repeats("y\""));
  names.Append("y\"");
  names.Begin(true);
  names.Append(R"(call tool="f" index="2")");
  element("x");
  EXPECT_FALSE(names.Repeats("\""));
}

TEST(JsonNamesTest, MasksLoseWhatWouldRepeat) {
  const auto tokenizer = Tokenizer::Load(testing::TinyK3()).value();
  const NameTokens tokens(*tokenizer, tokenizer->vocab_size());
  const auto allowed = [&](const std::string& text, std::vector<uint32_t> mask) {
    JsonNames names;
    names.Append(text);
    names.Narrow(tokens, mask);
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
      if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) ids.push_back(id);
    }
    return ids;
  };
  const std::vector<uint32_t> all(static_cast<size_t>(tokenizer->vocab_size() + 31) / 32, ~0u);
  for (const char* text :
       {R"({"a":1,"a)", R"({"a":1,")", R"({"a":1,)", R"({"a":1,"b":"x)", R"({"a":{"b":1)", "", "{\""}) {
    JsonNames names;
    names.Append(text);
    std::vector<int32_t> expected;
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
      if (tokenizer->IsSpecial(id) || !names.Repeats(tokenizer->TokenBytes(id))) expected.push_back(id);
    }
    EXPECT_EQ(allowed(text, all), expected) << text;
  }
  // Where nothing else is allowed the mask stays: an answer must be able to end.
  std::vector<uint32_t> quote(all.size(), 0);
  const int32_t id = tokenizer->Encode("\"").value()[0];
  quote[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  EXPECT_EQ(allowed(R"({"a":1,"a)", quote), std::vector<int32_t>{id});
}

}  // namespace
}  // namespace k3
