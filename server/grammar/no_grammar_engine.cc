#include "server/grammar/grammar_engine.h"

// The build without the grammar library.
namespace k3 {

std::unique_ptr<GrammarEngine> MakeGrammarEngine(const Tokenizer&, int32_t, std::vector<int32_t>) { return nullptr; }

}  // namespace k3
