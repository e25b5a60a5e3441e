#include "engine/model/safetensors.h"

#include <algorithm>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/model/json_cursor.h"
#include "engine/model/name_list.h"

namespace k3 {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxRank = 16;
constexpr std::string_view kLfsPointer = "version https://git-lfs";

struct StoredType {
  const char* name;
  uint32_t bits;
  std::optional<DType> dtype;
};

// Every type of the format (safetensors 0.6).
constexpr StoredType kTypes[] = {
    {"F32", 32, DType::kF32},  {"BF16", 16, DType::kBF16},   {"F16", 16, DType::kF16},     {"U8", 8, DType::kU8},
    {"I32", 32, DType::kI32},  {"I64", 64, DType::kI64},     {"BOOL", 8, std::nullopt},    {"I8", 8, std::nullopt},
    {"I16", 16, std::nullopt}, {"U16", 16, std::nullopt},    {"U32", 32, std::nullopt},    {"U64", 64, std::nullopt},
    {"F64", 64, std::nullopt}, {"F8_E5M2", 8, std::nullopt}, {"F8_E4M3", 8, std::nullopt}, {"F8_E8M0", 8, std::nullopt},
    {"F4", 4, std::nullopt},   {"F6_E2M3", 6, std::nullopt}, {"F6_E3M2", 6, std::nullopt}, {"C64", 64, std::nullopt},
};

int FindType(std::string_view name) {
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (name == kTypes[i].name) return static_cast<int>(i);
  }
  return -1;
}

// Parses one header; the members are what messages need.
class HeaderParser {
 public:
  HeaderParser(std::string_view json, uint64_t data_begin, uint64_t file_size, const std::string& file)
      : cursor_(json), data_begin_(data_begin), file_size_(file_size), file_(file) {}

  absl::StatusOr<SafetensorsHeader> Parse() {
    if (absl::Status status = ReadTensors(); !status.ok()) return status;
    if (absl::Status status = CheckLayout(); !status.ok()) return status;
    return std::move(header_);
  }

 private:
  template <typename... Parts>
  absl::Status Error(const Parts&... parts) const {
    return absl::DataLossError(absl::StrCat(file_, ": ", parts...));
  }
  absl::Status SyntaxError() const { return Error("invalid safetensors header: ", cursor_.error()); }
  static std::string Quoted(std::string_view name) { return absl::StrCat("tensor '", EscapeName(name), "'"); }
  std::string QuotedName(const StoredTensor& tensor) const { return Quoted(header_.Name(tensor)); }

  absl::Status ReadTensors() {
    if (!cursor_.Expect('{')) return SyntaxError();
    if (!cursor_.Take('}')) {
      do {
        std::string_view key;
        if (!cursor_.String(&key)) return SyntaxError();
        const std::string name(key);
        if (!cursor_.Expect(':')) return SyntaxError();
        absl::Status status = name == "__metadata__" ? SkipMetadata() : ReadTensor(name);
        if (!status.ok()) return status;
      } while (cursor_.Take(','));
      if (!cursor_.Expect('}')) return SyntaxError();
    }
    if (!cursor_.AtEnd()) return SyntaxError();
    return absl::OkStatus();
  }

  absl::Status SkipMetadata() {
    if (!cursor_.Expect('{')) return SyntaxError();
    if (cursor_.Take('}')) return absl::OkStatus();
    do {
      std::string_view ignored;
      if (!cursor_.String(&ignored) || !cursor_.Expect(':') || !cursor_.String(&ignored)) return SyntaxError();
    } while (cursor_.Take(','));
    return cursor_.Expect('}') ? absl::OkStatus() : SyntaxError();
  }

  // {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]} in any order.
  absl::Status ReadTensor(const std::string& name) {
    StoredTensor tensor;
    tensor.name_begin = header_.names.size();
    tensor.name_size = static_cast<uint32_t>(name.size());
    header_.names.insert(header_.names.end(), name.begin(), name.end());
    tensor.dims_begin = static_cast<uint32_t>(header_.dims.size());
    bool has_type = false, has_shape = false, has_offsets = false;
    if (!cursor_.Expect('{')) return SyntaxError();
    do {
      std::string_view field;
      if (!cursor_.String(&field)) return SyntaxError();
      bool* seen = field == "dtype" ? &has_type : field == "shape" ? &has_shape : &has_offsets;
      if (field != "dtype" && field != "shape" && field != "data_offsets") {
        return Error(Quoted(name), ": expected the fields dtype, shape and data_offsets, found '", EscapeName(field),
                     "'");
      }
      if (*seen) return Error(Quoted(name), ": the field ", std::string(field), " occurs twice");
      *seen = true;
      if (!cursor_.Expect(':')) return SyntaxError();
      absl::Status status = seen == &has_type    ? ReadType(name, tensor)
                            : seen == &has_shape ? ReadShape(name, tensor)
                                                 : ReadOffsets(name, tensor);
      if (!status.ok()) return status;
    } while (cursor_.Take(','));
    if (!cursor_.Expect('}')) return SyntaxError();
    if (!has_type || !has_shape || !has_offsets) {
      return Error(Quoted(name), ": the header lacks its ",
                   !has_type    ? "dtype"
                   : !has_shape ? "shape"
                                : "data_offsets");
    }
    header_.tensors.push_back(tensor);
    return CheckTensor(header_.tensors.back());
  }

  absl::Status ReadType(const std::string& name, StoredTensor& tensor) {
    std::string_view type;
    if (!cursor_.String(&type)) return Error(Quoted(name), ": dtype: ", cursor_.error());
    const int index = FindType(type);
    if (index < 0) return Error(Quoted(name), ": unknown dtype '", EscapeName(type), "'");
    tensor.type = static_cast<uint16_t>(index);
    return absl::OkStatus();
  }

  absl::Status ReadShape(const std::string& name, StoredTensor& tensor) {
    if (!cursor_.Expect('[')) return Error(Quoted(name), ": shape: ", cursor_.error());
    if (cursor_.Take(']')) return absl::OkStatus();
    do {
      uint64_t dim = 0;
      if (!cursor_.Unsigned(&dim)) return Error(Quoted(name), ": shape: ", cursor_.error());
      if (dim > static_cast<uint64_t>(INT64_MAX))
        return Error(Quoted(name), ": shape: the entry ", dim, " is too large");
      if (++tensor.rank > kMaxRank) return Error(Quoted(name), ": shape: more than ", kMaxRank, " dimensions");
      header_.dims.push_back(static_cast<int64_t>(dim));
    } while (cursor_.Take(','));
    return cursor_.Expect(']') ? absl::OkStatus() : Error(Quoted(name), ": shape: ", cursor_.error());
  }

  absl::Status ReadOffsets(const std::string& name, StoredTensor& tensor) {
    if (!cursor_.Expect('[') || !cursor_.Unsigned(&tensor.begin) || !cursor_.Expect(',') ||
        !cursor_.Unsigned(&tensor.end) || !cursor_.Expect(']')) {
      return Error(Quoted(name), ": data_offsets: ", cursor_.error());
    }
    return absl::OkStatus();
  }

  // Offsets still count from the end of the header here.
  absl::Status CheckTensor(StoredTensor& tensor) {
    const uint64_t data_size = file_size_ - data_begin_;
    const std::string offsets = absl::StrCat("data_offsets [", tensor.begin, ", ", tensor.end, "]");
    if (tensor.begin > tensor.end) return Error(QuotedName(tensor), ": ", offsets, " end before they start");
    if (tensor.end > data_size) {
      return Error(QuotedName(tensor), ": ", offsets, " reach past the end of the file: the header leaves ", data_size,
                   " bytes of data in a file of ", file_size_, " bytes (truncated?)");
    }
    const StoredType& type = kTypes[tensor.type];
    uint64_t bits = type.bits;
    bool overflow = false;
    bool empty = false;
    for (int64_t dim : header_.Shape(tensor)) {
      empty |= dim == 0;
      overflow |= __builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits);
    }
    if (empty) bits = 0, overflow = false;
    const std::string shape = absl::StrCat("[", absl::StrJoin(header_.Shape(tensor), ", "), "] ", type.name);
    if (overflow) return Error(QuotedName(tensor), ": the size of ", shape, " overflows");
    if (bits % 8 != 0 || bits / 8 != tensor.end - tensor.begin) {
      return Error(QuotedName(tensor), ": shape and dtype ", shape, " need ", bits / 8, " bytes, but ", offsets,
                   " hold ", tensor.end - tensor.begin);
    }
    tensor.begin += data_begin_;
    tensor.end += data_begin_;
    return absl::OkStatus();
  }

  // Tensors in file order, each beginning where the one before ends, the last ending at the end of the file.
  absl::Status CheckLayout() {
    std::vector<StoredTensor>& tensors = header_.tensors;
    absl::flat_hash_set<std::string_view> names;
    names.reserve(tensors.size());
    for (const StoredTensor& tensor : tensors) {
      if (!names.insert(header_.Name(tensor)).second) return Error(QuotedName(tensor), " is in the header twice");
    }
    const auto by_offset = [](const StoredTensor& a, const StoredTensor& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    };
    if (!std::is_sorted(tensors.begin(), tensors.end(), by_offset)) {
      std::stable_sort(tensors.begin(), tensors.end(), by_offset);
    }
    uint64_t end = data_begin_;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].begin < end) {
        return Error(QuotedName(tensors[i]), " overlaps ", QuotedName(tensors[i - 1]), ": it starts at data byte ",
                     tensors[i].begin - data_begin_, ", the other ends at ", end - data_begin_);
      }
      if (tensors[i].begin > end) {
        return Error(tensors[i].begin - end, " bytes before ", QuotedName(tensors[i]), " belong to no tensor");
      }
      end = tensors[i].end;
    }
    if (end != file_size_) {
      return Error(
          "8 + header length + largest end = ", end, " bytes, but the file has ", file_size_, ": ", file_size_ - end,
          " bytes follow the last tensor",
          tensors.empty() ? std::string() : absl::StrCat(" ('", EscapeName(header_.Name(tensors.back())), "')"));
    }
    return absl::OkStatus();
  }

  JsonCursor cursor_;
  uint64_t data_begin_;
  uint64_t file_size_;
  const std::string& file_;
  SafetensorsHeader header_;
};

}  // namespace

const char* SafetensorsHeader::TypeName(const StoredTensor& tensor) { return kTypes[tensor.type].name; }
std::optional<DType> SafetensorsHeader::Type(const StoredTensor& tensor) { return kTypes[tensor.type].dtype; }

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::span<const uint8_t> head, uint64_t file_size,
                                                         const std::string& file) {
  const auto error = [&](const auto&... parts) { return absl::DataLossError(absl::StrCat(file, ": ", parts...)); };
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  if (file_size == 0) return error("the file is empty");
  if (text.starts_with(kLfsPointer)) {
    return error("this is a Git LFS pointer of ", file_size,
                 " bytes, not the tensors (fetch them with `git lfs pull`)");
  }
  if (file_size < kLengthBytes || head.size() < kLengthBytes) {
    return error("expected a header length of 8 bytes, found a file of ", file_size, " bytes (truncated?)");
  }
  uint64_t length = 0;
  std::memcpy(&length, head.data(), kLengthBytes);  // little-endian, as is every machine we build for
  if (length == 0) return error("the header length is 0");
  if (length > kMaxHeaderBytes) {
    return error("the header length is ", length, " bytes, the format allows at most ", kMaxHeaderBytes);
  }
  if (length > file_size - kLengthBytes || length > head.size() - kLengthBytes) {
    return error("the header length is ", length, " bytes, but the file has only ", file_size, " (truncated?)");
  }
  return HeaderParser(text.substr(kLengthBytes, length), kLengthBytes + length, file_size, file).Parse();
}

}  // namespace k3
