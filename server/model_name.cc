#include "server/model_name.h"

#include <filesystem>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace k3 {
namespace {

constexpr std::string_view kHubPrefix = "models--";
constexpr std::string_view kHubSeparator = "--";

// "" when `folder` is no model's folder of the hub's cache.
std::string HubName(const std::string& folder) {
  if (!folder.starts_with(kHubPrefix)) return "";
  const std::string name = folder.substr(kHubPrefix.size());
  const size_t separator = name.find(kHubSeparator);
  if (separator == std::string::npos) return name;
  return absl::StrCat(name.substr(0, separator), "/", name.substr(separator + kHubSeparator.size()));
}

}  // namespace

std::string ModelNameOf(const std::string& dir) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(dir, error).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();  // a slash at the end
  if (path.parent_path().filename() == "snapshots") {
    const std::string name = HubName(path.parent_path().parent_path().filename().string());
    if (!name.empty()) return name;
  }
  const std::string name = path.filename().string();
  return name.empty() ? "model" : name;
}

}  // namespace k3
