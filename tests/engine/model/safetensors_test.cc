#include "engine/model/safetensors.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The bytes of a file with this header and `data_bytes` bytes of data.
std::vector<uint8_t> FileOf(const std::string& header, size_t data_bytes) {
  std::vector<uint8_t> file(8 + header.size() + data_bytes);
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  std::memcpy(file.data() + 8, header.data(), header.size());
  return file;
}

absl::StatusOr<SafetensorsHeader> Parse(const std::vector<uint8_t>& file) {
  return ParseSafetensorsHeader(file, file.size(), "dir/x.safetensors");
}

TEST(SafetensorsTest, ReadsNamesShapesTypesAndOffsets) {
  const std::string header = R"({"__metadata__": {"format": "pt", "x": ""},)"
                             R"( "b": {"shape": [2, 3], "dtype": "BF16", "data_offsets": [4, 16]},)"
                             R"( "a\u002e": {"dtype": "F32", "data_offsets": [0, 4], "shape": []},)"
                             R"( "empty": {"dtype": "U8", "shape": [0, 5], "data_offsets": [16, 16]}}   )";
  const auto parsed = Parse(FileOf(header, 16));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->tensors.size(), 3u);
  const uint64_t data = 8 + header.size();
  const StoredTensor& a = parsed->tensors[0];  // in the order of the data
  EXPECT_EQ(parsed->Name(a), "a.");
  EXPECT_TRUE(parsed->Shape(a).empty());
  EXPECT_EQ(parsed->Type(a), DType::kF32);
  EXPECT_EQ(a.begin, data);
  const StoredTensor& b = parsed->tensors[1];
  EXPECT_EQ(parsed->Name(b), "b");
  EXPECT_THAT(std::vector<int64_t>(parsed->Shape(b).begin(), parsed->Shape(b).end()), ElementsAre(2, 3));
  EXPECT_EQ(parsed->Type(b), DType::kBF16);
  EXPECT_EQ(b.begin, data + 4);
  EXPECT_EQ(b.end, data + 16);
}

TEST(SafetensorsTest, NoTensorsAndForeignTypes) {
  EXPECT_TRUE(Parse(FileOf("{}", 0)).ok());
  const auto foreign = Parse(FileOf(R"({"x": {"dtype":"F64","shape":[1],"data_offsets":[0,8]}})", 8));
  ASSERT_TRUE(foreign.ok()) << foreign.status();
  EXPECT_EQ(foreign->Type(foreign->tensors[0]), std::nullopt);
  EXPECT_STREQ(foreign->TypeName(foreign->tensors[0]), "F64");
  EXPECT_TRUE(Parse(FileOf(R"({"x": {"dtype":"F4","shape":[3,2],"data_offsets":[0,3]}})", 3)).ok());
}

std::string Entry(const char* name, const char* dtype, const char* shape, const char* offsets) {
  return absl::StrCat("\"", name, "\": {\"dtype\": \"", dtype, "\", \"shape\": ", shape,
                      ", \"data_offsets\": ", offsets, "}");
}

struct WrongHeader {
  const char* name;
  std::string header;
  size_t data_bytes;
  std::vector<std::string> says;  // besides the file
};

class WrongHeaderTest : public ::testing::TestWithParam<WrongHeader> {};

TEST_P(WrongHeaderTest, IsRefusedByName) {
  const auto parsed = Parse(FileOf(GetParam().header, GetParam().data_bytes));
  ASSERT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss);
  const std::string message(parsed.status().message());
  EXPECT_THAT(message, HasSubstr("dir/x.safetensors: "));
  for (const std::string& part : GetParam().says) EXPECT_THAT(message, HasSubstr(part));
}

const WrongHeader kWrongHeaders[] = {
    {"EndBeforeStart", "{" + Entry("t", "U8", "[4]", "[4, 0]") + "}", 4, {"'t'", "[4, 0]", "end before they start"}},
    {"PastTheEnd", "{" + Entry("t", "U8", "[9]", "[0, 9]") + "}", 8, {"'t'", "past the end", "8 bytes of data"}},
    {"FarPastTheEnd",
     "{" + Entry("t", "U8", "[1]", "[18446744073709551614, 18446744073709551615]") + "}",
     8,
     {"'t'", "past the end"}},
    {"Overlap",
     "{" + Entry("t", "U8", "[4]", "[0, 4]") + "," + Entry("u", "U8", "[5]", "[3, 8]") + "}",
     8,
     {"'u'", "overlaps", "'t'", "at data byte 3"}},
    {"Inside",
     "{" + Entry("t", "U8", "[8]", "[0, 8]") + "," + Entry("u", "U8", "[2]", "[2, 4]") + "}",
     8,
     {"'u'", "'t'"}},
    {"Hole",
     "{" + Entry("t", "U8", "[3]", "[0, 3]") + "," + Entry("u", "U8", "[4]", "[4, 8]") + "}",
     8,
     {"1 bytes before", "'u'"}},
    {"HoleAtStart", "{" + Entry("t", "U8", "[4]", "[4, 8]") + "}", 8, {"4 bytes before", "'t'"}},
    {"Appended", "{" + Entry("t", "U8", "[4]", "[0, 4]") + "}", 14, {"'t'", "10 bytes follow"}},
    {"DataWithoutTensors", "{}", 3, {"3 bytes follow"}},
    {"ShapeProduct",
     "{" + Entry("t", "BF16", "[2, 3]", "[0, 10]") + "}",
     10,
     {"'t'", "[2, 3] BF16", "need 12", "hold 10"}},
    {"OddBits", "{" + Entry("t", "F4", "[3]", "[0, 1]") + "}", 1, {"'t'", "[3] F4"}},
    {"NegativeDim", "{" + Entry("t", "U8", "[-4]", "[0, 4]") + "}", 4, {"'t'", "shape", "non-negative", "-4"}},
    {"HugeDim",
     "{" + Entry("t", "BF16", "[4611686018427387904, 4]", "[0, 4]") + "}",
     4,
     {"'t'", "4611686018427387904", "overflows"}},
    {"HugerDim",
     "{" + Entry("t", "U8", "[9223372036854775808]", "[0, 4]") + "}",
     4,
     {"'t'", "9223372036854775808", "too large"}},
    {"HugestDim", "{" + Entry("t", "U8", "[18446744073709551616]", "[0, 4]") + "}", 4, {"'t'", "shape"}},
    {"FractionDim", "{" + Entry("t", "U8", "[4.0]", "[0, 4]") + "}", 4, {"'t'", "shape"}},
    {"ManyDims",
     "{" + Entry("t", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0, 1]") + "}",
     1,
     {"'t'", "dimensions"}},
    {"UnknownType", "{" + Entry("t", "BF17", "[2]", "[0, 4]") + "}", 4, {"'t'", "unknown dtype 'BF17'"}},
    {"ThreeOffsets", "{" + Entry("t", "U8", "[4]", "[0, 4, 5]") + "}", 4, {"'t'", "data_offsets"}},
    {"NegativeOffset", "{" + Entry("t", "U8", "[4]", "[-1, 4]") + "}", 4, {"'t'", "data_offsets"}},
    {"NameTwice",
     "{" + Entry("t", "U8", "[2]", "[0, 2]") + "," + Entry("\\u0074", "U8", "[2]", "[2, 4]") + "}",
     4,
     {"'t'", "twice"}},
    {"FieldMissing", R"({"t": {"dtype": "U8", "shape": [4]}})", 4, {"'t'", "lacks", "data_offsets"}},
    {"FieldTwice",
     R"({"t": {"dtype": "U8", "dtype": "U8", "shape": [4], "data_offsets": [0,4]}})",
     4,
     {"'t'", "dtype", "twice"}},
    {"FieldUnknown", R"({"t": {"dtype": "U8", "shape": [4], "offset": [0,4]}})", 4, {"'t'", "'offset'"}},
    {"NotAnObject", "[1, 2]", 0, {"invalid safetensors header", "'{'"}},
    {"EntryNotAnObject", R"({"t": 3})", 0, {"invalid safetensors header"}},
    {"Unfinished", R"({"t": {"dtype": "U8")", 0, {"the end of the text"}},
    {"TextAfter", "{} x", 0, {"the end of the text"}},
    {"MetadataNumber", R"({"__metadata__": {"a": 1}})", 0, {"a string"}},
    {"Nested", "{\"t\": " + std::string(100000, '['), 0, {"invalid safetensors header"}},
    {"ControlInName", "{\"a\nb\": {}}", 0, {"control character"}},
    {"AllZero", std::string(64, '\0'), 0, {"'{'"}},
};

INSTANTIATE_TEST_SUITE_P(All, WrongHeaderTest, ::testing::ValuesIn(kWrongHeaders),
                         [](const auto& info) { return info.param.name; });

TEST(SafetensorsTest, WrongHeaderLengths) {
  const auto with_length = [](uint64_t length) {
    std::vector<uint8_t> file(40, ' ');
    std::memcpy(file.data(), &length, 8);
    return std::string(Parse(file).status().message());
  };
  EXPECT_THAT(with_length(0), HasSubstr("header length is 0"));
  EXPECT_THAT(with_length(uint64_t{1} << 63), HasSubstr("9223372036854775808"));
  EXPECT_THAT(with_length(UINT64_MAX), HasSubstr("at most 100000000"));
  EXPECT_THAT(with_length(33), HasSubstr("the file has only 40"));
  EXPECT_THAT(with_length(32), HasSubstr("'{'"));
}

TEST(SafetensorsTest, FilesThatAreNoSafetensors) {
  EXPECT_THAT(std::string(Parse({}).status().message()), HasSubstr("the file is empty"));
  EXPECT_THAT(std::string(Parse({1, 2, 3}).status().message()), HasSubstr("a file of 3 bytes"));
  std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:";
  pointer += std::string(64, 'a') + "\nsize 123456\n";
  pointer.resize(130, ' ');
  const std::vector<uint8_t> file(pointer.begin(), pointer.end());
  EXPECT_THAT(std::string(Parse(file).status().message()), HasSubstr("Git LFS pointer of 130 bytes"));
}

TEST(SafetensorsTest, EveryPrefixOfAFileIsRefused) {
  const std::vector<uint8_t> file =
      FileOf("{" + Entry("t", "U8", "[4]", "[0, 4]") + "," + Entry("u", "F16", "[2]", "[4, 8]") + "}", 8);
  ASSERT_TRUE(Parse(file).ok());
  for (size_t size = 0; size < file.size(); ++size) {
    const std::vector<uint8_t> cut(file.begin(), file.begin() + size);
    const auto parsed = Parse(cut);
    ASSERT_FALSE(parsed.ok()) << size;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss);
  }
  // Cutting data names a tensor that lost bytes.
  const std::vector<uint8_t> cut(file.begin(), file.end() - 1);
  EXPECT_THAT(std::string(Parse(cut).status().message()), HasSubstr("'u'"));
}

}  // namespace
}  // namespace k3
