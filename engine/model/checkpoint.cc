#include "engine/model/checkpoint.h"

#include <filesystem>
#include <mutex>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/model/file_link.h"
#include "engine/model/json_cursor.h"
#include "engine/model/name_list.h"
#include "kernels/core/check.h"
#include "spdlog/spdlog.h"

namespace k3 {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int kMaxIndexDepth = 16;

// A checkpoint is opened several times in one start: for the plan, and by each rank. One warning is enough.
bool FirstMention(const std::string& path) {
  static std::mutex mutex;
  static std::set<std::string> mentioned;  // guarded by mutex
  std::lock_guard lock(mutex);
  return mentioned.insert(path).second;
}

// Walks {"metadata": {...}, "weight_map": {name: file, ...}} and calls `entry(name, file)` for each pair.
template <typename Entry>
absl::Status WalkIndex(const MappedFile& file, std::optional<uint64_t>* total_size, Entry entry) {
  JsonCursor json({reinterpret_cast<const char*>(file.data()), file.size()});
  const auto syntax_error = [&] {
    return absl::DataLossError(absl::StrCat(file.path(), ": invalid JSON: ", json.error()));
  };
  bool has_map = false;
  if (!json.Expect('{')) return syntax_error();
  if (!json.Take('}')) {
    do {
      std::string_view key;
      if (!json.String(&key)) return syntax_error();
      const bool is_map = key == "weight_map";
      const bool is_metadata = key == "metadata";
      if (!json.Expect(':')) return syntax_error();
      if (!is_map && !(is_metadata && json.Take('{'))) {
        if (!json.SkipValue(kMaxIndexDepth)) return syntax_error();
        continue;
      }
      if (is_map && has_map) return absl::DataLossError(absl::StrCat(file.path(), ": weight_map occurs twice"));
      has_map |= is_map;
      if (is_map && !json.Expect('{')) return syntax_error();
      if (json.Take('}')) continue;
      std::string name;
      do {
        std::string_view text;
        if (!json.String(&text)) return syntax_error();
        name.assign(text);
        if (!json.Expect(':')) return syntax_error();
        if (is_map) {
          if (!json.String(&text)) return syntax_error();
          if (absl::Status status = entry(name, text); !status.ok()) return status;
        } else if (uint64_t number = 0; name == "total_size" && json.Unsigned(&number)) {
          *total_size = number;
        } else if (!json.SkipValue(kMaxIndexDepth)) {
          return syntax_error();
        }
      } while (json.Take(','));
      if (!json.Expect('}')) return syntax_error();
    } while (json.Take(','));
    if (!json.Expect('}')) return syntax_error();
  }
  if (!json.AtEnd()) return syntax_error();
  if (!has_map) return absl::DataLossError(absl::StrCat(file.path(), ": expected an object weight_map, found none"));
  return absl::OkStatus();
}

// The files that the index names, sorted, each once.
absl::StatusOr<std::vector<std::string>> ShardNames(const MappedFile& index) {
  std::optional<uint64_t> total_size;
  std::set<std::string> names;
  std::string last;  // neighbours usually share a file
  const absl::Status status = WalkIndex(index, &total_size, [&](const std::string& tensor, std::string_view shard) {
    if (shard == last) return absl::OkStatus();
    last.assign(shard);
    if (shard.empty() || shard.find('/') != std::string_view::npos || shard == "." || shard == "..") {
      return absl::DataLossError(absl::StrCat(index.path(), ": tensor '", EscapeName(tensor),
                                              "': expected a file name in the same directory, found '",
                                              EscapeName(shard), "'"));
    }
    names.insert(last);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return std::vector<std::string>(names.begin(), names.end());
}

// All missing files in one message.
absl::Status CheckPresence(const std::string& dir, const std::vector<std::string>& names,
                           const std::string& index_path) {
  NameList missing;
  std::error_code error;
  for (const std::string& name : names) {
    const std::string path = dir + "/" + name;
    if (!std::filesystem::exists(path, error)) missing.Add(absl::StrCat(EscapeName(name), DanglingLink(path)));
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(index_path, ": names ", missing.count(), " of ", names.size(),
                                          " files that are not in the directory: ", missing.ToString()));
}

std::string FileName(const std::string& path) { return std::filesystem::path(path).filename().string(); }

// That the index and the headers of the opened shards place the same tensors in the same files.
absl::Status CompareWithIndex(const Checkpoint& checkpoint, const MappedFile& index,
                              const absl::flat_hash_map<std::string, uint32_t>& shard_of_name) {
  const auto shard_name = [&](uint32_t shard) { return FileName(checkpoint.shard_file(shard).path()); };
  std::vector<std::vector<bool>> listed(checkpoint.num_shards());
  for (size_t s = 0; s < listed.size(); ++s) listed[s].resize(checkpoint.shard_header(s).tensors.size());
  NameList absent, misplaced, doubled;
  std::optional<uint64_t> total_size;
  std::string last;  // neighbours usually share a file
  uint32_t expected = 0;
  const absl::Status status = WalkIndex(index, &total_size, [&](const std::string& tensor, std::string_view shard) {
    if (shard != last) {
      last.assign(shard);
      expected = shard_of_name.at(last);
    }
    const std::optional<Checkpoint::Location> at = checkpoint.Find(tensor);
    if (!at) {
      absent.Add(absl::StrCat("'", EscapeName(tensor), "' (", last, ")"));
      return absl::OkStatus();
    }
    if (at->shard != expected) {
      misplaced.Add(absl::StrCat("'", tensor, "' (index: ", last, ", found in ", shard_name(at->shard), ")"));
    }
    if (listed[at->shard][at->index]) doubled.Add(absl::StrCat("'", tensor, "'"));
    listed[at->shard][at->index] = true;
    return absl::OkStatus();
  });
  if (!status.ok()) return status;

  NameList unlisted;
  for (uint32_t s = 0; s < listed.size(); ++s) {
    for (uint32_t i = 0; i < listed[s].size(); ++i) {
      if (listed[s][i]) continue;
      unlisted.Add(absl::StrCat("'", EscapeName(checkpoint.Name({s, i})), "' (", shard_name(s), ")"));
    }
  }
  const auto disagree = [&](const char* what, const NameList& names) {
    return absl::DataLossError(absl::StrCat(index.path(), ": ", names.count(), " ", what, ": ", names.ToString()));
  };
  if (!absent.empty()) return disagree("tensors of the index are not in the file it names", absent);
  if (!misplaced.empty()) return disagree("tensors of the index are in another file than it names", misplaced);
  if (!doubled.empty()) return disagree("tensors are in the index twice", doubled);
  if (!unlisted.empty()) return disagree("tensors of the files are not in the index", unlisted);
  if (total_size && *total_size != checkpoint.total_bytes() && FirstMention(index.path())) {
    spdlog::warn("{}: metadata.total_size is {}, the files hold {} bytes of tensors", index.path(), *total_size,
                 checkpoint.total_bytes());
  }
  return absl::OkStatus();
}

}  // namespace

bool Checkpoint::Exists(const std::string& dir) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    if (entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(absl::StrCat(dir, ": expected a model directory, found none"));
  }
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  const std::string index = dir + "/" + kIndexFile;
  const std::string single = dir + "/" + kSingleFile;
  // A link that leads nowhere counts: opening it says so.
  const auto is_there = [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
  };
  absl::Status status;
  if (is_there(index)) {
    status = checkpoint->OpenSharded(dir, index);
  } else if (is_there(single)) {
    status = checkpoint->OpenShard(single);
    if (status.ok()) status = checkpoint->IndexNames();
  } else {
    NameList others;
    for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
      if (entry.path().extension() == ".safetensors") others.Add(entry.path().filename().string());
    }
    status = absl::NotFoundError(absl::StrCat(
        dir, ": expected ", kIndexFile, " or ", kSingleFile, ", found neither",
        others.empty() ? std::string()
                       : absl::StrCat(" (but there are ", others.ToString(), ": their index is missing)")));
  }
  if (!status.ok()) return status;
  return checkpoint;
}

absl::Status Checkpoint::OpenShard(const std::string& path) {
  auto file = MappedFile::Open(path);
  if (!file.ok()) return file.status();
  auto header = ParseSafetensorsHeader((*file)->bytes(), (*file)->size(), path);
  if (!header.ok()) return header.status();
  // Half a million entries make some 90 MB of header text: not needed again.
  (*file)->Release(0, header->tensors.empty() ? (*file)->size() : header->tensors.front().begin);
  for (const StoredTensor& tensor : header->tensors) total_bytes_ += tensor.end - tensor.begin;
  header->names.shrink_to_fit();
  header->dims.shrink_to_fit();
  header->tensors.shrink_to_fit();
  shards_.push_back({std::move(*file), std::move(*header)});
  return absl::OkStatus();
}

absl::Status Checkpoint::IndexNames() {
  size_t count = 0;
  for (const Shard& shard : shards_) count += shard.header.tensors.size();
  by_name_.reserve(count);
  for (uint32_t s = 0; s < shards_.size(); ++s) {
    const SafetensorsHeader& header = shards_[s].header;
    for (uint32_t i = 0; i < header.tensors.size(); ++i) {
      const auto [it, added] = by_name_.try_emplace(header.Name(header.tensors[i]), Location{s, i});
      if (!added) {
        return absl::DataLossError(absl::StrCat("tensor '", EscapeName(it->first),
                                                "' is in two files: ", shards_[it->second.shard].file->path(), " and ",
                                                shards_[s].file->path()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::OpenSharded(const std::string& dir, const std::string& index_path) {
  auto index = MappedFile::Open(index_path);
  if (!index.ok()) return index.status();

  // First walk: which files. Second, once their headers are known: which tensor where. Nothing of the text is kept.
  auto names = ShardNames(**index);
  if (!names.ok()) return names.status();
  if (absl::Status status = CheckPresence(dir, *names, index_path); !status.ok()) return status;
  absl::flat_hash_map<std::string, uint32_t> shard_of_name;
  for (const std::string& name : *names) {
    shard_of_name[name] = static_cast<uint32_t>(shards_.size());
    if (absl::Status status = OpenShard(dir + "/" + name); !status.ok()) return status;
  }
  if (absl::Status status = IndexNames(); !status.ok()) return status;
  return CompareWithIndex(*this, **index, shard_of_name);
}

std::optional<Checkpoint::Location> Checkpoint::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return std::nullopt;
  return it->second;
}

HostTensor Checkpoint::View(Location at) const {
  const std::optional<DType> type = Type(at);
  K3_CHECK(type.has_value());
  HostTensor tensor;
  tensor.data = File(at).data() + Stored(at).begin;
  tensor.dtype = *type;
  const std::span<const int64_t> shape = Shape(at);
  tensor.shape.assign(shape.begin(), shape.end());
  tensor.name = std::string(Name(at));
  return tensor;
}

}  // namespace k3
