#include "server/grammar/string_formats.h"

#include <unordered_map>

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
  // RFC 3339, appendix A.
  const std::string clock_part = "T([0-9]+S|[0-9]+M([0-9]+S)?|[0-9]+H([0-9]+M([0-9]+S)?)?)";
  const std::string days = "[0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?";
  patterns["duration"] = absl::StrCat("^P((", days, ")(", clock_part, ")?|", clock_part, "|[0-9]+W)$");
  // RFC 3986, hosts by name or address in version 4.
  const std::string escaped = "%[0-9A-Fa-f][0-9A-Fa-f]";
  const std::string plain = "A-Za-z0-9._~!$&'()*+,;=";  // of a class
  const std::string segment = absl::StrCat("([", plain, ":@-]|", escaped, ")");
  const std::string rest = absl::StrCat("([", plain, ":@/?-]|", escaped, ")*");
  const std::string tail = absl::StrCat("(\\?", rest, ")?(#", rest, ")?");
  const std::string authority =
      absl::StrCat("(([", plain, ":-]|", escaped, ")*@)?([", plain, "-]|", escaped, ")+(:[0-9]{1,5})?");
  const std::string rooted = absl::StrCat("//", authority, "(/", segment, "*)*|/(", segment, "+(/", segment, "*)*)?");
  const std::string uri =
      absl::StrCat("[A-Za-z][A-Za-z0-9+.-]*:(", rooted, "|", segment, "+(/", segment, "*)*|)", tail);
  const std::string first = absl::StrCat("([", plain, "@-]|", escaped, ")+");  // no colon: that would be a scheme
  patterns["uri"] = whole(uri);
  patterns["uri-reference"] = absl::StrCat("^(", uri, "|(", rooted, "|", first, "(/", segment, "*)*|)", tail, ")$");
  // RFC 6570.
  const std::string variable = "[A-Za-z0-9_]+(\\.[A-Za-z0-9_]+)*(:[1-9][0-9]{0,3}|\\*)?";
  patterns["uri-template"] = absl::StrCat("^([A-Za-z0-9._~!$&()*+,;=:@/?#-]|", escaped, "|\\{[+#./;?&]?", variable,
                                          "(,", variable, ")*\\})*$");
  // RFC 6901.
  const std::string pointer = "(/([^/~]|~[01])*)*";
  patterns["json-pointer"] = whole(pointer);
  patterns["relative-json-pointer"] = absl::StrCat("^(0|[1-9][0-9]*)(#|", pointer, ")$");
  return patterns;
}

}  // namespace

const std::string* FormatPattern(std::string_view format) {
  static const Patterns patterns = MakePatterns();
  const auto place = patterns.find(format);
  return place == patterns.end() ? nullptr : &place->second;
}

}  // namespace k3
