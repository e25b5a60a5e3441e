#include "server/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

GetEnv Env(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> const char* {
    const auto it = values.find(name);
    return it == values.end() ? nullptr : it->second.c_str();
  };
}

struct Fixture {
  Fixture() {
    flags.Bool("cache", &cache, "reuse");
    flags.Int("count", &count, {0, 10}, "how many");
    flags.Int("limit", &limit, {1, 100}, "at most");
    flags.Number("rate", &rate, {0, 1}, "share");
    flags.String("name", &name, "NAME", "who");
    flags.Choice("mode", &mode, {"a", "b"}, "which");
    flags.List("tag", &tags, "TAG", "labels");
    flags.PortNumber("port", &port, "where");
  }
  absl::Status Args(std::vector<std::string> args) {
    absl::Status status = flags.ParseArgs(args, &positional);
    return status.ok() ? flags.Resolve() : status;
  }

  bool cache = true;
  int64_t count = 3;
  std::optional<int64_t> limit;
  double rate = 0.25;
  std::string name;
  std::string mode = "a";
  std::vector<std::string> tags;
  Port port = 80;
  std::vector<std::string> positional;
  FlagSet flags;
};

TEST(FlagsTest, ReadsEveryKindInBothSpellings) {
  Fixture f;
  ASSERT_TRUE(f.Args({"dir", "--count", "7", "--limit=9", "--rate", ".5", "--name=x=y", "--mode", "b", "--tag", "p",
                      "q", "--port", "off", "--no-cache"})
                  .ok());
  EXPECT_EQ(f.count, 7);
  EXPECT_EQ(f.limit, 9);
  EXPECT_EQ(f.rate, 0.5);
  EXPECT_EQ(f.name, "x=y");
  EXPECT_EQ(f.mode, "b");
  EXPECT_THAT(f.tags, ElementsAre("p", "q"));
  EXPECT_EQ(f.port, std::nullopt);
  EXPECT_FALSE(f.cache);
  EXPECT_THAT(f.positional, ElementsAre("dir"));
}

TEST(FlagsTest, UnknownFlagNamesTheNearest) {
  Fixture f;
  EXPECT_THAT(std::string(f.Args({"--cuont", "3"}).message()),
              HasSubstr("unknown flag --cuont; did you mean --count?"));
  Fixture g;
  EXPECT_THAT(std::string(g.Args({"--no-cashe"}).message()), HasSubstr("did you mean --no-cache?"));
  Fixture h;
  EXPECT_THAT(std::string(h.Args({"-port", "1"}).message()), HasSubstr("did you mean --port?"));
}

TEST(FlagsTest, BadValuesNameFlagAndRule) {
  for (const auto& [args, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--count", "11"}, "--count must be from 0 to 10, not \"11\""},
           {{"--count", "1.5"}, "--count must be a whole number, not \"1.5\""},
           {{"--count", "99999999999999999999"}, "--count must be a whole number"},
           {{"--rate", "nan"}, "--rate must be a number"},
           {{"--rate", "-1"}, "--rate must be from 0 to 1"},
           {{"--mode", "c"}, "--mode must be one of a, b, not \"c\""},
           {{"--port", "65536"}, "--port must be a port from 0 to 65535, or off"},
           {{"--cache=perhaps"}, "--cache must be true or false"},
           {{"--no-cache=true"}, "--no-cache takes no value"},
           {{"--name"}, "--name needs a value"},
           {{"--tag", "--count", "1"}, "--tag needs a value"},
           {{"--count", "1", "--count", "2"}, "--count is given twice with different values: 1 and 2"},
           {{"--cache", "--no-cache"}, "--cache is given twice with different values"}}) {
    Fixture f;
    const absl::Status status = f.Args(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST(FlagsTest, CommandLineBeatsEnvironmentBeatsFile) {
  Fixture f;
  ASSERT_TRUE(f.flags.ParseArgs({"--count", "1"}, &f.positional).ok());
  ASSERT_TRUE(f.flags.ParseToml("count = 2\nlimit = 20\nname = \"file\"\ntag = [\"a\", \"b\"]\n", "f.toml").ok());
  ASSERT_TRUE(f.flags.ParseEnv("P_", Env({{"P_COUNT", "3"}, {"P_LIMIT", "30"}, {"P_TAG", "x, y"}})).ok());
  ASSERT_TRUE(f.flags.Resolve().ok());
  EXPECT_EQ(f.count, 1);
  EXPECT_EQ(f.limit, 30);
  EXPECT_EQ(f.name, "file");
  EXPECT_THAT(f.tags, ElementsAre("x", "y"));
  EXPECT_EQ(f.rate, 0.25);
  const std::string values = f.flags.PrintValues();
  EXPECT_THAT(values, HasSubstr("count = 1  # command line\n"));
  EXPECT_THAT(values, HasSubstr("limit = 30  # environment P_LIMIT\n"));
  EXPECT_THAT(values, HasSubstr("name = \"file\"  # file f.toml:3\n"));
  EXPECT_THAT(values, HasSubstr("rate = 0.25  # default\n"));
  EXPECT_THAT(values, HasSubstr("tag = [\"x\", \"y\"]  # environment P_TAG\n"));
}

TEST(FlagsTest, PrintedValuesReadBackAsAFile) {
  Fixture f;
  ASSERT_TRUE(
      f.Args({"--name", "1e5 \"quoted\"", "--limit", "12", "--rate", "0.1", "--port", "off", "--tag", "a,b"}).ok());
  Fixture g;
  ASSERT_TRUE(g.flags.ParseToml(f.flags.PrintValues(), "printed.toml").ok());
  ASSERT_TRUE(g.flags.Resolve().ok());
  EXPECT_EQ(g.name, f.name);
  EXPECT_EQ(g.limit, f.limit);
  EXPECT_EQ(g.rate, f.rate);
  EXPECT_EQ(g.port, f.port);
  EXPECT_EQ(g.tags, f.tags);
}

TEST(FlagsTest, FileErrorsNameFileLineAndKey) {
  Fixture f;
  EXPECT_THAT(std::string(f.flags.ParseToml("count = = 1", "f.toml").message()), HasSubstr("f.toml:1:"));
  EXPECT_THAT(std::string(f.flags.ParseToml("coumt = 1", "f.toml").message()),
              HasSubstr("unknown key in f.toml: coumt; did you mean count?"));
  EXPECT_THAT(std::string(f.flags.ParseToml("[count]\na = 1", "f.toml").message()),
              HasSubstr("f.toml:1: count must be"));
  ASSERT_TRUE(f.flags.ParseToml("\ncount = 12", "f.toml").ok());
  EXPECT_THAT(std::string(f.flags.Resolve().message()), HasSubstr("f.toml:2: count must be from 0 to 10, not \"12\""));
}

TEST(FlagsTest, ServiceLinkVariablesOfKubernetesAreNoPorts) {
  Fixture f;
  ASSERT_TRUE(f.flags.ParseEnv("P_", Env({{"P_PORT", "tcp://10.0.0.1:8000"}})).ok());
  ASSERT_TRUE(f.flags.Resolve().ok());
  EXPECT_EQ(f.port, 80);
}

TEST(FlagsTest, VariablesThatAreNoFlagsAreNamed) {
  Fixture f;
  EXPECT_THAT(f.flags.UnknownVariables("P_", {"P_COUNT", "P_CUONT", "PATH", "P_SERVICE_HOST", "P_PORT_80_TCP_ADDR",
                                              "P_SERVICE_PORT_HTTP", "P_PORT", "P_"}),
              ElementsAre(HasSubstr("unknown environment variable P_ "),
                          HasSubstr("unknown environment variable P_CUONT has no effect; did you mean P_COUNT?")));
}

TEST(FlagsTest, EditDistanceCountsSwapsOnce) {
  EXPECT_EQ(EditDistance("abc", "abc"), 0);
  EXPECT_EQ(EditDistance("abc", "acb"), 1);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
}

}  // namespace
}  // namespace k3
