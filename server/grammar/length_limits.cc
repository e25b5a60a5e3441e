#include "server/grammar/length_limits.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr std::string_view kPrefix = "k3serve_length_";
constexpr int32_t kMaxCounted = 256;  // characters of a token; longer tokens count as that many

void Set(std::vector<uint32_t>* bits, int32_t id) { (*bits)[static_cast<size_t>(id) / 32] |= 1u << (id % 32); }

// At `begin`, which moves behind it.
std::optional<int32_t> Number(std::string_view text, size_t* begin) {
  int32_t value = 0;
  const auto parsed = std::from_chars(text.data() + *begin, text.data() + text.size(), value);
  if (parsed.ec != std::errc()) return std::nullopt;
  *begin = static_cast<size_t>(parsed.ptr - text.data());
  return value;
}

}  // namespace

int32_t CountCharacters(std::string_view bytes) {
  return static_cast<int32_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string LengthLimit::RuleName() const {
  return absl::StrCat(std::string(kPrefix), least, "_", most < 0 ? std::string("x") : std::to_string(most), "_",
                      json ? "json" : "text");
}

std::string LengthLimit::Grammar(std::string_view characters) const {
  return absl::StrCat("root ::= ", RuleName(), "\n", RuleName(), " ::= Regex(\"", std::string(characters), "*\")\n");
}

std::optional<LengthLimit> LengthLimit::FromRuleName(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  LengthLimit limit;
  size_t at = kPrefix.size();
  const std::optional<int32_t> least = Number(name, &at);
  if (!least.has_value() || *least < 0 || at + 1 >= name.size() || name[at] != '_') return std::nullopt;
  limit.least = *least;
  ++at;
  if (name[at] == 'x') {
    ++at;
  } else {
    const std::optional<int32_t> most = Number(name, &at);
    if (!most.has_value() || *most < 0) return std::nullopt;
    limit.most = *most;
  }
  if (name.substr(at).starts_with("_text")) {
    limit.json = false;
  } else if (!name.substr(at).starts_with("_json")) {
    return std::nullopt;
  }
  return limit;
}

TokenLengths::TokenLengths(const Tokenizer& tokenizer, int32_t vocab_size)
    : vocab_size_(std::min(vocab_size, tokenizer.vocab_size())),
      lengths_(static_cast<size_t>(vocab_size_)),
      controls_(static_cast<size_t>(vocab_size + 31) / 32) {
  for (int32_t id = 0; id < vocab_size_; ++id) {
    Lengths& token = lengths_[static_cast<size_t>(id)];
    token.control = tokenizer.IsSpecial(id);
    if (token.control) {
      Set(&controls_, id);
      continue;
    }
    const std::string_view bytes = tokenizer.TokenBytes(id);
    token.all = std::min(CountCharacters(bytes), kMaxCounted);
    size_t quote = bytes.find('"');
    token.first = std::min(CountCharacters(bytes.substr(0, quote)), kMaxCounted);
    token.quote = quote != std::string_view::npos;
    while (quote != std::string_view::npos) {
      const size_t next = bytes.find('"', quote + 1);
      const int32_t run =
          CountCharacters(bytes.substr(quote + 1, next == std::string_view::npos ? next : next - quote - 1));
      token.opened = std::max(token.opened, run);
      if (next != std::string_view::npos) token.closed = token.closed < 0 ? run : std::min(token.closed, run);
      quote = next;
    }
    longest_ = std::max(longest_, token.all);
  }
  const Bits none(controls_.size());
  json_up_to_.assign(static_cast<size_t>(longest_) + 1, none);
  text_up_to_ = json_up_to_;
  ends_before_.assign(static_cast<size_t>(longest_) + 2, none);
  for (int32_t id = 0; id < vocab_size_; ++id) {
    const Lengths& token = lengths_[static_cast<size_t>(id)];
    if (token.control) continue;
    Set(&json_up_to_[static_cast<size_t>(token.first)], id);
    Set(&text_up_to_[static_cast<size_t>(token.all)], id);
    if (token.quote) Set(&ends_before_[static_cast<size_t>(token.first) + 1], id);
  }
  const auto accumulate = [](std::vector<Bits>& sets) {
    for (size_t i = 1; i < sets.size(); ++i) {
      for (size_t word = 0; word < sets[i].size(); ++word) sets[i][word] |= sets[i - 1][word];
    }
  };
  accumulate(json_up_to_);
  accumulate(text_up_to_);
  accumulate(ends_before_);
}

void TokenLengths::Narrow(const LengthLimit& limit, int32_t length, std::span<uint32_t> mask) const {
  if (limit.most >= 0 && limit.most - length < longest_) {
    const auto& sets = limit.json ? json_up_to_ : text_up_to_;
    const Bits& allowed = sets[static_cast<size_t>(std::max(0, limit.most - length))];
    // Control tokens add nothing.
    for (size_t word = 0; word < mask.size() && word < allowed.size(); ++word)
      mask[word] &= allowed[word] | controls_[word];
  }
  if (length >= limit.least) return;
  const Bits& ending =
      limit.json ? ends_before_[static_cast<size_t>(std::min(limit.least - length, longest_ + 1))] : controls_;
  for (size_t word = 0; word < mask.size() && word < ending.size(); ++word) mask[word] &= ~ending[word];
}

bool TokenLengths::Fits(const LengthLimit& limit, int32_t length, int32_t id) const {
  if (id < 0 || id >= vocab_size_) return true;
  const Lengths& token = lengths_[static_cast<size_t>(id)];
  if (token.control) return limit.json || length >= limit.least;
  const int32_t added = limit.json ? token.first : token.all;
  if (limit.most >= 0 && length + added > limit.most) return false;
  return !limit.json || !token.quote || length + added >= limit.least;
}

std::vector<uint32_t> TokenLengths::Crossing(int32_t smallest_most, int32_t largest_least) const {
  Bits allowed(controls_.size());
  for (int32_t id = 0; id < vocab_size_; ++id) {
    const Lengths& token = lengths_[static_cast<size_t>(id)];
    const bool too_long = smallest_most >= 0 && token.opened > smallest_most;
    const bool too_short = token.closed >= 0 && token.closed < largest_least;
    if (token.control || (!too_long && !too_short)) Set(&allowed, id);
  }
  return allowed;
}

}  // namespace k3
