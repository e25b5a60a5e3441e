#include "engine/model/file_link.h"

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace k3 {

std::string DanglingLink(const std::string& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(path, error);
  if (error || std::filesystem::exists(path, error)) return "";
  return absl::StrCat(" (a link to ", target.string(), ", which is not there)");
}

}  // namespace k3
