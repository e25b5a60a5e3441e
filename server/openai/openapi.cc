#include "server/openai/openapi.h"

#include "server/openai/reply_json.h"
#include "server/version.h"

namespace k3 {
namespace {

// Everything but the version, which stands between the two parts.
constexpr char kBefore[] = R"({"openapi":"3.1.0","info":{"title":"k3serve","version":)";
constexpr char kAfter[] = R"json(},
"paths":{
"/v1/chat/completions":{"post":{"summary":"Answer a conversation","requestBody":{"required":true,"content":{"application/json":{"schema":{"$ref":"#/components/schemas/ChatRequest"}}}},"responses":{"200":{"description":"A chat.completion, or with stream an event stream of chat.completion.chunk objects that ends with [DONE]","content":{"application/json":{"schema":{"type":"object"}},"text/event-stream":{"schema":{"type":"string"}}}},"default":{"$ref":"#/components/responses/Error"}}}},
"/v1/completions":{"post":{"summary":"Continue prompts","requestBody":{"required":true,"content":{"application/json":{"schema":{"$ref":"#/components/schemas/CompletionRequest"}}}},"responses":{"200":{"description":"A text_completion, or with stream an event stream of them that ends with [DONE]","content":{"application/json":{"schema":{"type":"object"}},"text/event-stream":{"schema":{"type":"string"}}}},"default":{"$ref":"#/components/responses/Error"}}}},
"/v1/models":{"get":{"summary":"The served names","responses":{"200":{"description":"A list of models"},"default":{"$ref":"#/components/responses/Error"}}}},
"/v1/models/{id}":{"get":{"summary":"One served name; it may hold slashes","parameters":[{"name":"id","in":"path","required":true,"schema":{"type":"string"}}],"responses":{"200":{"description":"A model"},"default":{"$ref":"#/components/responses/Error"}}}},
"/tokenize":{"post":{"summary":"Ids of a text, or of a conversation","requestBody":{"required":true,"content":{"application/json":{"schema":{"type":"object","properties":{"prompt":{"type":"string"},"messages":{"type":"array"},"control_tokens":{"type":"boolean","description":"spellings of control tokens become those tokens"}}}}}},"responses":{"200":{"$ref":"#/components/responses/Ids"},"default":{"$ref":"#/components/responses/Error"}}}},
"/detokenize":{"post":{"summary":"The text of ids","requestBody":{"required":true,"content":{"application/json":{"schema":{"type":"object","properties":{"token_ids":{"type":"array","items":{"type":"integer"}},"skip_control_tokens":{"type":"boolean"}},"required":["token_ids"]}}}},"responses":{"200":{"description":"The text"},"default":{"$ref":"#/components/responses/Error"}}}},
"/render":{"post":{"summary":"Prompt ids of a chat request, exactly those that a run would use; nothing is run","requestBody":{"required":true,"content":{"application/json":{"schema":{"$ref":"#/components/schemas/ChatRequest"}}}},"responses":{"200":{"$ref":"#/components/responses/Ids"},"default":{"$ref":"#/components/responses/Error"}}}},
"/tokenizer_info":{"get":{"summary":"Vocabulary size, special tokens, chat format","responses":{"200":{"description":"The tokenizer"},"default":{"$ref":"#/components/responses/Error"}}}},
"/health":{"get":{"summary":"The same as /health/ready","responses":{"200":{"description":"Ready"},"503":{"description":"Loading, draining or stalled"}}}},
"/health/live":{"get":{"summary":"The process answers","responses":{"200":{"description":"Live"}}}},
"/health/ready":{"get":{"summary":"Requests are served","responses":{"200":{"description":"Ready"},"503":{"description":"Loading, draining or stalled"}}}},
"/metrics":{"get":{"summary":"Metrics in Prometheus' text format","responses":{"200":{"description":"Metrics","content":{"text/plain":{"schema":{"type":"string"}}}}}}},
"/version":{"get":{"summary":"Release and commit","responses":{"200":{"description":"The version"}}}},
"/openapi.json":{"get":{"summary":"This document","responses":{"200":{"description":"This document"}}}}
},
"components":{
"securitySchemes":{"key":{"type":"http","scheme":"bearer"}},
"responses":{
"Error":{"description":"What went wrong","content":{"application/json":{"schema":{"type":"object","properties":{"error":{"type":"object","properties":{"message":{"type":"string"},"type":{"type":"string"},"param":{"type":["string","null"]},"code":{"type":["string","null"]}},"required":["message","type","param","code"]}},"required":["error"]}}}},
"Ids":{"description":"Token ids","content":{"application/json":{"schema":{"type":"object","properties":{"token_ids":{"type":"array","items":{"type":"integer"}},"count":{"type":"integer"}},"required":["token_ids","count"]}}}}
},
"schemas":{
"Sampling":{"type":"object","properties":{
"model":{"type":["string","null"]},"temperature":{"type":["number","null"],"minimum":0,"maximum":2},"top_p":{"type":["number","null"],"exclusiveMinimum":0,"maximum":1},"top_k":{"type":["integer","null"],"description":"0 or -1: off"},"min_p":{"type":["number","null"],"minimum":0,"exclusiveMaximum":1},"presence_penalty":{"type":["number","null"],"minimum":-2,"maximum":2},"frequency_penalty":{"type":["number","null"],"minimum":-2,"maximum":2},"repetition_penalty":{"type":["number","null"],"exclusiveMinimum":0,"maximum":10},"seed":{"type":["integer","null"]},"logit_bias":{"type":["object","null"],"additionalProperties":{"type":"number","minimum":-100,"maximum":100}},"n":{"type":["integer","null"],"minimum":1,"maximum":128},"stop":{"type":["string","array","null"],"items":{"type":"string","minLength":1,"maxLength":256},"maxItems":16},"stop_token_ids":{"type":["array","null"],"items":{"type":"integer"}},"ignore_eos":{"type":["boolean","null"]},"min_tokens":{"type":["integer","null"],"minimum":0},"max_tokens":{"type":["integer","null"]},"repetition_stop":{"type":["object","null"],"properties":{"max_period":{"type":"integer"},"count":{"type":"integer"}}},"stream":{"type":["boolean","null"]},"stream_options":{"type":["object","null"],"properties":{"include_usage":{"type":"boolean"},"continuous_usage_stats":{"type":"boolean"},"heartbeat":{"type":"boolean","description":"comment lines while nothing else is sent; default true"}}},"return_token_ids":{"type":["boolean","null"]},"prompt_logprobs":{"type":["integer","boolean","null"]},"priority":{"type":["integer","null"],"description":"higher runs sooner"},"session_id":{"type":["string","null"]},"cache_salt":{"type":["string","null"]},"bypass_prefix_cache":{"type":["boolean","null"]}}},
"ChatRequest":{"allOf":[{"$ref":"#/components/schemas/Sampling"},{"type":"object","required":["messages"],"properties":{
"messages":{"type":"array","minItems":1,"items":{"type":"object","required":["role"],"properties":{"role":{"enum":["system","developer","user","assistant","tool"]},"content":{"type":["string","array","null"]},"name":{"type":["string","null"]},"reasoning_content":{"type":["string","null"]},"tool_calls":{"type":["array","null"]},"tool_call_id":{"type":["string","null"]},"tools":{"type":["array","null"],"description":"system: tools that join the conversation here"},"partial":{"type":["boolean","null"],"description":"last message, assistant: it is continued"}}}},"tools":{"type":["array","null"]},"tool_choice":{"description":"auto, none, required, or a named function"},"parallel_tool_calls":{"type":["boolean","null"]},"response_format":{"type":["object","null"]},"reasoning_effort":{"enum":["low","high","max","none","minimal","medium","xhigh",null],"description":"minimal counts as low, medium as high, xhigh as max"},"thinking":{"type":["object","null"],"properties":{"type":{"enum":["enabled","disabled"]},"effort":{"enum":["low","high","max"]},"keep":{"enum":["all","none"]}}},"chat_template_kwargs":{"type":["object","null"],"properties":{"thinking":{"type":"boolean"},"thinking_effort":{"type":"string"},"preserve_thinking":{"type":"boolean"}}},"max_completion_tokens":{"type":["integer","null"],"description":"wins over max_tokens; absent: what is left of the context"},"logprobs":{"type":["boolean","null"]},"top_logprobs":{"type":["integer","null"],"minimum":0,"maximum":20}}}]},
"CompletionRequest":{"allOf":[{"$ref":"#/components/schemas/Sampling"},{"type":"object","required":["prompt"],"properties":{"prompt":{"description":"a string, strings, token ids, or lists of token ids"},"echo":{"type":["boolean","null"]},"logprobs":{"type":["integer","null"],"minimum":0,"maximum":20},"control_tokens":{"type":["boolean","null"],"description":"spellings of control tokens in the prompt become those tokens"},"response_format":{"type":["object","null"]}}}]}
}}})json";

}  // namespace

std::string OpenApiDocument() { return kBefore + JsonString(kVersion) + kAfter; }

}  // namespace k3
