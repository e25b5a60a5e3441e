#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/generation_request.h"
#include "server/grammar/grammar_node.h"
#include "server/text/chat_renderer.h"
#include "server/text/json_value.h"
#include "server/text/tokenizer.h"

namespace k3 {

// What a request demands of its answer's form.
struct AnswerGrammar {
  GrammarNode root;
  // The arguments of a tool without `strict` follow its schema as far as that can be enforced. When the whole does not
  // compile, this one, which lets such arguments be anything, may.
  std::optional<GrammarNode> relaxed;
  std::string path;   // the field that the grammar comes from, for messages
  std::string begun;  // constrained text that the prompt holds already: of a message to continue
};

// Nullopt when any answer will do. Constraints hold in the channel that they speak of: reasoning is free, the response
// channel holds the constrained text, tool calls follow their schemas; the markup between them is fixed.
//
// INVALID_ARGUMENT naming the field when a schema, pattern or grammar cannot be enforced (see CheckSchema): a
// FieldError for what the client wrote, an InvalidField for what is ours. `prompt` is null for a raw prompt, whose
// whole answer is the constrained text.
absl::StatusOr<std::optional<AnswerGrammar>> BuildAnswerGrammar(const GenerationRequest& request,
                                                                const Tokenizer& tokenizer, ChatFormat format,
                                                                const ChatPrompt* prompt);

// The schema of a constraint that is one. An error names the field that the client knows.
absl::StatusOr<JsonValue> SchemaOf(const RequestedConstraint& constraint);

}  // namespace k3
