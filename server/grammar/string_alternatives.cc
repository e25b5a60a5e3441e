#include "server/grammar/string_alternatives.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/grammar/schema_shapes.h"
#include "server/text/field_error.h"

namespace k3 {
namespace {

using schema::Further;
using schema::Has;
using schema::HasAny;
using schema::IsFalse;
using schema::IsOpen;
using schema::kArray;
using schema::kLists;
using schema::kObject;
using schema::kString;
using schema::Requires;
using schema::Shapes;

constexpr char kWritten[] = "k3serve_length";
constexpr int kMostWritten = 16;       // characters of one limit; with 160,000 tokens each costs 0.05 s to compile
constexpr int kMostWrittenInAll = 64;  // of a schema
constexpr int kMaxSteps = 20'000;

using Place = std::vector<const JsonValue*>;

struct Limit {
  int least = 0;
  int most = -1;

  int highest() const { return std::max(least, most); }
  bool operator==(const Limit&) const = default;
};

std::optional<Limit> LimitOf(const JsonValue& schema) {
  if (HasAny(schema, {"const", "enum", "pattern"})) return std::nullopt;
  Limit limit;
  if (const JsonValue* least = schema.Find("minLength")) limit.least = static_cast<int>(least->AsDouble());
  if (const JsonValue* most = schema.Find("maxLength")) limit.most = static_cast<int>(most->AsDouble());
  if (limit == Limit()) return std::nullopt;
  return limit;
}

// Walks over the places of an answer, each with all schemas that may be in force there at once.
class Places {
 public:
  explicit Places(const JsonValue& root) : shapes_(root) { Visit({&root}); }

  // Per place with several strings of which some are limited: those strings.
  const std::vector<Place>& strings() const { return strings_; }
  bool complete() const { return steps_ <= kMaxSteps; }

 private:
  // `seen`: references make many ways to the same schema.
  void Expand(const JsonValue& reference, std::set<const JsonValue*>* seen, Place* leaves) {
    const JsonValue& schema = shapes_.Follow(reference);
    if (IsFalse(&schema) || ++steps_ > kMaxSteps || !seen->insert(&schema).second) return;
    if (!schema.is_object() || Has(schema, "const") || Has(schema, "enum")) return leaves->push_back(&schema);
    for (const char* key : kLists) {
      const JsonValue* list = schema.Find(key);
      if (list == nullptr || (key == std::string_view("allOf") && list->items.size() != 1)) continue;
      for (const JsonValue& item : list->items) Expand(item, seen, leaves);
      return;
    }
    leaves->push_back(&schema);
  }

  void Visit(const Place& schemas) {
    steps_ += static_cast<int>(schemas.size());
    if (!complete()) return;
    Place leaves;
    std::set<const JsonValue*> seen;
    for (const JsonValue* schema : schemas) Expand(*schema, &seen, &leaves);
    std::sort(leaves.begin(), leaves.end());
    leaves.erase(std::unique(leaves.begin(), leaves.end()), leaves.end());
    if (leaves.empty() || !visited_.insert(leaves).second) return;
    Place strings, objects, arrays;
    for (const JsonValue* leaf : leaves) {
      const schema::Types types = shapes_.TypesOf(*leaf, /*valid=*/false);
      if ((types & kString) != 0) strings.push_back(leaf);
      if (!leaf->is_object() || HasAny(*leaf, {"const", "enum"})) continue;
      if ((types & kObject) != 0) objects.push_back(leaf);
      if ((types & kArray) != 0) arrays.push_back(leaf);
    }
    const bool limited =
        std::any_of(strings.begin(), strings.end(), [](const JsonValue* leaf) { return LimitOf(*leaf).has_value(); });
    if (limited && strings.size() > 1) strings_.push_back(strings);
    VisitMembers(objects);
    VisitItems(arrays);
  }

  void VisitMembers(const Place& objects) {
    std::map<std::string_view, Place> holders;
    Place further, names;
    for (const JsonValue* object : objects) {
      if (const JsonValue* members = schema::Members(*object)) {
        for (const std::string& name : members->keys) holders[name].push_back(object);
      }
      if (const JsonValue* schema = object->Find("propertyNames")) names.push_back(schema);
      if (const JsonValue* patterns = object->Find("patternProperties")) {
        for (const JsonValue& schema : patterns->items) further.push_back(&schema);
      }
      if (const JsonValue* schema = Further(*object)) further.push_back(schema);
    }
    if (!names.empty()) Visit(names);
    if (!further.empty()) Visit(further);
    for (auto& [name, with] : holders) {
      for (const Place& group : Undecided(with, std::string(name))) {
        Place schemas;
        for (const JsonValue* object : group) schemas.push_back(schema::Members(*object)->Find(name));
        // Another object may have a free member of that name.
        for (const JsonValue* object : objects) {
          if (IsOpen(*object) && Further(*object) != nullptr && !Declares(*object, name)) {
            schemas.push_back(Further(*object));
          }
        }
        Visit(schemas);
      }
    }
  }

  static bool Declares(const JsonValue& object, std::string_view name) {
    const JsonValue* members = schema::Members(object);
    return members != nullptr && members->Find(name) != nullptr;
  }

  void VisitItems(const Place& arrays) {
    size_t longest = 0;
    for (const JsonValue* array : arrays) {
      if (const JsonValue* prefix = array->Find("prefixItems")) longest = std::max(longest, prefix->items.size());
    }
    for (size_t i = 0; i <= longest; ++i) {
      Place schemas;
      for (const JsonValue* array : arrays) {
        const JsonValue* prefix = array->Find("prefixItems");
        const JsonValue* items = array->Find("items");
        if (items == nullptr) items = array->Find("unevaluatedItems");
        if (prefix != nullptr && i < prefix->items.size()) {
          schemas.push_back(&prefix->items[i]);
        } else if (items != nullptr) {
          schemas.push_back(items);
        }
      }
      if (!schemas.empty()) Visit(schemas);
    }
  }

  // The objects in groups such that when an answer comes to the member `name`, it can be only in those of one group.
  std::vector<Place> Undecided(const Place& objects, const std::string& name) {
    std::vector<Place> groups;
    for (const JsonValue* object : objects) {
      Place joined = {object};
      for (size_t i = 0; i < groups.size();) {
        const bool decided = std::all_of(groups[i].begin(), groups[i].end(),
                                         [&](const JsonValue* other) { return DecidedBefore(*object, *other, name); });
        if (decided) {
          ++i;
          continue;
        }
        joined.insert(joined.end(), groups[i].begin(), groups[i].end());
        groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(i));
      }
      groups.push_back(std::move(joined));
    }
    return groups;
  }

  // Whether a member that comes before `name`, in the order of the grammar, tells the objects apart.
  bool DecidedBefore(const JsonValue& a, const JsonValue& b, const std::string& name) {
    return DecidesBefore(a, b, name) || DecidesBefore(b, a, name);
  }
  bool DecidesBefore(const JsonValue& a, const JsonValue& b, const std::string& name) {
    const JsonValue& mine = *schema::Members(a);
    const JsonValue& theirs = *schema::Members(b);
    for (size_t i = 0; i < mine.keys.size() && mine.keys[i] != name && ++steps_ <= kMaxSteps; ++i) {
      if (!Requires(a, mine.keys[i])) continue;
      const JsonValue* other = theirs.Find(mine.keys[i]);
      if (other == nullptr && !IsOpen(b)) return true;
      if (other != nullptr && other < theirs.Find(name) && Requires(b, mine.keys[i]) &&
          shapes_.Exclusive(mine.items[i], *other)) {
        return true;
      }
    }
    return false;
  }

  const Shapes shapes_;
  std::set<Place> visited_;
  std::vector<Place> strings_;
  int steps_ = 0;
};

// Where `wanted` is in `value`, in the words of messages.
std::optional<std::string> PathTo(const JsonValue& value, const JsonValue* wanted, const std::string& path) {
  if (&value == wanted) return path;
  for (size_t i = 0; i < value.items.size(); ++i) {
    const std::string place =
        value.is_object() ? absl::StrCat(path, ".", Excerpt(value.keys[i], 60)) : absl::StrCat(path, "[", i, "]");
    if (auto found = PathTo(value.items[i], wanted, place)) return found;
  }
  return std::nullopt;
}

void WriteOut(JsonValue* schema, const Limit& limit) {
  schema->Set(kWritten, JsonValue::Array({JsonValue::Integer(limit.least), JsonValue::Integer(limit.most)}));
  schema->Set("pattern", JsonValue::String(absl::StrCat(R"(^[^"\\\x00-\x1f]{)", limit.least, ",",
                                                        limit.most < 0 ? "" : std::to_string(limit.most), "}$")));
  schema::Remove(schema, {"minLength", "maxLength"});
}

}  // namespace

absl::Status SeparateStrings(JsonValue* root, const std::string& path, bool strict) {
  const Places places(*root);
  // In the order of the document, so that equal schemas always come out equal.
  std::vector<std::pair<const JsonValue*, Limit>> short_ones;
  std::set<const JsonValue*> beside;
  for (const Place& strings : places.strings()) {
    const std::optional<Limit> first = LimitOf(*strings[0]);
    const bool same =
        std::all_of(strings.begin(), strings.end(), [&](const JsonValue* string) { return LimitOf(*string) == first; });
    if (!same) beside.insert(strings.begin(), strings.end());
  }
  int written = 0;
  std::vector<JsonValue*> open = {root}, found;
  while (!open.empty()) {
    JsonValue* value = open.back();
    open.pop_back();
    if ((beside.contains(value) || !places.complete()) && value->is_object() && LimitOf(*value).has_value())
      found.push_back(value);
    for (auto item = value->items.rbegin(); item != value->items.rend(); ++item) open.push_back(&*item);
  }
  std::set<const JsonValue*> to_write;
  for (const JsonValue* value : found) {
    const int cost = LimitOf(*value)->highest();
    if (cost > kMostWritten || written + cost > kMostWrittenInAll) continue;
    written += cost;
    to_write.insert(value);
  }
  std::set<const JsonValue*> clashing;
  const auto clash = [&](const auto& strings) {
    Limit all;
    for (const JsonValue* string : strings) {
      const std::optional<Limit> limit = LimitOf(*string);
      if (!limit.has_value() || to_write.contains(string)) continue;
      all.least = std::max(all.least, limit->least);
      if (limit->most >= 0) all.most = all.most < 0 ? limit->most : std::min(all.most, limit->most);
      if (all.most < 0 || all.least <= all.most) continue;
      for (const JsonValue* other : strings) {
        if (LimitOf(*other).has_value() && !to_write.contains(other)) clashing.insert(other);
      }
      return;
    }
  };
  for (const Place& strings : places.strings()) clash(strings);
  if (!places.complete()) {
    // What has not been looked at may be anywhere.
    Place all;
    std::vector<const JsonValue*> values = {root};
    while (!values.empty()) {
      const JsonValue* value = values.back();
      values.pop_back();
      if (value->is_object()) all.push_back(value);
      for (const JsonValue& item : value->items) values.push_back(&item);
    }
    clash(all);
  }
  for (JsonValue* value : found) {
    if (!clashing.contains(value)) continue;
    if (strict) {
      const Limit limit = *LimitOf(*value);
      return FieldError(PathTo(*root, value, path).value_or(path),
                        absl::StrCat("cannot be enforced: the answer may also be another string here, whose lengths "
                                     "exclude those of this one (",
                                     limit.least, " to ", limit.most < 0 ? "any" : std::to_string(limit.most), ")"));
    }
  }
  // Inner ones first: what is taken out of a schema moves those inside it.
  for (auto value = found.rbegin(); value != found.rend(); ++value) {
    if (clashing.contains(*value)) {
      schema::Remove(*value, {"minLength", "maxLength"});
    } else if (to_write.contains(*value)) {
      WriteOut(*value, *LimitOf(**value));
    }
  }
  return absl::OkStatus();
}

std::optional<std::pair<int, int>> WrittenLimit(const JsonValue& schema) {
  const JsonValue* limit = schema.Find(kWritten);
  if (limit == nullptr || !limit->is_array() || limit->items.size() != 2) return std::nullopt;
  return std::pair{static_cast<int>(limit->items[0].AsDouble()), static_cast<int>(limit->items[1].AsDouble())};
}

}  // namespace k3
