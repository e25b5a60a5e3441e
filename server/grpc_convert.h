#pragma once

#include "absl/status/statusor.h"
#include "k3serve/inference/v1/chat.pb.h"
#include "k3serve/inference/v1/generation.pb.h"
#include "server/generation_request.h"
#include "server/stream_event.h"

// Between wire messages and their neutral form. Only what the wire form allows and the neutral one cannot express is an
// error here.
namespace k3 {

namespace pb = k3serve::inference::v1;

absl::StatusOr<GenerationRequest> FromProto(const pb::GenerationSpec& spec);
absl::StatusOr<ChatRequest> FromProto(const pb::ChatInput& chat);
absl::StatusOr<RequestedReasoning> FromProto(const pb::Reasoning& reasoning);
RequestedConstraint FromProto(const pb::Constraint& constraint);

void ToProto(const AcceptedEvent& event, pb::Accepted* out);
void ToProto(const LogprobRows& rows, pb::LogprobBlock* out);
void ToProto(DeltaEvent&& event, pb::Delta* out);
void ToProto(ToolCallEvent&& event, pb::ToolCallDelta* out);
void ToProto(const ChoiceFinishedEvent& event, pb::ChoiceFinished* out);
void ToProto(const FinishedEvent& event, pb::Usage* out);

}  // namespace k3
