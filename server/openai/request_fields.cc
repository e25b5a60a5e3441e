#include "server/openai/request_fields.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/error_details.h"
#include "server/request_validation.h"
#include "server/text/chat_renderer.h"
#include "server/text/json_writer.h"

namespace k3 {
namespace {

std::optional<float> ReadFloat(FieldReader& body, std::string_view key, double low, double high) {
  const std::optional<double> number = body.Number(key, low, high);
  if (!number) return std::nullopt;
  return static_cast<float>(*number);
}

void ReadTopP(FieldReader& body, GenerationRequest* request) {
  const std::optional<double> top_p = body.Number("top_p", 0, 1);
  // A positive double may round to the float 0.
  if (top_p && *top_p <= 0) {
    return body.Fail("top_p", absl::StrCat("must be above 0 and at most 1, not ", Described(*body.Get("top_p"))));
  }
  if (top_p) request->sampling.top_p = std::max(static_cast<float>(*top_p), std::numeric_limits<float>::min());
}

void ReadTopK(FieldReader& body, GenerationRequest* request) {
  // -1 is how some servers say "off".
  const std::optional<int64_t> top_k = body.Integer("top_k", -1, std::numeric_limits<int64_t>::max());
  if (!top_k) return;
  const int64_t capped = std::min<int64_t>(*top_k, std::numeric_limits<int32_t>::max());
  request->sampling.top_k = static_cast<uint32_t>(std::max<int64_t>(capped, 0));
}

void ReadSeed(FieldReader& body, GenerationRequest* request) {
  const JsonValue* value = body.Get("seed");
  if (value == nullptr) return;
  if (value->kind == JsonValue::Kind::kInteger && value->text[0] != '-') {
    uint64_t seed = 0;  // as gRPC takes it: above int64 too
    const char* const end = value->text.data() + value->text.size();
    if (std::from_chars(value->text.data(), end, seed).ec != std::errc()) {
      return body.Fail("seed", absl::StrCat("must fit into 64 bits, not ", Described(*value)));
    }
    request->sampling.seed = seed;
    return;
  }
  const std::optional<int64_t> seed =
      body.Integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  if (seed) request->sampling.seed = static_cast<uint64_t>(*seed);
}

void ReadLogitBias(FieldReader& body, GenerationRequest* request) {
  const JsonValue* object = body.Object("logit_bias");
  if (object == nullptr) return;
  if (object->keys.size() > kMaxLogitBias) {
    return body.Fail("logit_bias", absl::StrCat("has ", object->keys.size(), " entries; at most ", kMaxLogitBias));
  }
  for (size_t i = 0; i < object->keys.size(); ++i) {
    const std::string& key = object->keys[i];
    uint32_t id = 0;
    const char* const end = key.data() + key.size();
    const auto parsed = std::from_chars(key.data(), end, id);
    // "05" would be another key for the same id.
    const bool has_padding = key.size() > 1 && key[0] == '0';
    if (parsed.ec != std::errc() || parsed.ptr != end || has_padding) {
      return body.Fail("logit_bias",
                       absl::StrCat("expected token ids as keys, whole numbers from 0 up to the vocabulary's "
                                    "last, not \"",
                                    Excerpt(key, 60), "\""));
    }
    const double bias = object->items[i].AsDouble();
    if (!object->items[i].is_number() || !(bias >= -100 && bias <= 100)) {
      return body.Fail("logit_bias", absl::StrCat("the value of ", id, " must be a number from -100 to 100, not ",
                                                  Described(object->items[i])));
    }
    request->sampling.logit_bias.emplace_back(id, static_cast<float>(bias));
  }
}

void ReadStop(FieldReader& body, GenerationRequest* request) {
  const JsonValue* stop = body.Get("stop");
  if (stop == nullptr) return;
  if (stop->is_string()) {
    request->stopping.stop = {stop->text};
  } else if (stop->is_array()) {
    if (stop->items.size() > kMaxStopStrings) {
      return body.Fail("stop", absl::StrCat("has ", stop->items.size(), " strings; at most ", kMaxStopStrings));
    }
    for (const JsonValue& item : stop->items) {
      if (!item.is_string()) {
        return body.Fail("stop",
                         absl::StrCat("expected a string or a list of strings, not ", Described(item), " in it"));
      }
      request->stopping.stop.push_back(item.text);
    }
  } else {
    return body.Fail("stop", absl::StrCat("expected a string or a list of strings, not ", Described(*stop)));
  }
  for (const std::string& text : request->stopping.stop) {
    if (text.empty()) return body.Fail("stop", "a stop string must not be empty");
  }
}

void ReadStopTokenIds(FieldReader& body, GenerationRequest* request) {
  const JsonValue* ids = body.Array("stop_token_ids");
  if (ids == nullptr) return;
  if (ids->items.size() > kMaxStopTokenIds) {
    return body.Fail("stop_token_ids", absl::StrCat("has ", ids->items.size(), " ids; at most ", kMaxStopTokenIds));
  }
  for (const JsonValue& item : ids->items) {
    const std::optional<int64_t> id = WholeNumber(item);
    if (!id || *id < 0 || *id > std::numeric_limits<uint32_t>::max()) {
      return body.Fail("stop_token_ids",
                       absl::StrCat("expected token ids, whole numbers from 0 up, not ", Described(item)));
    }
    request->stopping.stop_token_ids.push_back(static_cast<uint32_t>(*id));
  }
}

void ReadRepetitionStop(FieldReader& body, GenerationRequest* request) {
  const JsonValue* value = body.Object("repetition_stop");
  if (value == nullptr) return;
  FieldReader fields(*value, "repetition_stop");
  request->stopping.repetition_max_period = static_cast<uint32_t>(fields.Integer("max_period", 1, 4096).value_or(0));
  request->stopping.repetition_count = static_cast<uint32_t>(fields.Integer("count", 2, 4096).value_or(0));
  body.Adopt(fields.status());
}

// `path` is what the client calls it, for later messages about it.
void SetConstraint(FieldReader& body, RequestedConstraint::Kind kind, std::string text, std::string path,
                   GenerationRequest* request) {
  if (request->constraint.kind != RequestedConstraint::Kind::kNone) {
    return body.Fail(path, "only one way to constrain the output can be used");
  }
  request->constraint.kind = kind;
  request->constraint.text = std::move(text);
  request->constraint.path = std::move(path);
}

// A schema may come as an object or as its text; `true` and `false` are schemas too.
std::optional<std::string> SchemaText(const JsonValue& schema) {
  if (schema.is_string()) return schema.text;
  if (schema.is_object() || schema.is_bool()) return WriteJson(schema, {.number_as_written = true});
  return std::nullopt;
}

void ReadJsonSchemaFormat(FieldReader& body, const JsonValue& format, const OpenAiOptions& options,
                          GenerationRequest* request) {
  std::string path = "response_format";
  if (const JsonValue* wrapper = format.Find("json_schema"); options.vendor_strict || wrapper != nullptr) {
    const JsonValue missing;
    FieldReader fields(wrapper == nullptr ? missing : *wrapper, "response_format.json_schema");
    const std::optional<std::string> name = fields.String("name");
    request->constraint.strict = fields.Bool("strict").value_or(true);
    if (options.vendor_strict && fields.ok()) {
      if (!name || name->empty()) fields.Fail("name", "is required");
      if (fields.Object("schema") == nullptr) fields.Fail("schema", "is required");
    }
    if (!fields.ok()) return body.Adopt(fields.status());
    path = wrapper != nullptr && wrapper->Find("schema") != nullptr ? "response_format.json_schema.schema"
                                                                    : "response_format.json_schema";
  }
  const JsonValue schema = SchemaOfResponseFormat(format);
  const std::optional<std::string> text = SchemaText(schema);
  if (!text) return body.Fail(path, absl::StrCat("expected a JSON schema: an object, not ", Described(schema)));
  SetConstraint(body, RequestedConstraint::Kind::kJsonSchema, *text, std::move(path), request);
}

void ReadResponseFormat(FieldReader& body, const OpenAiOptions& options, GenerationRequest* request) {
  using Kind = RequestedConstraint::Kind;
  const JsonValue* format = body.Object("response_format");
  if (format == nullptr) return;
  const JsonValue* type = format->Find("type");
  if (type == nullptr || !type->is_string()) {
    return body.Fail("response_format", type == nullptr
                                            ? std::string("needs a type: text, json_object or json_schema")
                                            : absl::StrCat("type must be a string, not ", Described(*type)));
  }
  if (type->text == "text") return;
  if (type->text == "json_object") return SetConstraint(body, Kind::kJsonObject, "", "response_format", request);
  if (type->text == "json_schema") return ReadJsonSchemaFormat(body, *format, options, request);
  const bool regex = type->text == "regex";
  if (regex || type->text == "ebnf" || type->text == "grammar") {
    for (const char* key : {"pattern", "regex", "grammar", "ebnf"}) {
      const JsonValue* text = format->Find(key);
      if (text == nullptr || !text->is_string()) continue;
      return SetConstraint(body, regex ? Kind::kRegex : Kind::kEbnf, text->text, absl::StrCat("response_format.", key),
                           request);
    }
    return body.Fail("response_format",
                     absl::StrCat("type ", type->text, " needs a string '", regex ? "pattern" : "grammar", "'"));
  }
  if (type->text == "structural_tag") {
    return SetConstraint(body, Kind::kStructuralTag, WriteJson(*format, {.number_as_written = true}), "response_format",
                         request);
  }
  body.Fail("response_format",
            absl::StrCat("unknown type \"", Excerpt(type->text),
                         "\", expected text, json_object, json_schema, regex, ebnf or structural_tag"));
}

// One of these texts, as a grammar: a choice is plain text, not a JSON string.
std::string ChoiceGrammar(const JsonValue& choices) {
  std::string ebnf = "root ::= ";
  for (size_t i = 0; i < choices.items.size(); ++i) {
    if (i > 0) ebnf += " | ";
    ebnf += '"';
    AppendJsonEscaped(choices.items[i].text, &ebnf);
    ebnf += '"';
  }
  return ebnf;
}

// What vLLM takes: guided_json and the like, or the same names without "guided_" inside structured_outputs. `fields`
// holds them; it is the body itself in the first case.
void ReadGuided(FieldReader& fields, std::string_view prefix, GenerationRequest* request) {
  using Kind = RequestedConstraint::Kind;
  const auto set = [&](Kind kind, const std::string& key, std::string text) {
    if (request->constraint.kind != Kind::kNone) {
      return fields.Fail(key, "only one way to constrain the output can be used");
    }
    SetConstraint(fields, kind, std::move(text), fields.Path(key), request);
  };
  const auto key = [&](const char* name) { return absl::StrCat(std::string(prefix), name); };
  if (const JsonValue* schema = fields.Get(key("json"))) {
    const std::optional<std::string> text = SchemaText(*schema);
    if (!text) {
      return fields.Fail(key("json"),
                         absl::StrCat("expected a JSON schema: an object or its text, not ", Described(*schema)));
    }
    set(Kind::kJsonSchema, key("json"), *text);
  }
  if (const auto regex = fields.String(key("regex"))) set(Kind::kRegex, key("regex"), *regex);
  if (const auto grammar = fields.String(key("grammar"))) set(Kind::kEbnf, key("grammar"), *grammar);
  if (const JsonValue* choices = fields.Array(key("choice"))) {
    if (choices->items.empty()) return fields.Fail(key("choice"), "the list of choices is empty");
    for (const JsonValue& choice : choices->items) {
      if (choice.is_string()) continue;
      return fields.Fail(key("choice"), absl::StrCat("expected a list of strings, not ", Described(choice), " in it"));
    }
    set(Kind::kEbnf, key("choice"), ChoiceGrammar(*choices));
  }
  if (fields.Bool(key("json_object")).value_or(false)) set(Kind::kJsonObject, key("json_object"), "");
  if (const auto tag = fields.String(key("structural_tag"))) {
    set(Kind::kStructuralTag, key("structural_tag"), *tag);
  }
}

}  // namespace

void ReadCommonFields(FieldReader& body, GenerationRequest* request, OpenAiReplyOptions* reply) {
  request->model = body.String("model").value_or("");
  RequestedSampling& sampling = request->sampling;
  sampling.temperature = ReadFloat(body, "temperature", 0, 2);
  ReadTopP(body, request);
  ReadTopK(body, request);
  sampling.min_p = ReadFloat(body, "min_p", 0, 1);
  sampling.presence_penalty = ReadFloat(body, "presence_penalty", -2, 2);
  sampling.frequency_penalty = ReadFloat(body, "frequency_penalty", -2, 2);
  sampling.repetition_penalty = ReadFloat(body, "repetition_penalty", 0, 10);
  ReadSeed(body, request);
  ReadLogitBias(body, request);
  if (const auto n = body.Integer("n", 1, kMaxChoices)) {
    sampling.n = static_cast<uint32_t>(*n);
    reply->choices_per_prompt = static_cast<int32_t>(*n);
  }
  ReadStop(body, request);
  ReadStopTokenIds(body, request);
  ReadRepetitionStop(body, request);
  request->stopping.ignore_eos = body.Bool("ignore_eos").value_or(false);
  if (const auto least = body.CappedInteger("min_tokens", 0, std::numeric_limits<uint32_t>::max())) {
    request->stopping.min_new_tokens = static_cast<uint32_t>(*least);
  }
  request->cache.salt = body.String("cache_salt").value_or("");
  request->cache.bypass = body.Bool("bypass_prefix_cache").value_or(false);
  request->session_id = body.String("session_id").value_or("");
  request->priority = static_cast<int32_t>(
      body.Integer("priority", std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()).value_or(0));
}

void ReadStreamFields(FieldReader& body, OpenAiReplyOptions* reply) {
  reply->stream = body.Bool("stream").value_or(false);
  const JsonValue* value = body.Object("stream_options");
  if (value == nullptr) return;
  if (!reply->stream) return body.Fail("stream_options", "is allowed only with stream: true");
  FieldReader fields(*value, "stream_options");
  reply->include_usage = fields.Bool("include_usage").value_or(false);
  reply->continuous_usage = fields.Bool("continuous_usage_stats").value_or(false);
  reply->heartbeat = fields.Bool("heartbeat").value_or(true);
  body.Adopt(fields.status());
}

void ReadOutputFields(FieldReader& body, GenerationRequest* request, OpenAiReplyOptions* reply) {
  reply->token_ids = body.Bool("return_token_ids").value_or(false);
  // Echo needs the prompt's ids; a running count needs every token's.
  request->output.token_ids = reply->token_ids || reply->echo || reply->continuous_usage;
  if (const JsonValue* value = body.Get("prompt_logprobs")) {
    // vLLM's: a number of alternatives; true is 0 of them.
    if (value->is_bool()) {
      reply->prompt_logprobs = value->boolean;
    } else if (const auto count = body.Integer("prompt_logprobs", 0, kMaxTopLogprobs)) {
      reply->prompt_logprobs = true;
      reply->prompt_top_logprobs = static_cast<int32_t>(*count);
    }
    if (reply->prompt_logprobs && reply->stream) body.Fail("prompt_logprobs", "is not available for streams");
  }
  // Echoed text carries log-probabilities of its own when they are asked for, and a run of no tokens needs them to be
  // a run at all.
  const bool echo_logprobs = reply->echo && (reply->logprobs || request->stopping.max_new_tokens == 0u);
  request->output.prompt_logprobs = reply->prompt_logprobs || echo_logprobs;
  if (reply->route == OpenAiRoute::kCompletions) {
    request->output.prompt_copies = static_cast<uint32_t>(reply->choices_per_prompt);
  }
  if (reply->logprobs || request->output.prompt_logprobs) {
    request->output.top_logprobs = static_cast<uint32_t>(std::max(reply->top_logprobs, reply->prompt_top_logprobs));
  }
}

void ReadConstraint(FieldReader& body, GenerationRequest* request, const OpenAiOptions& options) {
  ReadResponseFormat(body, options, request);
  ReadGuided(body, "guided_", request);
  if (const JsonValue* value = body.Object("structured_outputs")) {
    FieldReader fields(*value, "structured_outputs");
    ReadGuided(fields, "", request);
    body.Adopt(fields.status());
  }
}

void RefuseUnsupported(FieldReader& body, OpenAiRoute route) {
  const auto refuse = [&](std::string_view key, std::string_view why) {
    if (body.Has(key)) body.Fail(key, why);
  };
  if (route == OpenAiRoute::kChat) {
    refuse("functions", "was replaced by tools: send tools and tool_choice");
    refuse("function_call", "was replaced by tool_choice: send tools and tool_choice");
    refuse("audio", "this server makes no audio");
    refuse("web_search_options", "this server does not search the web");
    if (const JsonValue* modalities = body.Array("modalities")) {
      for (const JsonValue& item : modalities->items) {
        if (!item.is_string() || item.text != "text") body.Fail("modalities", "this server makes text only");
      }
    }
  } else if (const auto suffix = body.String("suffix"); suffix && !suffix->empty()) {
    body.Fail("suffix", "the model does not insert text before a suffix");
  }
  if (const auto best_of = body.Integer("best_of", 1, std::numeric_limits<int32_t>::max()); best_of && *best_of != 1) {
    body.Fail("best_of", "is not supported: ask for n choices and choose among them");
  }
  if (body.Bool("use_beam_search").value_or(false)) body.Fail("use_beam_search", "is not supported");
}

}  // namespace k3
