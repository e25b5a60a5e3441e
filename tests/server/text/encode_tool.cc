// Encodes what scripts/compare_tokenizer.py sends, so that it can be compared with tiktoken id by id.
//   k3_encode_tool MODEL_DIR    stdin: mode (1 byte: o, c or b), size (4 bytes), text; stdout: count, ids (4 bytes
//   each); little-endian. Modes: ordinary, control, raw bytes. Count 0xFFFFFFFF: refused.
#include <cstdio>
#include <string>
#include <vector>

#include "server/text/tokenizer.h"

namespace {

bool ReadExactly(void* data, size_t size) { return std::fread(data, 1, size, stdin) == size; }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s MODEL_DIR\n", argv[0]);
    return 2;
  }
  const auto tokenizer = k3::Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().ToString().c_str());
    return 1;
  }
  char mode = 0;
  uint32_t size = 0;
  while (ReadExactly(&mode, 1) && ReadExactly(&size, 4)) {
    std::string text(size, '\0');
    if (!ReadExactly(text.data(), size)) return 1;
    std::vector<int32_t> ids;
    bool ok = true;
    if (mode == 'b') {
      (*tokenizer)->EncodeBytes(text, &ids);
    } else {
      ok = (*tokenizer)->Encode(text, mode == 'c' ? k3::EncodeMode::kControl : k3::EncodeMode::kOrdinary, &ids).ok();
    }
    const uint32_t count = ok ? static_cast<uint32_t>(ids.size()) : UINT32_MAX;
    std::fwrite(&count, 4, 1, stdout);
    std::fwrite(ids.data(), 4, ids.size(), stdout);
    std::fflush(stdout);
  }
  return 0;
}
