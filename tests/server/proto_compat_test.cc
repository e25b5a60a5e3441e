#include <gmock/gmock.h>
#include <google/protobuf/compiler/importer.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tests/testing/paths.h"

// The wire contract against proto/schema.txt, its state when it was last recorded: what clients compiled against must
// stay. scripts/check_proto.sh --update records additions.
namespace k3 {
namespace {

namespace pb = ::google::protobuf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A contract as lines, each an element and what clients rely on in it:
//   message NAME | enum NAME | service NAME
//   field MESSAGE.NUMBER NAME LABEL TYPE [in ONEOF]
//   value ENUM.NUMBER NAME
//   rpc SERVICE.NAME REQUEST -> REPLY
//   reserved OWNER.NUMBER, reserved OWNER.NAME
using Schema = std::set<std::string>;

void Describe(const pb::EnumDescriptor* type, Schema* schema) {
  const std::string& owner = type->full_name();
  schema->insert(absl::StrCat("enum ", owner));
  for (int i = 0; i < type->value_count(); ++i) {
    schema->insert(absl::StrCat("value ", owner, ".", type->value(i)->number(), " ", type->value(i)->name()));
  }
  for (int i = 0; i < type->reserved_range_count(); ++i) {
    for (int n = type->reserved_range(i)->start; n <= type->reserved_range(i)->end; ++n) {
      schema->insert(absl::StrCat("reserved ", owner, ".", n));
    }
  }
  for (int i = 0; i < type->reserved_name_count(); ++i) {
    schema->insert(absl::StrCat("reserved ", owner, ".", type->reserved_name(i)));
  }
}

std::string TypeText(const pb::FieldDescriptor* field) {
  if (field->is_map()) {
    return absl::StrCat("map<", TypeText(field->message_type()->map_key()), ",",
                        TypeText(field->message_type()->map_value()), ">");
  }
  if (field->message_type() != nullptr) return field->message_type()->full_name();
  if (field->enum_type() != nullptr) return field->enum_type()->full_name();
  return field->type_name();
}

void Describe(const pb::Descriptor* type, Schema* schema) {
  if (type->options().map_entry()) return;
  const std::string& owner = type->full_name();
  schema->insert(absl::StrCat("message ", owner));
  for (int i = 0; i < type->field_count(); ++i) {
    const pb::FieldDescriptor* field = type->field(i);
    const char* label = field->is_repeated() ? "repeated" : field->has_optional_keyword() ? "optional" : "single";
    std::string line =
        absl::StrCat("field ", owner, ".", field->number(), " ", field->name(), " ", label, " ", TypeText(field));
    if (field->real_containing_oneof() != nullptr)
      absl::StrAppend(&line, " in ", field->real_containing_oneof()->name());
    schema->insert(line);
  }
  for (int i = 0; i < type->reserved_range_count(); ++i) {  // the end is not part of it
    for (int n = type->reserved_range(i)->start; n < type->reserved_range(i)->end; ++n) {
      schema->insert(absl::StrCat("reserved ", owner, ".", n));
    }
  }
  for (int i = 0; i < type->reserved_name_count(); ++i) {
    schema->insert(absl::StrCat("reserved ", owner, ".", type->reserved_name(i)));
  }
  for (int i = 0; i < type->nested_type_count(); ++i) Describe(type->nested_type(i), schema);
  for (int i = 0; i < type->enum_type_count(); ++i) Describe(type->enum_type(i), schema);
}

void Describe(const pb::ServiceDescriptor* service, Schema* schema) {
  schema->insert(absl::StrCat("service ", service->full_name()));
  for (int i = 0; i < service->method_count(); ++i) {
    const pb::MethodDescriptor* method = service->method(i);
    schema->insert(absl::StrCat("rpc ", method->full_name(), " ", method->client_streaming() ? "stream " : "",
                                method->input_type()->full_name(), " -> ", method->server_streaming() ? "stream " : "",
                                method->output_type()->full_name()));
  }
}

Schema DescribeFile(const pb::FileDescriptor* file) {
  Schema schema;
  for (int i = 0; i < file->message_type_count(); ++i) Describe(file->message_type(i), &schema);
  for (int i = 0; i < file->enum_type_count(); ++i) Describe(file->enum_type(i), &schema);
  for (int i = 0; i < file->service_count(); ++i) Describe(file->service(i), &schema);
  return schema;
}

// What of `before` clients would miss in `now`. A field or enum value may go when its number and its name are reserved.
std::vector<std::string> BreakingChanges(const Schema& before, const Schema& now) {
  std::vector<std::string> changes;
  for (const std::string& line : before) {
    if (now.count(line) > 0) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words[0] == "field" || words[0] == "value") {
      const std::string owner = words[1].substr(0, words[1].rfind('.'));
      if (now.count(absl::StrCat("reserved ", words[1])) > 0 &&
          now.count(absl::StrCat("reserved ", owner, ".", words[2])) > 0) {
        continue;
      }
    }
    std::string change = line;
    const auto same = now.lower_bound(absl::StrCat(words[0], " ", words[1], " "));
    if (same != now.end() && words.size() > 1 && same->rfind(absl::StrCat(words[0], " ", words[1], " "), 0) == 0) {
      absl::StrAppend(&change, "   is now   ", *same);
    } else {
      absl::StrAppend(&change, "   is gone");
    }
    changes.push_back(change);
  }
  return changes;
}

class Errors : public pb::compiler::MultiFileErrorCollector {
 public:
  void AddError(const std::string& file, int line, int, const std::string& message) override {
    ADD_FAILURE() << file << ":" << line + 1 << ": " << message;
  }
};

Schema CurrentSchema() {
  pb::compiler::DiskSourceTree tree;
  const std::string root = testing::SourcePath("proto");
  tree.MapPath("", root);
  Errors errors;
  pb::compiler::Importer importer(&tree, &errors);
  Schema schema;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root + "/k3serve")) {
    if (entry.path().extension() != ".proto") continue;
    const pb::FileDescriptor* file = importer.Import(std::filesystem::relative(entry.path(), root).string());
    if (file != nullptr) schema.merge(DescribeFile(file));
  }
  return schema;
}

std::string SnapshotPath() { return testing::SourcePath("proto/schema.txt"); }

Schema Snapshot() {
  Schema schema;
  std::ifstream file(SnapshotPath());
  EXPECT_TRUE(file.good()) << SnapshotPath();
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') schema.insert(line);
  }
  return schema;
}

TEST(ProtoCompatTest, NothingThatClientsUseHasChanged) {
  const Schema before = Snapshot();
  ASSERT_GT(before.size(), 100u);
  EXPECT_THAT(BreakingChanges(before, CurrentSchema()), IsEmpty());
}

TEST(ProtoCompatTest, AdditionsAreRecorded) {
  const Schema now = CurrentSchema();
  const Schema before = Snapshot();
  const char* update = std::getenv("K3_UPDATE_PROTO_SCHEMA");
  if (update != nullptr && (before.empty() || BreakingChanges(before, now).empty())) {
    std::ofstream file(SnapshotPath(), std::ios::trunc);
    file << "# The wire contract that clients may rely on; written by scripts/check_proto.sh --update.\n"
         << absl::StrJoin(now, "\n") << "\n";
    ASSERT_TRUE(file.flush().good());
    return;
  }
  std::vector<std::string> added;
  for (const std::string& line : now) {
    if (before.count(line) == 0) added.push_back(line);
  }
  EXPECT_THAT(added, IsEmpty()) << "record them: scripts/check_proto.sh --update";
}

// The check itself, on a contract in one string.
Schema SchemaOf(const std::string& text) {
  class OneFile : public pb::compiler::SourceTree {
   public:
    explicit OneFile(const std::string& text) : text_(text) {}
    pb::io::ZeroCopyInputStream* Open(const std::string&) override {
      return new pb::io::ArrayInputStream(text_.data(), static_cast<int>(text_.size()));
    }

   private:
    const std::string& text_;
  };
  OneFile tree(text);
  Errors errors;
  pb::compiler::Importer importer(&tree, &errors);
  const pb::FileDescriptor* file = importer.Import("t.proto");
  return file != nullptr ? DescribeFile(file) : Schema();
}

constexpr char kBefore[] =
    "syntax = \"proto3\"; package t;\n"
    "enum E { E_UNSPECIFIED = 0; E_ONE = 1; }\n"
    "message M { string a = 1; optional int32 b = 2; repeated M c = 3; map<string, int32> d = 4;\n"
    "            oneof k { E e = 5; bool f = 6; } }\n"
    "service S { rpc Get(M) returns (M); rpc Watch(M) returns (stream M); }\n";

std::vector<std::string> After(const std::string& from, const std::string& to) {
  std::string text = kBefore;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  return BreakingChanges(SchemaOf(kBefore), SchemaOf(text));
}

TEST(BreakingChangesTest, AdditionsAndReservedRemovalsAreFine) {
  EXPECT_THAT(After("string a = 1;", "string a = 1; string z = 9;"), IsEmpty());
  EXPECT_THAT(After("E_ONE = 1;", "E_ONE = 1; E_TWO = 2;"), IsEmpty());
  EXPECT_THAT(After("rpc Get", "rpc New(M) returns (M); rpc Get"), IsEmpty());
  EXPECT_THAT(After("string a = 1;", "reserved 1; reserved \"a\";"), IsEmpty());
  EXPECT_THAT(After("E_ONE = 1;", "reserved 1; reserved \"E_ONE\";"), IsEmpty());
  EXPECT_THAT(After("string a = 1;", "string a = 1 [deprecated = true];"), IsEmpty());
}

TEST(BreakingChangesTest, EveryOtherChangeIsNamed) {
  EXPECT_THAT(After("string a = 1;", ""), ElementsAre("field t.M.1 a single string   is gone"));
  EXPECT_THAT(After("string a = 1;", "reserved 1;"), ElementsAre(HasSubstr("is gone"))) << "the name is free";
  EXPECT_THAT(After("string a = 1;", "bytes a = 1;"), ElementsAre(HasSubstr("is now   field t.M.1 a single bytes")));
  EXPECT_THAT(After("string a = 1;", "string x = 1;"), ElementsAre(HasSubstr("is now   field t.M.1 x")));
  EXPECT_THAT(After("string a = 1;", "string a = 7;"), ElementsAre(HasSubstr("field t.M.1 a")));
  EXPECT_THAT(After("optional int32 b", "int32 b"), ElementsAre(HasSubstr("field t.M.2 b")));
  EXPECT_THAT(After("repeated M c", "M c"), ElementsAre(HasSubstr("field t.M.3 c")));
  EXPECT_THAT(After("map<string, int32>", "map<string, int64>"), ElementsAre(HasSubstr("field t.M.4 d")));
  EXPECT_THAT(After("bool f = 6; }", "} bool f = 6;"), ElementsAre(HasSubstr("field t.M.6 f")));
  EXPECT_THAT(After("E_ONE = 1;", ""), ElementsAre(HasSubstr("value t.E.1 E_ONE")));
  EXPECT_THAT(After("E_ONE = 1;", "E_ONE = 2;"), ElementsAre(HasSubstr("value t.E.1 E_ONE")));
  EXPECT_THAT(After("rpc Get(M) returns (M);", ""), ElementsAre(HasSubstr("rpc t.S.Get")));
  EXPECT_THAT(After("(stream M)", "(M)"), ElementsAre(HasSubstr("rpc t.S.Watch")));
}

}  // namespace
}  // namespace k3
