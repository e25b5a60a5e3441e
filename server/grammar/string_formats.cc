#include "server/grammar/string_formats.h"

#include <unordered_map>
#include <unordered_set>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

using Patterns = std::unordered_map<std::string_view, std::string>;

Patterns MakePatterns() {
  Patterns patterns;
  const auto whole = [](const std::string& pattern) { return absl::StrCat("^(", pattern, ")$"); };
  // RFC 3339. Years begin with 1, as in the libraries that read them.
  const std::string year = "000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9][0-9][0-9]";
  const std::string fourths = "0[48]|[2468][048]|[13579][26]";  // two digits of 04 to 96
  const std::string leap = absl::StrCat("[0-9][0-9](", fourths, ")|(", fourths, ")00");
  const std::string date = absl::StrCat(
      "(", year,
      ")-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|(",
      leap, ")-02-29");
  const std::string clock = "([01][0-9]|2[0-3]):[0-5][0-9]";
  const std::string time = absl::StrCat(clock, ":[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]", clock, ")");
  patterns["date"] = whole(date);
  patterns["time"] = whole(time);
  patterns["date-time"] = absl::StrCat("^(", date, ")T", time, "$");
  // RFC 2673 3.2 and RFC 4291 2.2.
  const std::string byte = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
  const std::string ipv4 = absl::StrCat("(", byte, "\\.){3}", byte);
  patterns["ipv4"] = whole(ipv4);
  const std::string group = "[0-9A-Fa-f]{1,4}";
  std::string ipv6 = absl::StrCat("(", group, ":){7}", group, "|(", group, ":){6}", ipv4, "|::");
  for (int before = 0; before <= 7; ++before) {
    // `before` groups, then zeros, then up to 7 - before more.
    const std::string head = before == 0   ? ":"
                             : before == 1 ? absl::StrCat(group, ":")
                                           : absl::StrCat("(", group, ":){", before, "}");
    if (before > 0) absl::StrAppend(&ipv6, "|", head, ":");
    if (before < 7) absl::StrAppend(&ipv6, "|", head, "(:", group, "){1,", 7 - before, "}");
    if (before < 6) absl::StrAppend(&ipv6, "|", head, ":", ipv4);
    if (before < 5) absl::StrAppend(&ipv6, "|", head, "(:", group, "){1,", 5 - before, "}:", ipv4);
  }
  patterns["ipv6"] = whole(ipv6);
  patterns["uuid"] = "^[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$";
  // RFC 5321 without quotes and without addresses in brackets.
  const std::string atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+";
  const std::string label = "[A-Za-z0-9]+(-+[A-Za-z0-9]+)*";
  patterns["email"] = absl::StrCat("^", atom, "(\\.", atom, ")*@", label, "(\\.", label, ")*$");
  patterns["hostname"] = absl::StrCat("^", label, "(\\.", label, ")*$");
  return patterns;
}

}  // namespace

const std::string* FormatPattern(std::string_view format) {
  static const Patterns patterns = MakePatterns();
  const auto place = patterns.find(format);
  return place == patterns.end() ? nullptr : &place->second;
}

bool IsKnownFormat(std::string_view format) {
  static const std::unordered_set<std::string_view> of_library = {
      "duration", "uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"};
  return FormatPattern(format) != nullptr || of_library.contains(format);
}

}  // namespace k3
