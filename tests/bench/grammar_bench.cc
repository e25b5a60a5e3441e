// Structured output for one vocabulary: how long usual grammars take to compile, what they weigh, and what 64 rows cost
// a step of the engine. Rows follow the grammar with tokens drawn from a fixed seed among those allowed.
//   cpu/grammar_compile/*   milliseconds on an idle core
//   cpu/grammar_bytes/*     MB of the compiled grammar
//   cpu/grammar_masks/*     microseconds that a step of 64 rows keeps the engine's thread, for telling each row its
//   token
//                           and for the next masks: median and slowest of the walk
// Usage: grammar_bench TOKENIZER_DIR [--only NAME] [--rows N] [--steps N] [--ebnf FILE] [--json FILE]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grammar/answer_grammar.h"
#include "server/grammar/grammar_engine.h"
#include "server/text/json_parser.h"
#include "server/text/tokenizer.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

struct Case {
  std::string name;
  GenerationRequest request;
};

GenerationRequest Constrained(RequestedConstraint::Kind kind, const std::string& text, const std::string& tools = "") {
  GenerationRequest request;
  ChatRequest chat;
  chat.messages.emplace_back();
  chat.messages[0].role = "user";
  chat.messages[0].content = ChatContent::Text("x");
  if (!tools.empty()) {
    chat.tools = ParseJson(tools).value();
    chat.options.tool_choice = ToolChoice::kRequired;
  }
  request.input = std::move(chat);
  request.constraint.kind = kind;
  request.constraint.text = text;
  return request;
}

std::string Repeat(int count, const std::string& separator, const auto& piece) {
  std::string out;
  for (int i = 0; i < count; ++i) absl::StrAppend(&out, i > 0 ? separator : "", piece(i));
  return out;
}

// Parameters of usual shape: words, numbers, a choice, a list and an object.
std::string Object(int properties) {
  static const char* const kValues[] = {
      R"({"type":"string","description":"free words"})",
      R"({"type":"integer","minimum":0,"maximum":1000})",
      R"({"type":"string","enum":["celsius","fahrenheit","kelvin"]})",
      R"({"type":"array","items":{"type":"string"},"maxItems":8})",
      R"({"anyOf":[{"type":"number"},{"type":"null"}]})",
      R"({"type":"object","properties":{"x":{"type":"number"},"y":{"type":"number"}},"required":["x","y"],"additionalProperties":false})",
      R"({"type":"string","pattern":"^[A-Z]{2,3}-[0-9]{4}$"})",
      R"({"type":"boolean"})"};
  return absl::StrCat(
      R"({"type":"object","properties":{)",
      Repeat(properties, ",",
             [](int i) { return absl::StrCat("\"property_", i, "\":", kValues[static_cast<size_t>(i) % 8]); }),
      R"(},"required":[)",
      Repeat((properties + 1) / 2, ",", [](int i) { return absl::StrCat("\"property_", 2 * i, "\""); }),
      R"(],"additionalProperties":false})");
}

std::string Tools(int count) {
  return absl::StrCat("[",
                      Repeat(count, ",",
                             [](int i) {
                               return absl::StrCat(R"({"type":"function","function":{"name":"tool_)", i,
                                                   R"(","strict":true,"parameters":)", Object(6), "}}");
                             }),
                      "]");
}

std::vector<Case> Cases(const std::string& ebnf) {
  using Kind = RequestedConstraint::Kind;
  const auto words = [](int i) { return absl::StrCat("\"choice number ", i, "\""); };
  if (!ebnf.empty()) return {{"ebnf", Constrained(Kind::kEbnf, ebnf)}};
  return {
      {"json_object", Constrained(Kind::kJsonObject, "")},
      {"object_6", Constrained(Kind::kJsonSchema, Object(6))},
      {"object_40", Constrained(Kind::kJsonSchema, Object(40))},
      {"object_200", Constrained(Kind::kJsonSchema, Object(200))},
      {"enum_1000", Constrained(Kind::kJsonSchema, absl::StrCat(R"({"enum":[)", Repeat(1000, ",", words), "]}"))},
      {"string_2000", Constrained(Kind::kJsonSchema, R"({"type":"string","maxLength":2000})")},
      {"tree", Constrained(Kind::kJsonSchema,
                           R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"name":{"type":
          "string"},"next":{"type":"array","items":{"$ref":"#/$defs/node"}}},"required":["name","next"]}}})")},
      {"regex", Constrained(Kind::kRegex, "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z: .{1,100}")},
      {"tools_1", Constrained(Kind::kNone, "", Tools(1))},
      {"tools_10", Constrained(Kind::kNone, "", Tools(10))},
      {"tools_100", Constrained(Kind::kNone, "", Tools(100))},
  };
}

class Walk {
 public:
  Walk(std::unique_ptr<TokenConstraint> constraint, uint32_t seed)
      : constraint_(std::move(constraint)), random_(seed) {}

  void FillMask(std::vector<uint32_t>& mask) { constraint_->FillMask(mask); }

  // The next token; -1 at a dead end, which then stays.
  int32_t Choose(const std::vector<uint32_t>& mask) {
    std::vector<int32_t> allowed;
    for (size_t word = 0; word < mask.size(); ++word) {
      for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) {
        allowed.push_back(static_cast<int32_t>(word * 32) + __builtin_ctz(bits));
      }
    }
    return allowed.empty() ? -1 : allowed[random_() % allowed.size()];
  }

  void Accept(int32_t token) {
    if (token >= 0) constraint_->Accept(token);
  }

 private:
  std::unique_ptr<TokenConstraint> constraint_;
  std::mt19937 random_;
};

int Main(int argc, char** argv) {
  std::string only, json, ebnf;
  int rows = 64, steps = 60;
  if (argc < 2 || argc % 2 != 0) {
    std::fprintf(stderr, "usage: %s TOKENIZER_DIR [--only NAME] [--rows N] [--steps N] [--json FILE]\n", argv[0]);
    return 2;
  }
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--only") only = argv[i + 1];
    if (flag == "--rows") rows = std::atoi(argv[i + 1]);
    if (flag == "--steps") steps = std::atoi(argv[i + 1]);
    if (flag == "--json") json = argv[i + 1];
    if (flag == "--ebnf") {
      std::ifstream file(argv[i + 1]);
      ebnf.assign(std::istreambuf_iterator<char>(file), {});
    }
  }
  const auto tokenizer = Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().ToString().c_str());
    return 1;
  }
  const int32_t vocab_size = (*tokenizer)->vocab_size();
  const auto begin = Clock::now();
  const auto engine = MakeGrammarEngine(**tokenizer, vocab_size, (*tokenizer)->stop_ids());
  if (engine == nullptr) {
    std::fprintf(stderr, "built without structured output\n");
    return 1;
  }
  std::vector<bench::Result> results = {{"cpu/grammar_start", Milliseconds(begin), "ms", {}, {}, {}}};
  std::printf("%d tokens, prepared in %.0f ms\n%-14s %12s %10s %24s\n", vocab_size, results[0].value, "", "compile ms",
              "MB", "masks of rows us (max)");
  ChatPrompt prompt;
  prompt.open_channel = OpenChannel::kReasoning;
  std::vector<std::vector<uint32_t>> masks(static_cast<size_t>(rows),
                                           std::vector<uint32_t>(static_cast<size_t>(vocab_size + 31) / 32));
  for (const Case& c : Cases(ebnf)) {
    if (!only.empty() && c.name != only) continue;
    // Raw prompts where the answer alone matters, chats for tools.
    const bool chat = c.request.constraint.kind == RequestedConstraint::Kind::kNone;
    const auto grammar =
        BuildAnswerGrammar(c.request, **tokenizer, DetectChatFormat(**tokenizer), chat ? &prompt : nullptr);
    if (!grammar.ok()) {
      std::fprintf(stderr, "%s: %s\n", c.name.c_str(), grammar.status().ToString().c_str());
      return 1;
    }
    const auto start = Clock::now();
    const auto compiled = engine->Compile((*grammar)->root, std::chrono::minutes(5));
    const double compile = Milliseconds(start);
    if (!compiled.ok()) {
      std::printf("%-14s %12.1f %s\n", c.name.c_str(), compile, compiled.status().ToString().c_str());
      continue;
    }
    std::vector<Walk> walks;
    for (int row = 0; row < rows; ++row) walks.emplace_back((*compiled)->NewConstraint(), static_cast<uint32_t>(row));
    std::vector<double> times;
    std::vector<int32_t> tokens(walks.size(), -1);
    for (int step = 0; step <= steps; ++step) {
      for (auto& mask : masks) std::fill(mask.begin(), mask.end(), ~0u);
      const auto fill = Clock::now();
      for (size_t row = 0; row < walks.size(); ++row) walks[row].Accept(tokens[row]);
      for (size_t row = 0; row < walks.size(); ++row) walks[row].FillMask(masks[row]);
      if (step > 0) times.push_back(1000 * Milliseconds(fill));
      for (size_t row = 0; row < walks.size(); ++row) tokens[row] = walks[row].Choose(masks[row]);
    }
    std::sort(times.begin(), times.end());
    const double bytes = static_cast<double>((*compiled)->bytes()) * 1e-6;
    std::printf("%-14s %12.1f %10.2f %14.0f (%.0f)\n", c.name.c_str(), compile, bytes, times[times.size() / 2],
                times.back());
    std::fflush(stdout);
    results.push_back({"cpu/grammar_compile/" + c.name, compile, "ms", {}, {}, {}});
    results.push_back({"cpu/grammar_bytes/" + c.name, bytes, "MB", {}, {}, {}});
    results.push_back({"cpu/grammar_masks/" + c.name + "/median", times[times.size() / 2], "us", {}, {}, {}});
    results.push_back({"cpu/grammar_masks/" + c.name + "/max", times.back(), "us", {}, {}, {}});
  }
  bench::WriteResults(json, results, bench::CpuName(), argc, argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
