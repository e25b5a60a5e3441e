#include "server/grammar/json_names.h"

#include <algorithm>
#include <cctype>

namespace k3 {
namespace {

constexpr std::string_view kArgument = "argument key=\"";
constexpr std::string_view kCall = "call tool=\"";
constexpr size_t kMaxTokenText = 256;

bool IsBlank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

bool IsAllowed(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

}  // namespace

NameTokens::NameTokens(const Tokenizer& tokenizer, int32_t vocab_size) {
  for (int32_t id = 0; id < std::min(vocab_size, tokenizer.vocab_size()); ++id) {
    if (tokenizer.IsSpecial(id)) continue;
    const std::string_view bytes = tokenizer.TokenBytes(id);
    const auto quotes = std::count(bytes.begin(), bytes.end(), '"');
    if (quotes == 0) continue;
    ending_[std::string(bytes.substr(0, bytes.find('"')))].push_back(id);
    if (quotes >= 2) two_.push_back({id, std::string(bytes)});
    if (quotes >= 3) three_.push_back({id, std::string(bytes)});
  }
}

const std::vector<int32_t>* NameTokens::EndingWith(const std::string& text) const {
  const auto place = ending_.find(text);
  return place == ending_.end() ? nullptr : &place->second;
}

void JsonNames::Begin(bool opens_tag) {
  place_ = Place();
  if (opens_tag) place_.mode = Mode::kTag;
  names_.resize(1);
}

bool JsonNames::IsUsed(size_t depth, const std::string& name, const Added& added) const {
  const bool base = depth == 0 ? !added.elements_cleared : depth < added.floor && depth < names_.size();
  if (base && names_[depth].contains(name)) return true;
  return std::any_of(added.names.begin(), added.names.end(),
                     [&](const auto& one) { return one.first == depth && one.second == name; });
}

void JsonNames::AddName(size_t depth, Place* place, Added* added) const {
  added->repeats = added->repeats || IsUsed(depth, place->name, *added);
  added->names.emplace_back(depth, std::move(place->name));
  place->name.clear();
}

void JsonNames::Step(char c, Place* place, Added* added) const {
  const auto close = [&] {
    // Of an object or list: its names are forgotten.
    const size_t depth = place->open.size();
    std::erase_if(added->names, [&](const auto& one) { return one.first >= depth && one.first > 0; });
    added->floor = std::min(added->floor, depth);
    place->open.pop_back();
    place->mode = Mode::kAfter;
  };
  switch (place->mode) {
    case Mode::kOther:
      return;
    case Mode::kString:
      if (c == '"') place->mode = Mode::kAfter;
      if (c == '\\') place->mode = Mode::kStringEscape;
      return;
    case Mode::kStringEscape:
      place->mode = Mode::kString;
      return;
    case Mode::kInName:
      if (c == '"') {
        place->mode = Mode::kColon;
        return AddName(place->open.size(), place, added);
      }
      if (c == '\\') place->mode = Mode::kInNameEscape;
      place->name.push_back(c);
      return;
    case Mode::kInNameEscape:
      place->mode = Mode::kInName;
      place->name.push_back(c);
      return;
    case Mode::kInKey:
      if (c == '"') {
        place->mode = Mode::kOther;
        return AddName(0, place, added);
      }
      place->name.push_back(c);
      return;
    case Mode::kTag:
      place->name.push_back(c);
      if (place->name == kArgument) {
        place->mode = Mode::kInKey;
        place->name.clear();
      } else if (place->name == kCall) {
        // Another call, which has no arguments yet.
        std::erase_if(added->names, [](const auto& one) { return one.first == 0; });
        added->elements_cleared = true;
        place->mode = Mode::kOther;
      } else if (!kArgument.starts_with(place->name) && !kCall.starts_with(place->name)) {
        place->mode = Mode::kOther;
      }
      return;
    case Mode::kScalar:
      if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '+' || c == '-' || c == '.') return;
      place->mode = Mode::kAfter;
      break;
    default:
      break;
  }
  if (IsBlank(c)) return;
  const char open = place->open.empty() ? '\0' : place->open.back();
  switch (place->mode) {
    case Mode::kValue:
      if (c == '{' || c == '[') {
        place->open.push_back(c);
        added->floor = std::min(added->floor, place->open.size());
        place->mode = c == '{' ? Mode::kNameOrEnd : Mode::kValue;
      } else if (c == ']' && open == '[') {
        close();
      } else if (c == '"') {
        place->mode = Mode::kString;
      } else {
        place->mode = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ? Mode::kScalar : Mode::kOther;
      }
      return;
    case Mode::kNameOrEnd:
    case Mode::kName:
      if (c == '"') {
        place->mode = Mode::kInName;
        place->name.clear();
      } else if (c == '}' && place->mode == Mode::kNameOrEnd) {
        close();
      } else {
        place->mode = Mode::kOther;
      }
      return;
    case Mode::kColon:
      place->mode = c == ':' ? Mode::kValue : Mode::kOther;
      return;
    case Mode::kAfter:
      if (c == ',' && open != '\0') {
        place->mode = open == '{' ? Mode::kName : Mode::kValue;
      } else if ((c == '}' && open == '{') || (c == ']' && open == '[')) {
        close();
      } else {
        place->mode = Mode::kOther;
      }
      return;
    default:
      return;
  }
}

void JsonNames::Append(std::string_view bytes) {
  for (const char c : bytes) {
    Added added;
    Step(c, &place_, &added);
    if (added.elements_cleared) names_[0].clear();
    if (added.floor < names_.size()) names_.resize(added.floor);
    names_.resize(std::max(names_.size(), place_.open.size() + 1));
    for (auto& [depth, name] : added.names) names_[depth].insert(std::move(name));
  }
}

bool JsonNames::Repeats(std::string_view bytes) const {
  Place place = place_;
  Added added;
  for (const char c : bytes) {
    Step(c, &place, &added);
    if (added.repeats) return true;
    if (place.mode == Mode::kOther) break;
  }
  return false;
}

bool JsonNames::AnyNames() const {
  return std::any_of(names_.begin(), names_.end(), [](const auto& names) { return !names.empty(); });
}

void JsonNames::Narrow(const NameTokens& tokens, std::span<uint32_t> mask) const {
  if (place_.mode == Mode::kOther || !AnyNames()) return;
  std::vector<int32_t> taken;
  const auto take = [&](int32_t id) {
    taken.push_back(id);
    mask[static_cast<size_t>(id) / 32] &= ~(1u << (id % 32));
  };
  const bool in_name = place_.mode == Mode::kInName || place_.mode == Mode::kInKey;
  if (in_name) {
    // Names that begin as this one does, and what would complete them.
    const std::set<std::string>& used = names_[place_.mode == Mode::kInKey ? 0 : place_.open.size()];
    for (auto name = used.lower_bound(place_.name); name != used.end() && name->starts_with(place_.name); ++name) {
      if (name->size() - place_.name.size() > kMaxTokenText) continue;
      const std::vector<int32_t>* ending = tokens.EndingWith(name->substr(place_.name.size()));
      if (ending == nullptr) continue;
      for (const int32_t id : *ending) {
        if (IsAllowed(mask, id)) take(id);
      }
    }
  }
  const bool inside = in_name || place_.mode == Mode::kString || place_.mode == Mode::kStringEscape;
  for (const NameTokens::Token& token : inside ? tokens.three() : tokens.two()) {
    if (IsAllowed(mask, token.id) && Repeats(token.bytes)) take(token.id);
  }
  if (taken.empty() || std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; })) return;
  for (const int32_t id : taken) mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
}

}  // namespace k3
