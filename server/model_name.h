#pragma once

#include <string>

namespace k3 {

// What a model folder is called: its name, or ORGANISATION/NAME in the layout of the hub's cache
// (models--ORGANISATION--NAME/snapshots/REVISION), whose folders are named after commits. "model" for the root folder.
std::string ModelNameOf(const std::string& dir);

}  // namespace k3
