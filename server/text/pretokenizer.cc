#define PCRE2_CODE_UNIT_WIDTH 8
#include "server/text/pretokenizer.h"

#include <pcre2.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "server/text/unicode_classes.h"
#include "server/text/utf8.h"

namespace k3 {
namespace {

// K3's split pattern over character classes, alternatives in the released order. Of the released sets,
//   [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]  is UPPER,  [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]  is LOWER,
//   [^\r\n\p{L}\p{N}] is PREFIX,  [^\s\p{L}\p{N}] is SYMBOL,  \s is SPACE.
#define K3_UPPER "[ASTREVMLDok]"
#define K3_LOWER "[astrevmldok]"
#define K3_PREFIX "[ \\t'.kKP]"
#define K3_SYMBOL "['.kKP]"
#define K3_SPACE "[ \\t\\n]"
#define K3_CONTRACTION "(?:'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))?"
constexpr char kPattern[] =
    "[HJKP]+"
    "|" K3_PREFIX "?" K3_UPPER "*" K3_LOWER "+" K3_CONTRACTION "|" K3_PREFIX "?" K3_UPPER "+" K3_LOWER
    "*" K3_CONTRACTION
    "|[1J]{1,3}"
    "| ?" K3_SYMBOL
    "+\\n*"
    "|" K3_SPACE
    "*\\n+"
    "|" K3_SPACE
    "+(?!"
    "[^ \\t\\n]"
    ")"
    "|" K3_SPACE "+";

// Two-level table of all code points: blocks of 256, equal ones shared.
class ClassTable {
 public:
  ClassTable() {
    const std::span<const CharClassRange> ranges = CharClassRanges();
    size_t range = 0;
    for (uint32_t block = 0; block < block_index_.size(); ++block) {
      std::array<char, 256> classes;
      for (uint32_t i = 0; i < 256; ++i) {
        const uint32_t code_point = block * 256 + i;
        while (range + 1 < ranges.size() && ranges[range + 1].first <= code_point) ++range;
        classes[i] = ranges[range].char_class;
      }
      size_t found = 0;
      while (found < blocks_.size() && blocks_[found] != classes) ++found;
      if (found == blocks_.size()) blocks_.push_back(classes);
      block_index_[block] = static_cast<uint8_t>(found);
    }
    K3_CHECK(blocks_.size() <= 256);
  }

  char operator[](uint32_t code_point) const { return blocks_[block_index_[code_point >> 8]][code_point & 0xFF]; }

 private:
  std::array<uint8_t, 0x1100> block_index_;
  std::vector<std::array<char, 256>> blocks_;
};

const ClassTable& Classes() {
  static const ClassTable table;
  return table;
}

// One class byte per character. Returns whether the text is all ASCII, so that characters and bytes coincide.
bool ClassifyText(std::string_view text, std::string* classes) {
  const ClassTable& table = Classes();
  classes->resize(text.size());
  char* out = classes->data();
  const char* const begin = out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<uint8_t>(text[i]);
    if (byte < 0x80) {
      *out++ = table[byte];
      ++i;
      continue;
    }
    const Utf8Char c = DecodeUtf8(text.substr(i));
    *out++ = c.length > 0 ? table[c.code_point] : '.';
    i += c.length > 0 ? c.length : 1;
  }
  classes->resize(out - begin);
  return classes->size() == text.size();
}

size_t CharLength(std::string_view text) {
  if (static_cast<uint8_t>(text[0]) < 0x80) return 1;
  const int length = DecodeUtf8(text).length;
  return length > 0 ? length : 1;
}

}  // namespace

struct Pretokenizer::Compiled {
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;

  ~Compiled() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
};

Pretokenizer::Pretokenizer() : compiled_(std::make_unique<Compiled>()) {}
Pretokenizer::~Pretokenizer() = default;

absl::StatusOr<std::unique_ptr<Pretokenizer>> Pretokenizer::Create(Engine engine) {
  std::unique_ptr<Pretokenizer> result(new Pretokenizer());
  Compiled& compiled = *result->compiled_;
  int error = 0;
  PCRE2_SIZE offset = 0;
  compiled.code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), PCRE2_ZERO_TERMINATED,
                                PCRE2_ANCHORED | PCRE2_NO_AUTO_CAPTURE, &error, &offset, nullptr);
  compiled.context = pcre2_match_context_create(nullptr);
  if (compiled.code == nullptr || compiled.context == nullptr) {
    return absl::InternalError(absl::StrCat("PCRE2 refused the split pattern: error ", error, " at offset ", offset));
  }
  // Every set is followed by what it cannot contain or by backing off one character at a time, so the work per match is
  // linear and the interpreter needs no bound; a run of a million characters would exceed the default ones.
  pcre2_set_match_limit(compiled.context, UINT32_MAX);
  pcre2_set_depth_limit(compiled.context, UINT32_MAX);
  pcre2_set_heap_limit(compiled.context, UINT32_MAX);
  if (engine == Engine::kJit && pcre2_jit_compile(compiled.code, PCRE2_JIT_COMPLETE) == 0) {
    result->engine_ = Engine::kJit;
  }
  Classes();
  return result;
}

void Pretokenizer::Split(std::string_view text, std::vector<uint32_t>* piece_ends) const {
  std::string classes;
  const bool ascii = ClassifyText(text, &classes);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(classes.data());
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  K3_CHECK(match != nullptr);
  const PCRE2_SIZE* const bounds = pcre2_get_ovector_pointer(match);

  size_t byte = 0;
  for (size_t at = 0; at < classes.size();) {
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (engine_ == Engine::kJit) {
      rc = pcre2_jit_match(compiled_->code, subject, classes.size(), at, 0, match, compiled_->context);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(compiled_->code, subject, classes.size(), at, PCRE2_NO_JIT, match, compiled_->context);
    }
    K3_CHECK(rc > 0 && bounds[1] > at);  // some alternative takes any character
    if (ascii) {
      byte = bounds[1];
    } else {
      for (; at < bounds[1]; ++at) byte += CharLength(text.substr(byte));
    }
    at = bounds[1];
    piece_ends->push_back(static_cast<uint32_t>(byte));
  }
  pcre2_match_data_free(match);
}

}  // namespace k3
