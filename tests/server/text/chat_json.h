#pragma once

#include "server/text/chat_types.h"
#include "server/text/json_value.h"

namespace k3::testing {

// A conversation from test data: messages and options under the names of tests/data/chat.json. For well-formed input;
// the server's own reading of requests is elsewhere.
ChatRequest ReadChatJson(const JsonValue& conversation);

}  // namespace k3::testing
