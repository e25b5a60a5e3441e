#include "server/grpc_convert.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/text/json_parser.h"

namespace k3 {
namespace {

template <class T, class U>
void CopyIf(bool has, const T& value, std::optional<U>* out) {
  if (has) *out = value;
}

absl::StatusOr<JsonValue> ToolToJson(const pb::Tool& tool, const std::string& path) {
  JsonValue function = JsonValue::Object();
  function.Set("name", JsonValue::String(tool.name()));
  if (tool.has_description()) function.Set("description", JsonValue::String(tool.description()));
  if (tool.has_parameters_json_schema()) {
    absl::StatusOr<JsonValue> schema = ParseJson(tool.parameters_json_schema());
    if (!schema.ok()) {
      return InvalidField(absl::StrCat(path, ".parameters_json_schema"), std::string(schema.status().message()));
    }
    function.Set("parameters", *std::move(schema));
  }
  if (tool.has_strict()) function.Set("strict", JsonValue::Bool(tool.strict()));
  JsonValue json = JsonValue::Object();
  json.Set("type", JsonValue::String("function"));
  json.Set("function", std::move(function));
  return json;
}

// Null when there are none.
absl::StatusOr<JsonValue> ToolsToJson(const google::protobuf::RepeatedPtrField<pb::Tool>& tools,
                                      const std::string& path) {
  if (tools.empty()) return JsonValue();
  std::vector<JsonValue> items;
  for (int i = 0; i < tools.size(); ++i) {
    absl::StatusOr<JsonValue> tool = ToolToJson(tools[i], absl::StrCat(path, "[", i, "]"));
    if (!tool.ok()) return tool.status();
    items.push_back(*std::move(tool));
  }
  return JsonValue::Array(std::move(items));
}

absl::StatusOr<std::string> RoleName(pb::Role role, const std::string& path) {
  switch (role) {
    case pb::ROLE_SYSTEM:
      return std::string("system");
    case pb::ROLE_USER:
      return std::string("user");
    case pb::ROLE_ASSISTANT:
      return std::string("assistant");
    case pb::ROLE_TOOL:
      return std::string("tool");
    default:
      return InvalidField(absl::StrCat(path, ".role"),
                          "must be one of ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL");
  }
}

absl::StatusOr<ChatMessage> MessageFromProto(const pb::ChatMessage& message, const std::string& path) {
  ChatMessage out;
  absl::StatusOr<std::string> role = RoleName(message.role(), path);
  if (!role.ok()) return role.status();
  out.role = *std::move(role);
  if (message.content_size() > 0) out.content.form = ChatContent::Form::kParts;
  for (int i = 0; i < message.content_size(); ++i) {
    const pb::ContentPart& part = message.content(i);
    const std::string part_path = absl::StrCat(path, ".content[", i, "]");
    if (part.has_media()) return UnimplementedFeature(absl::StrCat(part_path, ".media"), "this server takes no images");
    if (!part.has_text()) return InvalidField(part_path, "is empty");
    out.content.parts.push_back({"text", part.text()});
  }
  out.name = message.name();
  out.reasoning_content = message.reasoning();
  for (const pb::ToolCall& call : message.tool_calls()) {
    ToolCall& added = out.tool_calls.emplace_back();
    added.id = call.id();
    added.name = call.name();
    added.arguments_text = call.arguments();
  }
  if (message.has_tool_call_id()) out.tool_call_id = message.tool_call_id();
  absl::StatusOr<JsonValue> tools = ToolsToJson(message.tools(), absl::StrCat(path, ".tools"));
  if (!tools.ok()) return tools.status();
  out.tools = *std::move(tools);
  out.partial = message.partial();
  return out;
}

absl::StatusOr<std::vector<PromptSegment>> FromProto(const pb::SegmentList& list) {
  std::vector<PromptSegment> segments;
  for (int i = 0; i < list.segments_size(); ++i) {
    const pb::Segment& segment = list.segments(i);
    const std::string path = absl::StrCat("prompt.segments[", i, "]");
    PromptSegment& out = segments.emplace_back();
    out.control_tokens = segment.control_tokens();
    switch (segment.part_case()) {
      case pb::Segment::kText:
        out.part = segment.text();
        break;
      case pb::Segment::kIds:
        out.part = std::vector<uint32_t>(segment.ids().ids().begin(), segment.ids().ids().end());
        break;
      case pb::Segment::kMedia:
        return UnimplementedFeature(absl::StrCat(path, ".media"), "this server takes no images");
      case pb::Segment::PART_NOT_SET:
        return InvalidField(path, "has neither text nor ids");
    }
  }
  return segments;
}

RequestedSampling FromProto(const pb::Sampling& sampling) {
  RequestedSampling out;
  CopyIf(sampling.has_temperature(), sampling.temperature(), &out.temperature);
  CopyIf(sampling.has_top_p(), sampling.top_p(), &out.top_p);
  CopyIf(sampling.has_top_k(), sampling.top_k(), &out.top_k);
  CopyIf(sampling.has_min_p(), sampling.min_p(), &out.min_p);
  CopyIf(sampling.has_presence_penalty(), sampling.presence_penalty(), &out.presence_penalty);
  CopyIf(sampling.has_frequency_penalty(), sampling.frequency_penalty(), &out.frequency_penalty);
  CopyIf(sampling.has_repetition_penalty(), sampling.repetition_penalty(), &out.repetition_penalty);
  CopyIf(sampling.has_seed(), sampling.seed(), &out.seed);
  CopyIf(sampling.has_n(), sampling.n(), &out.n);
  for (const auto& [id, bias] : sampling.logit_bias()) out.logit_bias.emplace_back(id, bias);
  return out;
}

RequestedStopping FromProto(const pb::Stopping& stopping) {
  RequestedStopping out;
  CopyIf(stopping.has_max_new_tokens(), stopping.max_new_tokens(), &out.max_new_tokens);
  CopyIf(stopping.has_min_new_tokens(), stopping.min_new_tokens(), &out.min_new_tokens);
  out.stop.assign(stopping.stop().begin(), stopping.stop().end());
  out.stop_token_ids.assign(stopping.stop_token_ids().begin(), stopping.stop_token_ids().end());
  out.ignore_eos = stopping.ignore_eos();
  out.repetition_max_period = stopping.repetition().max_period();
  out.repetition_count = stopping.repetition().count();
  return out;
}

void ToProto(const EffectiveSampling& effective, pb::Sampling* out) {
  const SamplingParams& params = effective.params;
  out->set_temperature(params.temperature);
  out->set_top_p(params.top_p);
  out->set_top_k(static_cast<uint32_t>(params.top_k));
  out->set_min_p(params.min_p);
  out->set_presence_penalty(params.presence_penalty);
  out->set_frequency_penalty(params.frequency_penalty);
  out->set_repetition_penalty(params.repetition_penalty);
  out->set_seed(params.seed);
  out->set_n(static_cast<uint32_t>(effective.num_choices));
  for (const auto& [id, bias] : params.logit_bias) (*out->mutable_logit_bias())[static_cast<uint32_t>(id)] = bias;
}

}  // namespace

absl::StatusOr<ChatRequest> FromProto(const pb::ChatInput& chat) {
  ChatRequest out;
  for (int i = 0; i < chat.messages_size(); ++i) {
    absl::StatusOr<ChatMessage> message = MessageFromProto(chat.messages(i), absl::StrCat("chat.messages[", i, "]"));
    if (!message.ok()) return message.status();
    out.messages.push_back(*std::move(message));
  }
  absl::StatusOr<JsonValue> tools = ToolsToJson(chat.tools(), "chat.tools");
  if (!tools.ok()) return tools.status();
  out.tools = *std::move(tools);
  const pb::ToolChoice& choice = chat.tool_choice();
  if (choice.has_tool_name()) {
    out.options.tool_choice = ToolChoice::kNamed;
    out.options.tool_choice_name = choice.tool_name();
  } else {
    switch (choice.mode()) {
      case pb::TOOL_CHOICE_MODE_UNSPECIFIED:
      case pb::TOOL_CHOICE_MODE_AUTO:
        out.options.tool_choice = ToolChoice::kAuto;
        break;
      case pb::TOOL_CHOICE_MODE_NONE:
        out.options.tool_choice = ToolChoice::kNone;
        break;
      case pb::TOOL_CHOICE_MODE_REQUIRED:
        out.options.tool_choice = ToolChoice::kRequired;
        break;
      default:
        return InvalidField("chat.tool_choice.mode", absl::StrCat("is not known: ", static_cast<int>(choice.mode())));
    }
  }
  return out;
}

absl::StatusOr<RequestedReasoning> FromProto(const pb::Reasoning& reasoning) {
  RequestedReasoning out;
  CopyIf(reasoning.has_enabled(), reasoning.enabled(), &out.enabled);
  switch (reasoning.effort()) {
    case pb::EFFORT_UNSPECIFIED:
      break;
    case pb::EFFORT_NONE:
      out.effort = Effort::kNone;
      break;
    case pb::EFFORT_LOW:
      out.effort = Effort::kLow;
      break;
    case pb::EFFORT_HIGH:
      out.effort = Effort::kHigh;
      break;
    case pb::EFFORT_MAX:
      out.effort = Effort::kMax;
      break;
    default:
      return InvalidField("reasoning.effort", absl::StrCat("is not known: ", static_cast<int>(reasoning.effort())));
  }
  if (reasoning.has_keep_history()) out.keep_history = reasoning.keep_history();
  CopyIf(reasoning.has_token_budget(), reasoning.token_budget(), &out.token_budget);
  return out;
}

RequestedConstraint FromProto(const pb::Constraint& constraint) {
  using Kind = RequestedConstraint::Kind;
  switch (constraint.kind_case()) {
    case pb::Constraint::kJsonSchema:
      return {Kind::kJsonSchema, constraint.json_schema()};
    case pb::Constraint::kRegex:
      return {Kind::kRegex, constraint.regex()};
    case pb::Constraint::kEbnf:
      return {Kind::kEbnf, constraint.ebnf()};
    case pb::Constraint::kJsonObject:
      return {constraint.json_object() ? Kind::kJsonObject : Kind::kNone, ""};
    case pb::Constraint::kStructuralTag:
      return {Kind::kStructuralTag, constraint.structural_tag()};
    case pb::Constraint::KIND_NOT_SET:
      break;
  }
  return {};
}

absl::StatusOr<GenerationRequest> FromProto(const pb::GenerationSpec& spec) {
  GenerationRequest out;
  out.model = spec.model();
  switch (spec.input_case()) {
    case pb::GenerationSpec::kChat: {
      absl::StatusOr<ChatRequest> chat = FromProto(spec.chat());
      if (!chat.ok()) return chat.status();
      out.input = *std::move(chat);
      if (spec.chat().has_parallel_tool_calls()) out.parallel_tool_calls = spec.chat().parallel_tool_calls();
      break;
    }
    case pb::GenerationSpec::kPrompt: {
      absl::StatusOr<std::vector<PromptSegment>> segments = FromProto(spec.prompt());
      if (!segments.ok()) return segments.status();
      out.input = *std::move(segments);
      break;
    }
    case pb::GenerationSpec::kTokens:
      out.input = std::vector<uint32_t>(spec.tokens().ids().begin(), spec.tokens().ids().end());
      break;
    case pb::GenerationSpec::INPUT_NOT_SET:
      break;
  }
  out.sampling = FromProto(spec.sampling());
  out.stopping = FromProto(spec.stopping());
  out.constraint = FromProto(spec.constraint());
  absl::StatusOr<RequestedReasoning> reasoning = FromProto(spec.reasoning());
  if (!reasoning.ok()) return reasoning.status();
  out.reasoning = *std::move(reasoning);
  const pb::OutputOptions& output = spec.output();
  out.output.token_ids = output.token_ids();
  CopyIf(output.has_top_logprobs(), output.top_logprobs(), &out.output.top_logprobs);
  out.output.has_logprob_token_ids = output.logprob_token_ids_size() > 0;
  out.output.prompt_logprobs = output.prompt_logprobs();
  out.output.coalesce_tokens = output.coalesce_tokens();
  out.cache.salt = spec.cache().salt();
  out.cache.bypass = spec.cache().bypass();
  out.cache.has_pin_name = spec.cache().has_pin_name();
  out.priority = spec.priority();
  out.session_id = spec.session_id();
  return out;
}

void ToProto(const AcceptedEvent& event, pb::Accepted* out) {
  out->set_request_id(event.request_id);
  out->set_model(event.model);
  out->set_weights_version(event.weights_version);
  out->set_seed(event.effective.params.seed);
  out->set_prompt_tokens(static_cast<uint32_t>(event.prompt_tokens));
  out->set_cached_tokens(static_cast<uint32_t>(event.cached_tokens));
  out->set_max_new_tokens(static_cast<uint32_t>(event.effective.params.max_new_tokens));
  ToProto(event.effective, out->mutable_effective());
}

void ToProto(const LogprobRows& rows, pb::LogprobBlock* out) {
  out->mutable_token_ids()->Add(rows.token_ids.begin(), rows.token_ids.end());
  out->mutable_logprobs()->Add(rows.logprobs.begin(), rows.logprobs.end());
  out->set_top_per_token(static_cast<uint32_t>(rows.top_per_token));
  for (const TopLogprob& top : rows.top) {
    out->add_top_token_ids(static_cast<uint32_t>(top.token));  // -1 becomes 4294967295
    out->add_top_logprobs(top.logprob);
  }
}

void ToProto(DeltaEvent&& event, pb::Delta* out) {
  out->set_choice(static_cast<uint32_t>(event.choice));
  switch (event.channel) {
    case OutputChannel::kFormat:
      out->set_channel(pb::CHANNEL_UNSPECIFIED);
      break;
    case OutputChannel::kContent:
      out->set_channel(pb::CHANNEL_CONTENT);
      break;
    case OutputChannel::kReasoning:
      out->set_channel(pb::CHANNEL_REASONING);
      break;
    case OutputChannel::kTools:
      out->set_channel(pb::CHANNEL_TOOLS);
      break;
  }
  out->set_text(std::move(event.text));
  out->mutable_token_ids()->Add(event.token_ids.begin(), event.token_ids.end());
  if (!event.logprobs.token_ids.empty()) ToProto(event.logprobs, out->mutable_logprobs());
  out->set_undecoded(std::move(event.undecoded));
}

void ToProto(ToolCallEvent&& event, pb::ToolCallDelta* out) {
  out->set_choice(static_cast<uint32_t>(event.choice));
  out->set_index(static_cast<uint32_t>(event.index));
  out->set_id(std::move(event.id));
  out->set_name(std::move(event.name));
  out->set_arguments(std::move(event.arguments));
}

void ToProto(const ChoiceFinishedEvent& event, pb::ChoiceFinished* out) {
  out->set_choice(static_cast<uint32_t>(event.choice));
  switch (event.reason) {
    case StopKind::kStop:
      out->set_reason(pb::FINISH_REASON_STOP);
      break;
    case StopKind::kLength:
      out->set_reason(pb::FINISH_REASON_LENGTH);
      break;
    case StopKind::kToolCalls:
      out->set_reason(pb::FINISH_REASON_TOOL_CALLS);
      break;
    case StopKind::kRepetition:
      out->set_reason(pb::FINISH_REASON_REPETITION);
      break;
  }
  if (const auto* text = std::get_if<MatchedString>(&event.matched)) {
    out->set_stop_string(text->text);
  } else if (const auto* token = std::get_if<MatchedToken>(&event.matched)) {
    out->set_stop_token_id(static_cast<uint32_t>(token->token));
  } else if (std::holds_alternative<MatchedEos>(event.matched)) {
    out->set_eos(true);
  }
  out->set_completion_tokens(static_cast<uint32_t>(event.completion_tokens));
}

void ToProto(const FinishedEvent& event, pb::Usage* out) {
  const RequestUsage& usage = event.usage;
  out->set_prompt_tokens(static_cast<uint32_t>(usage.prompt_tokens));
  out->set_cached_tokens(static_cast<uint32_t>(usage.cached_tokens));
  out->set_completion_tokens(static_cast<uint32_t>(usage.completion_tokens));
  out->set_reasoning_tokens(static_cast<uint32_t>(event.reasoning_tokens));
  out->set_preemptions(static_cast<uint32_t>(usage.preemptions));
  out->set_queue_ms(usage.queue_seconds * 1000);
  out->set_prefill_ms(usage.prefill_seconds * 1000);
  out->set_decode_ms(usage.decode_seconds * 1000);
}

}  // namespace k3
