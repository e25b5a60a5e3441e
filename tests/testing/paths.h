#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace k3::testing {

// The source tree, from any build folder.
inline std::string SourcePath(const std::string& relative) { return std::string(K3_SOURCE_DIR) + "/" + relative; }
inline std::string TinyK3() { return SourcePath("configs/models/tiny-k3"); }
inline std::string TinyKimiLinear() { return SourcePath("tests/data/tiny-kimi-linear"); }
inline std::string DataFile(const std::string& name) { return SourcePath("tests/data/" + name); }

// The vendor's real vocabulary, for tests that run where it is present: the folder named by K3_KIMI_TOKENIZER.
// Empty when absent.
inline std::string RealTokenizerDir() {
  const char* dir = std::getenv("K3_KIMI_TOKENIZER");
  if (dir == nullptr || !std::filesystem::exists(std::string(dir) + "/tiktoken.model")) return "";
  return dir;
}

}  // namespace k3::testing
