#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "server/grammar/grammar_engine.h"
#include "server/text/json_parser.h"
#include "server/text/json_value.h"
#include "server/text/json_writer.h"
#include "xgrammar/xgrammar.h"

// The grammar library's side: trees become its structural tags, its matchers become token constraints.
namespace k3 {
namespace {

// A step that takes this long holds every other request up.
constexpr std::chrono::milliseconds kSlowestStep{50};
constexpr int kProbeSteps = 48;

// Control tokens take part by id only: in the vocabulary they begin with a byte that no text has.
constexpr char kControlByte = '\xff';

class XgrammarConstraint final : public TokenConstraint {
 public:
  XgrammarConstraint(xgrammar::CompiledGrammar grammar, std::vector<int32_t> stop_ids, std::string begun)
      : grammar_(std::move(grammar)),
        stop_ids_(std::move(stop_ids)),
        begun_(std::move(begun)),
        matcher_(grammar_, stop_ids_),
        fits_(begun_.empty() || matcher_.AcceptString(begun_)) {}

  bool fits() const { return fits_; }

  bool FillMask(std::span<uint32_t> mask) override {
    if (matcher_.IsTerminated()) {
      // The answer is over, yet the client wants more tokens (ignore_eos): end it over and over, which adds no text.
      std::fill(mask.begin(), mask.end(), 0u);
      for (const int32_t id : stop_ids_) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
      return true;
    }
    const auto begin = std::chrono::steady_clock::now();
    int64_t shape = static_cast<int64_t>(mask.size());
    DLTensor tensor{};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = &shape;
    const bool restricts = matcher_.FillNextTokenBitmask(&tensor);
    if (std::chrono::steady_clock::now() - begin > kSlowestStep && ++slow_steps_ > 3) {
      // Too ambiguous to follow: nothing is allowed any more, which ends this request and spares the others.
      std::fill(mask.begin(), mask.end(), 0u);
      return true;
    }
    return restricts;
  }

  bool Accept(int32_t token) override {
    if (matcher_.IsTerminated()) return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
    return matcher_.AcceptToken(token);
  }

  std::unique_ptr<TokenConstraint> Fork() const override {
    return std::make_unique<XgrammarConstraint>(grammar_, stop_ids_, begun_);
  }

 private:
  xgrammar::CompiledGrammar grammar_;
  std::vector<int32_t> stop_ids_;
  std::string begun_;
  xgrammar::GrammarMatcher matcher_;
  bool fits_;
  int slow_steps_ = 0;
};

class XgrammarGrammar final : public CompiledGrammar {
 public:
  XgrammarGrammar(xgrammar::CompiledGrammar grammar, std::vector<int32_t> stop_ids)
      : grammar_(std::move(grammar)), stop_ids_(std::move(stop_ids)), bytes_(grammar_.MemorySizeBytes()) {}

  std::unique_ptr<TokenConstraint> NewConstraint(const std::string& begun) const override {
    auto constraint = std::make_unique<XgrammarConstraint>(grammar_, stop_ids_, begun);
    if (!constraint->fits()) return nullptr;
    return constraint;
  }
  size_t bytes() const override { return bytes_; }

 private:
  xgrammar::CompiledGrammar grammar_;
  std::vector<int32_t> stop_ids_;
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

// A grammar's printed form, made fit to be read again: it writes code points up to 255 as \xHH, but reads as many hex
// digits as follow. And strings of limited length let control characters through, which JSON forbids.
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
  absl::StrReplaceAll({{R"([^\"\\\r\n])", R"([^\"\\\0-\u001f])"}}, &out);
  return out;
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
absl::Status Probe(const xgrammar::CompiledGrammar& grammar, const std::vector<int32_t>& stop_ids, int32_t vocab_size) {
  XgrammarConstraint constraint(grammar, stop_ids, "");
  std::vector<uint32_t> mask(static_cast<size_t>(vocab_size + 31) / 32);
  std::vector<int32_t> allowed;
  uint32_t random = 12345;
  for (int step = 0; step < kProbeSteps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    std::fill(mask.begin(), mask.end(), ~0u);
    constraint.FillMask(mask);
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
    if (!constraint.Accept(token)) return absl::OkStatus();
    if (std::chrono::steady_clock::now() - begin > kSlowestStep) {
      return absl::InvalidArgumentError("is too ambiguous: following it would take too long");
    }
    if (std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end()) return absl::OkStatus();
  }
  return absl::OkStatus();
}

class XgrammarEngine final : public GrammarEngine {
 public:
  XgrammarEngine(xgrammar::TokenizerInfo info, int32_t vocab_size, std::vector<int32_t> stop_ids)
      : info_(std::move(info)), vocab_size_(vocab_size), stop_ids_(std::move(stop_ids)) {}

  absl::StatusOr<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarNode& root) const override {
    try {
      JsonValue tag = Format("structural_tag");
      tag.Set("format", ToFormat(root));
      const auto grammar = xgrammar::Grammar::FromStructuralTag(WriteJson(tag, {.number_as_written = true}), info_);
      if (const auto* error = std::get_if<xgrammar::StructuralTagError>(&grammar)) {
        return std::visit([](const auto& e) { return absl::InvalidArgumentError(WithoutPlace(e.what())); }, *error);
      }
      // One thread and no cache of its own: the pool has both.
      xgrammar::GrammarCompiler compiler(info_, /*max_threads=*/1, /*cache_enabled=*/false);
      xgrammar::CompiledGrammar compiled = compiler.CompileGrammar(std::get<xgrammar::Grammar>(grammar));
      const absl::Status status = Probe(compiled, stop_ids_, vocab_size_);
      if (!status.ok()) return status;
      return std::make_shared<XgrammarGrammar>(std::move(compiled), stop_ids_);
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(WithoutPlace(error.what()));
    }
  }

 private:
  const xgrammar::TokenizerInfo info_;
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
  return std::make_unique<XgrammarEngine>(std::move(info), vocab_size, std::move(stop_ids));
}

}  // namespace k3
