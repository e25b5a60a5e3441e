#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/grammar/grammar_engine.h"
#include "server/grammar/length_limits.h"
#include "server/grammar/xgrammar_deadline.h"
#include "server/text/json_parser.h"
#include "server/text/json_value.h"
#include "server/text/json_writer.h"
#include "xgrammar/xgrammar.h"
// The library's own headers, beside its public ones: where in the grammar an answer is, no public call tells.
#include "earley_parser.h"
#include "grammar_impl.h"

// The grammar library's side: trees become its structural tags, its matchers become token constraints.
namespace k3 {
namespace {

// Seconds of processor time for one token: masks are made between the steps of the engine, so longer ones would hold
// every other request up. Usual grammars need 0.00003 of them at 160,000 tokens.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kSlowness = 10;
#else
constexpr double kSlowness = 1;
#endif
constexpr double kSlowestStep = 0.01 * kSlowness;
constexpr double kUsualStep = 0.001 * kSlowness;  // what exceeds it adds up,
constexpr double kAllowance = 0.1 * kSlowness;    // to no more than this
constexpr int kProbeSteps = 48;

// Control tokens take part by id only: in the vocabulary they begin with a byte that no text has.
constexpr char kControlByte = '\xff';

// The parser inside a matcher, whose first base it is.
class ParserView : public xgrammar::EarleyParser {
 public:
  // What may come next, and how many positions the answer has: one a byte of text, one a control token.
  static const auto& States(xgrammar::GrammarMatcher& matcher) {
    return Parser(matcher)->*(&ParserView::scanable_state_history_);
  }

 private:
  static xgrammar::EarleyParser* Parser(xgrammar::GrammarMatcher& matcher) {
    return reinterpret_cast<xgrammar::EarleyParser*>(matcher.ImplPtr());
  }
};

// A grammar with the strings that are counted beside it.
struct Limited {
  Limited(xgrammar::CompiledGrammar grammar_in, std::vector<int32_t> stop_ids_in,
          std::shared_ptr<const TokenLengths> lengths_in)
      : grammar(std::move(grammar_in)),
        stop_ids(std::move(stop_ids_in)),
        lengths(std::move(lengths_in)),
        tokens(grammar.GetTokenizerInfo()),
        words(tokens.GetDecodedVocab()) {
    const xgrammar::Grammar rules = grammar.GetGrammar();
    int32_t smallest_most = -1, largest_least = 0;
    for (int32_t rule = 0; rule < rules->NumRules(); ++rule) {
      limits.push_back(LengthLimit::FromRuleName(rules->GetRule(rule).name));
      if (!limits.back().has_value()) continue;
      any = true;
      if (!limits.back()->json) continue;
      json = true;
      if (limits.back()->most >= 0 && (smallest_most < 0 || limits.back()->most < smallest_most)) {
        smallest_most = limits.back()->most;
      }
      largest_least = std::max(largest_least, limits.back()->least);
    }
    if (json) crossing = lengths->Crossing(smallest_most, largest_least);
  }

  xgrammar::CompiledGrammar grammar;
  std::vector<int32_t> stop_ids;
  std::shared_ptr<const TokenLengths> lengths;
  xgrammar::TokenizerInfo tokens;
  const std::vector<std::string>& words;           // of `tokens`, control tokens with their first byte
  std::vector<std::optional<LengthLimit>> limits;  // per rule
  bool any = false;
  bool json = false;
  std::vector<uint32_t> crossing;  // where there are any in JSON: the tokens that may be chosen at all
};

class XgrammarConstraint final : public TokenConstraint {
 public:
  XgrammarConstraint(std::shared_ptr<const Limited> grammar, std::string begun)
      : grammar_(std::move(grammar)),
        begun_(std::move(begun)),
        matcher_(grammar_->grammar, grammar_->stop_ids),
        fits_(begun_.empty() || matcher_.AcceptString(begun_)) {
    if (!grammar_->any) return;
    text_ = begun_;
    const auto [limit, length] = Limit();
    fits_ = fits_ && (!limit.has_value() || limit->most < 0 || length <= limit->most);
  }

  bool fits() const { return fits_; }
  bool given_up() const { return given_up_; }  // a step took too long

  bool FillMask(std::span<uint32_t> mask) override {
    if (matcher_.IsTerminated()) {
      // The answer is over, yet the client wants more tokens (ignore_eos): end it over and over, which adds no text.
      std::fill(mask.begin(), mask.end(), 0u);
      for (const int32_t id : grammar_->stop_ids) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
      return true;
    }
    int64_t shape = static_cast<int64_t>(mask.size());
    DLTensor tensor{};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = &shape;
    bool restricts = true;
    const double begin = xgrammar::ProcessorSeconds();
    try {
      const xgrammar::ScopedDeadline deadline(kSlowestStep);
      restricts = !given_up_ && matcher_.FillNextTokenBitmask(&tensor);
    } catch (const std::exception&) {
      given_up_ = true;
    }
    Spend(begin);
    if (given_up_) {
      // Too ambiguous to follow: nothing is allowed any more, which ends this request and spares the others.
      std::fill(mask.begin(), mask.end(), 0u);
      return true;
    }
    if (!grammar_->any) return restricts;
    if (!restricts) std::fill(mask.begin(), mask.end(), ~0u);
    for (size_t word = 0; word < grammar_->crossing.size(); ++word) mask[word] &= grammar_->crossing[word];
    if (const auto [limit, length] = Limit(); limit.has_value()) grammar_->lengths->Narrow(*limit, length, mask);
    return true;
  }

  bool Accept(int32_t token) override {
    if (matcher_.IsTerminated()) {
      return std::find(grammar_->stop_ids.begin(), grammar_->stop_ids.end(), token) != grammar_->stop_ids.end();
    }
    if (given_up_) return false;
    const double begin = xgrammar::ProcessorSeconds();
    const bool accepted = AcceptNow(token);
    Spend(begin);
    return accepted;
  }

  std::unique_ptr<TokenConstraint> Fork() const override {
    return std::make_unique<XgrammarConstraint>(grammar_, begun_);
  }

 private:
  void Spend(double begin) {
    const double seconds = xgrammar::ProcessorSeconds() - begin;
    spent_ = std::max(0.0, spent_ + seconds - kUsualStep);
    if (seconds > kSlowestStep || spent_ > kAllowance) given_up_ = true;
  }

  bool AcceptNow(int32_t token) {
    if (!grammar_->any) return matcher_.AcceptToken(token);
    const std::vector<std::string>& words = grammar_->words;
    if (token < 0 || static_cast<size_t>(token) >= words.size()) return false;
    const auto& crossing = grammar_->crossing;
    if (!crossing.empty() && (crossing[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) return false;
    const auto [limit, length] = Limit();
    if (limit.has_value() && !grammar_->lengths->Fits(*limit, length, token)) return false;
    if (!matcher_.AcceptToken(token)) return false;
    const std::string& bytes = words[static_cast<size_t>(token)];
    if (!bytes.starts_with(kControlByte)) text_ += bytes;
    return true;
  }

  // The limit of the string that the answer is in, and the characters that it has. Of several ways to read the answer
  // the strictest: what it leaves fits all of them.
  std::pair<std::optional<LengthLimit>, int32_t> Limit() {
    const auto& history = ParserView::States(matcher_);
    const int32_t position = static_cast<int32_t>(history.size()) - 1;
    std::optional<LengthLimit> found;
    int32_t found_length = 0;
    for (const xgrammar::ParserState& state : history[position]) {
      if (state.rule_id < 0 || !grammar_->limits[static_cast<size_t>(state.rule_id)].has_value()) continue;
      const LengthLimit& limit = *grammar_->limits[static_cast<size_t>(state.rule_id)];
      const auto bytes = static_cast<size_t>(position - std::max(0, state.rule_start_pos));
      const int32_t length =
          CountCharacters(std::string_view(text_).substr(text_.size() - std::min(bytes, text_.size())));
      if (!found.has_value()) {
        found = limit;
        found_length = length;
        continue;
      }
      // In terms of the first one's length.
      const int32_t shift = found_length - length;
      found->least = std::max(found->least, limit.least + shift);
      if (limit.most >= 0)
        found->most = found->most < 0 ? limit.most + shift : std::min(found->most, limit.most + shift);
    }
    return {found, found_length};
  }

  const std::shared_ptr<const Limited> grammar_;
  const std::string begun_;
  std::string text_;  // accepted so far, without control tokens; only where strings are counted
  xgrammar::GrammarMatcher matcher_;
  bool fits_;
  bool given_up_ = false;
  double spent_ = 0;  // seconds above the usual, lately
};

class XgrammarGrammar final : public CompiledGrammar {
 public:
  explicit XgrammarGrammar(std::shared_ptr<const Limited> grammar)
      : grammar_(std::move(grammar)), bytes_(grammar_->grammar.MemorySizeBytes()) {}

  std::unique_ptr<TokenConstraint> NewConstraint(const std::string& begun) const override {
    auto constraint = std::make_unique<XgrammarConstraint>(grammar_, begun);
    if (!constraint->fits()) return nullptr;
    return constraint;
  }
  size_t bytes() const override { return bytes_; }

 private:
  std::shared_ptr<const Limited> grammar_;
  size_t bytes_;
};

JsonValue Format(const char* type) {
  JsonValue value = JsonValue::Object();
  value.Set("type", JsonValue::String(type));
  return value;
}

JsonValue Ids(const std::vector<int32_t>& ids) {
  JsonValue list = JsonValue::Array();
  for (const int32_t id : ids) list.items.push_back(JsonValue::Integer(id));
  return list;
}

JsonValue EbnfFormat(std::string ebnf) {
  JsonValue value = Format("grammar");
  value.Set("grammar", JsonValue::String(std::move(ebnf)));
  return value;
}

JsonValue ToFormat(const GrammarNode& node);

JsonValue ToFormats(const std::vector<GrammarNode>& nodes) {
  JsonValue list = JsonValue::Array();
  for (const GrammarNode& node : nodes) list.items.push_back(ToFormat(node));
  return list;
}

// Strings of limited length, printed as NAME_characters{LEAST, MOST}, are counted beside the grammar (LengthLimit):
// they refer to a rule of that name instead.
std::string CountStrings(const std::string& printed) {
  static constexpr std::string_view kSuffix = "_characters{";
  std::string out;
  std::set<std::string> rules;
  size_t begin = 0;
  while (true) {
    const size_t brace = printed.find(kSuffix, begin);
    if (brace == std::string::npos) break;
    size_t name = printed.find_last_of(" (\n", brace);
    name = name == std::string::npos ? 0 : name + 1;
    LengthLimit limit;
    int end = 0;
    const char* bounds = printed.c_str() + brace + kSuffix.size();
    if (std::sscanf(bounds, "%d, %d}%n", &limit.least, &limit.most, &end) != 2 || end == 0) {
      throw std::runtime_error("a string's limits cannot be read");
    }
    out.append(printed, begin, name - begin);
    out += limit.RuleName();
    rules.insert(limit.RuleName());
    begin = brace + kSuffix.size() + static_cast<size_t>(end);
  }
  out.append(printed, begin);
  for (const std::string& rule : rules) absl::StrAppend(&out, rule, R"( ::= Regex("[^\"\\\\\\x00-\\x1f]*"))", "\n");
  return out;
}

// A grammar's printed form, made fit to be read again: it writes code points up to 255 as \xHH, but reads as many hex
// digits as follow. And names of further properties may be written with escapes, which makes them equal to declared
// ones.
std::string Reprint(const std::string& printed) {
  std::string out;
  out.reserve(printed.size() + printed.size() / 8);
  for (size_t i = 0; i < printed.size(); ++i) {
    out.push_back(printed[i]);
    if (printed[i] != '\\' || i + 1 == printed.size()) continue;
    ++i;
    if (printed[i] == 'x') {
      out.append("u00");
    } else {
      out.push_back(printed[i]);
    }
  }
  // In the rules that name further properties, until the name has left those of the declared ones.
  static constexpr std::string_view kEscape = R"( | ("\\" basic_escape basic_string_sub))";
  for (size_t line = 0; line < out.size();) {
    size_t end = std::min(out.find('\n', line), out.size());
    const size_t body = out.find(" ::= ", line);
    if (body < end && out.substr(line, body - line).find("_addl_key") != std::string::npos) {
      for (size_t at = out.find(kEscape, body); at < end; at = out.find(kEscape, at)) {
        out.erase(at, kEscape.size());
        end -= kEscape.size();
      }
    }
    line = end + 1;
  }
  return CountStrings(out);
}

// The tree inside a client's document: {"format": ...}, or the older form of begins and triggers.
JsonValue ClientFormat(const std::string& text) {
  absl::StatusOr<JsonValue> tag = ParseJson(text, {.max_depth = 64});
  if (!tag.ok()) throw std::runtime_error(std::string(tag.status().message()));
  if (const JsonValue* format = tag->Find("format")) return *format;
  const JsonValue* structures = tag->Find("structures");
  const JsonValue* triggers = tag->Find("triggers");
  if (structures == nullptr || !structures->is_array() || triggers == nullptr) {
    throw std::runtime_error("a structural tag needs a format, or structures and triggers");
  }
  JsonValue tags = JsonValue::Array();
  for (const JsonValue& structure : structures->items) {
    JsonValue schema = Format("json_schema");
    JsonValue item = Format("tag");
    for (const char* key : {"begin", "end", "schema"}) {
      const JsonValue* member = structure.Find(key);
      if (member == nullptr) throw std::runtime_error(absl::StrCat("a structure needs a member ", key));
      if (key == std::string_view("schema")) {
        schema.Set("json_schema", *member);
        item.Set("content", schema);
      } else {
        item.Set(key, *member);
      }
    }
    tags.items.push_back(std::move(item));
  }
  JsonValue value = Format("triggered_tags");
  value.Set("triggers", *triggers);
  value.Set("tags", std::move(tags));
  return value;
}

// The library throws where a schema, pattern or grammar is wrong.
JsonValue ToFormat(const GrammarNode& node) {
  using Kind = GrammarNode::Kind;
  JsonValue value;
  switch (node.kind) {
    case Kind::kLiteral:
      value = Format("const_string");
      value.Set("value", JsonValue::String(node.text));
      break;
    case Kind::kText:
      value = EbnfFormat("root ::= [^]*");
      break;
    case Kind::kToken:
      value = Format("token");
      value.Set("token", JsonValue::Integer(node.ids[0]));
      break;
    case Kind::kAnyTokens:
      value = Format("any_tokens");
      value.Set("exclude_tokens", Ids(node.ids));
      break;
    case Kind::kJsonSchema: {
      // The library's own tags allow white space without end, in which weak models get lost.
      const xgrammar::Grammar grammar =
          xgrammar::Grammar::FromJSONSchema(node.text, /*any_whitespace=*/!node.compact, /*indent=*/std::nullopt,
                                            std::pair<std::string, std::string>(",", ":"),
                                            /*strict_mode=*/true, node.compact ? std::nullopt : std::optional<int>(1));
      value = EbnfFormat(Reprint(grammar.ToString()));
      break;
    }
    case Kind::kRegex:
      value = Format("regex");
      value.Set("pattern", JsonValue::String(node.text));
      break;
    case Kind::kEbnf:
      value = EbnfFormat(node.text);
      break;
    case Kind::kStructuralTag:
      value = ClientFormat(node.text);
      break;
    case Kind::kSequence:
    case Kind::kChoice:
      value = Format(node.kind == Kind::kSequence ? "sequence" : "or");
      value.Set("elements", ToFormats(node.children));
      break;
    case Kind::kOptional:
    case Kind::kOneOrMore:
      value = Format(node.kind == Kind::kOptional ? "optional" : "plus");
      value.Set("content", ToFormat(node.children[0]));
      break;
  }
  return value;
}

// The library's messages begin with the time and a line of its source.
std::string WithoutPlace(const std::string& message) {
  const size_t file = message.rfind(".cc:");
  const size_t end = file == std::string::npos ? file : message.find(": ", file);
  return end == std::string::npos ? message : message.substr(end + 2);
}

// Follows the grammar for a while, choosing tokens in an arbitrary fixed way, to find out whether steps take long.
absl::Status Probe(const std::shared_ptr<const Limited>& grammar, int32_t vocab_size) {
  const std::vector<int32_t>& stop_ids = grammar->stop_ids;
  XgrammarConstraint constraint(grammar, "");
  std::vector<uint32_t> mask(static_cast<size_t>(vocab_size + 31) / 32);
  std::vector<int32_t> allowed;
  uint32_t random = 12345;
  for (int step = 0; step < kProbeSteps; ++step) {
    std::fill(mask.begin(), mask.end(), ~0u);
    constraint.FillMask(mask);
    if (constraint.given_up()) {
      return absl::InvalidArgumentError("is too ambiguous: following it would take too long");
    }
    allowed.clear();
    for (int32_t id = 0; id < vocab_size; ++id) {
      if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
    }
    if (allowed.empty()) {
      if (step == 0) return absl::InvalidArgumentError("no text fits");
      return absl::OkStatus();
    }
    random = random * 1664525u + 1013904223u;
    const int32_t token = allowed[(random >> 8) % allowed.size()];
    const bool accepted = constraint.Accept(token);
    if (constraint.given_up()) {
      return absl::InvalidArgumentError("is too ambiguous: following it would take too long");
    }
    if (!accepted) return absl::OkStatus();
    if (std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end()) return absl::OkStatus();
  }
  return absl::OkStatus();
}

class XgrammarEngine final : public GrammarEngine {
 public:
  XgrammarEngine(xgrammar::TokenizerInfo info, const Tokenizer& tokenizer, int32_t vocab_size,
                 std::vector<int32_t> stop_ids)
      : info_(std::move(info)),
        lengths_(std::make_shared<const TokenLengths>(tokenizer, vocab_size)),
        vocab_size_(vocab_size),
        stop_ids_(std::move(stop_ids)) {}

  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode& root,
                                                                 std::chrono::milliseconds time_limit) const override {
    try {
      const xgrammar::ScopedDeadline deadline(std::chrono::duration<double>(time_limit).count());
      JsonValue tag = Format("structural_tag");
      tag.Set("format", ToFormat(root));
      const auto grammar = xgrammar::Grammar::FromStructuralTag(WriteJson(tag, {.number_as_written = true}), info_);
      if (const auto* error = std::get_if<xgrammar::StructuralTagError>(&grammar)) {
        return std::visit([](const auto& e) { return absl::InvalidArgumentError(WithoutPlace(e.what())); }, *error);
      }
      // One thread and no cache of its own: the pool has both.
      xgrammar::GrammarCompiler compiler(info_, /*max_threads=*/1, /*cache_enabled=*/false);
      auto compiled = std::make_shared<const Limited>(compiler.CompileGrammar(std::get<xgrammar::Grammar>(grammar)),
                                                      stop_ids_, lengths_);
      const absl::Status status = Probe(compiled, vocab_size_);
      if (!status.ok()) return status;
      return std::make_shared<XgrammarGrammar>(std::move(compiled));
    } catch (const xgrammar::DeadlinePassed&) {
      return absl::DeadlineExceededError("takes too long to compile");
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(WithoutPlace(error.what()));
    }
  }

 private:
  const xgrammar::TokenizerInfo info_;
  const std::shared_ptr<const TokenLengths> lengths_;
  const int32_t vocab_size_;
  const std::vector<int32_t> stop_ids_;
};

}  // namespace

std::unique_ptr<GrammarEngine> MakeGrammarEngine(const Tokenizer& tokenizer, int32_t vocab_size,
                                                 std::vector<int32_t> stop_ids) {
  std::vector<std::string> vocabulary;
  const int32_t known = std::min(vocab_size, tokenizer.vocab_size());
  vocabulary.reserve(static_cast<size_t>(known));
  for (int32_t id = 0; id < known; ++id) {
    const std::string bytes(tokenizer.TokenBytes(id));
    vocabulary.push_back(tokenizer.IsSpecial(id) ? kControlByte + bytes : bytes);
  }
  xgrammar::TokenizerInfo info(vocabulary, xgrammar::VocabType::RAW, vocab_size, stop_ids);
  return std::make_unique<XgrammarEngine>(std::move(info), tokenizer, vocab_size, std::move(stop_ids));
}

}  // namespace k3
