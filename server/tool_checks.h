#pragma once

#include "absl/status/status.h"
#include "server/text/chat_types.h"

namespace k3 {

// What must hold of the tools of a conversation, whichever front end it came by: each is a function with a legal name
// that no other has, those that join later stand in system messages, and the tool choice can be fulfilled. FieldErrors
// with OpenAI paths: tools[2].function.name, messages[1].tools[0], tool_choice.
//
// In vendor-strict mode also: names begin with a letter or '_', parameters describe an object, a system message that
// brings tools has no content, tool results name their call.
absl::Status CheckTools(const ChatRequest& request, bool vendor_strict);

}  // namespace k3
