#include "server/grammar/xgrammar_answer.h"

#include <algorithm>
#include <exception>
#include <string_view>

#include "server/grammar/xgrammar_deadline.h"
// The library's own headers, beside its public ones: where in the grammar an answer is, no public call tells.
#include "earley_parser.h"
#include "grammar_impl.h"

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

}  // namespace

AnswerRules::AnswerRules(xgrammar::CompiledGrammar grammar_in, std::vector<int32_t> stop_ids_in,
                         std::shared_ptr<const TokenLengths> lengths_in, std::shared_ptr<const NameTokens> names_in)
    : grammar(std::move(grammar_in)),
      stop_ids(std::move(stop_ids_in)),
      lengths(std::move(lengths_in)),
      names(std::move(names_in)),
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

AnswerState::AnswerState(std::shared_ptr<const AnswerRules> rules, const std::string& begun)
    : rules_(std::move(rules)),
      matcher_(rules_->grammar, rules_->stop_ids),
      fits_(begun.empty() || matcher_.AcceptString(begun)) {
  if (rules_->names != nullptr) names_.Append(begun);
  if (!rules_->any) return;
  text_ = begun;
  const auto [limit, length] = Limit();
  fits_ = fits_ && (!limit.has_value() || limit->most < 0 || length <= limit->most);
}

bool AnswerState::FillMask(std::span<uint32_t> mask) {
  if (matcher_.IsTerminated()) {
    // The answer is over, yet the client wants more tokens (ignore_eos): end it over and over, which adds no text.
    std::fill(mask.begin(), mask.end(), 0u);
    for (const int32_t id : rules_->stop_ids) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
    return true;
  }
  const double begin = xgrammar::ProcessorSeconds();
  bool restricts = true;
  try {
    restricts = !given_up_ && FillNow(mask);
  } catch (const std::exception&) {
    given_up_ = true;
  }
  Spend(begin);
  if (!given_up_) return restricts;
  // Too ambiguous to follow: nothing is allowed any more, which ends this request and spares the others.
  std::fill(mask.begin(), mask.end(), 0u);
  return true;
}

bool AnswerState::FillNow(std::span<uint32_t> mask) {
  int64_t shape = static_cast<int64_t>(mask.size());
  DLTensor tensor{};
  tensor.data = mask.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = xgrammar::GetBitmaskDLType();
  tensor.shape = &shape;
  bool restricts = true;
  {
    const xgrammar::ScopedDeadline deadline(kSlowestStep);
    restricts = matcher_.FillNextTokenBitmask(&tensor);
  }
  if (!rules_->any && rules_->names == nullptr) return restricts;
  if (!restricts) std::fill(mask.begin(), mask.end(), ~0u);
  for (size_t word = 0; word < rules_->crossing.size(); ++word) mask[word] &= rules_->crossing[word];
  if (rules_->any) {
    if (const auto [limit, length] = Limit(); limit.has_value()) rules_->lengths->Narrow(*limit, length, mask);
  }
  if (rules_->names != nullptr) names_.Narrow(*rules_->names, mask);
  return true;
}

bool AnswerState::Accept(int32_t token) {
  if (matcher_.IsTerminated()) {
    return std::find(rules_->stop_ids.begin(), rules_->stop_ids.end(), token) != rules_->stop_ids.end();
  }
  if (given_up_) return false;
  const double begin = xgrammar::ProcessorSeconds();
  const bool accepted = AcceptNow(token);
  Spend(begin);
  return accepted;
}

void AnswerState::Spend(double begin) {
  const double seconds = xgrammar::ProcessorSeconds() - begin;
  spent_ = std::max(0.0, spent_ + seconds - kUsualStep);
  if (seconds > kSlowestStep || spent_ > kAllowance) given_up_ = true;
}

bool AnswerState::AcceptNow(int32_t token) {
  if (!rules_->any && rules_->names == nullptr) return matcher_.AcceptToken(token);
  const std::vector<std::string>& words = rules_->words;
  if (token < 0 || static_cast<size_t>(token) >= words.size()) return false;
  const auto& crossing = rules_->crossing;
  if (!crossing.empty() && (crossing[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) return false;
  if (rules_->any) {
    const auto [limit, length] = Limit();
    if (limit.has_value() && !rules_->lengths->Fits(*limit, length, token)) return false;
  }
  if (!matcher_.AcceptToken(token)) return false;
  const std::string& bytes = words[static_cast<size_t>(token)];
  const bool control = bytes.starts_with(kControlByte);
  if (rules_->any && !control) text_ += bytes;
  if (rules_->names == nullptr) return true;
  if (control) {
    names_.Begin(/*opens_tag=*/std::string_view(bytes).substr(1) == "<|open|>");
  } else {
    names_.Append(bytes);
  }
  return true;
}

std::pair<std::optional<LengthLimit>, int32_t> AnswerState::Limit() {
  const auto& history = ParserView::States(matcher_);
  const int32_t position = static_cast<int32_t>(history.size()) - 1;
  std::optional<LengthLimit> found;
  int32_t found_length = 0;
  for (const xgrammar::ParserState& state : history[position]) {
    if (state.rule_id < 0 || !rules_->limits[static_cast<size_t>(state.rule_id)].has_value()) continue;
    const LengthLimit& limit = *rules_->limits[static_cast<size_t>(state.rule_id)];
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
    if (limit.most >= 0) found->most = found->most < 0 ? limit.most + shift : std::min(found->most, limit.most + shift);
  }
  return {found, found_length};
}

}  // namespace k3
