#pragma once

#include <string>

namespace k3 {

// For messages about a file that cannot be opened: " (a link to TARGET, which is not there)", or nothing when it is no
// such link. Folders of the hub's cache consist of links into another folder, which a copy or a mount may have missed.
std::string DanglingLink(const std::string& path);

}  // namespace k3
