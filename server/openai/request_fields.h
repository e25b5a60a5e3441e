#pragma once

#include "server/openai/field_reader.h"
#include "server/openai/openai_request.h"

// Parts of a body that several routes share. Errors stay in the reader.
namespace k3 {

// model, sampling, stopping, cache, priority, session; n goes to `reply` too. Not: token limit, logprobs.
void ReadCommonFields(FieldReader& body, GenerationRequest* request, OpenAiReplyOptions* reply);
// stream, stream_options.
void ReadStreamFields(FieldReader& body, OpenAiReplyOptions* reply);
// prompt_logprobs, return_token_ids, and what logprobs ask of the engine.
void ReadOutputFields(FieldReader& body, GenerationRequest* request, OpenAiReplyOptions* reply);
// response_format and the spellings of other servers for the same.
void ReadConstraint(FieldReader& body, GenerationRequest* request, const OpenAiOptions& options);
// Fields that would change the meaning of the request if they were ignored, and that this server does not have.
void RefuseUnsupported(FieldReader& body, OpenAiRoute route);

}  // namespace k3
