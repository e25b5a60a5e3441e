#include "server/commands/generate.h"

#include <grpcpp/create_channel.h>

#include <chrono>
#include <istream>
#include <iterator>
#include <ostream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "k3serve/inference/v1/generation_service.grpc.pb.h"
#include "server/commands/client_access.h"
#include "server/exit_codes.h"
#include "server/flags.h"

namespace k3 {
namespace {

namespace pb = k3serve::inference::v1;
using Clock = std::chrono::steady_clock;

constexpr int kMaxMessageBytes = 256 << 20;

struct GenerateOptions {
  std::string target = "127.0.0.1:50051";
  ClientAccess access;
  std::string model;
  bool chat = true;
  bool raw = false;
  std::string system;
  std::optional<int64_t> max_tokens;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<int64_t> top_k;
  std::optional<double> min_p;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> repetition_penalty;
  std::optional<int64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::string effort;
  bool thinking = true;
  bool show_reasoning = false;
  std::optional<double> timeout;
  bool stats = false;
  bool help = false;
};

void DeclareFlags(FlagSet& flags, GenerateOptions& options) {
  flags.Group("Server");
  flags.String("target", &options.target, "HOST:PORT", "the server's gRPC address");
  options.access.DeclareFlags(flags);
  flags.String("model", &options.model, "NAME", "a served model name (default: the server's own)");
  flags.Number("timeout", &options.timeout, {0.001, 1e6}, "deadline, seconds");
  flags.Group("Prompt");
  flags.Bool("chat", &options.chat, "TEXT is what the user says");
  flags.Bool("raw", &options.raw, "TEXT is the prompt itself");
  flags.String("system", &options.system, "TEXT", "system message before it");
  flags.Choice("effort", &options.effort, {"low", "high", "max", "none"}, "thinking effort (default: the server's)");
  flags.Bool("thinking", &options.thinking, "let the model reason first");
  flags.Group("Sampling (default: the model's own)");
  flags.Int("max-tokens", &options.max_tokens, {1, 1 << 24}, "most tokens to generate (default: what has room)");
  flags.Number("temperature", &options.temperature, {0, 100}, "0 is greedy");
  flags.Number("top-p", &options.top_p, {0, 1}, "nucleus");
  flags.Int("top-k", &options.top_k, {0, 1 << 24}, "0 is off");
  flags.Number("min-p", &options.min_p, {0, 1}, "least probability, of the best token's");
  flags.Number("presence-penalty", &options.presence_penalty, {-2, 2}, "on tokens that were generated");
  flags.Number("frequency-penalty", &options.frequency_penalty, {-2, 2}, "the same, by count");
  flags.Number("repetition-penalty", &options.repetition_penalty, {0.001, 10}, "on prompt and generated tokens");
  flags.Int("seed", &options.seed, {0, 9e15}, "same seed, same answer");
  flags.List("stop", &options.stop, "TEXT", "strings that end the answer");
  flags.Bool("ignore-eos", &options.ignore_eos, "go on after the model's end token");
  flags.Group("Output");
  flags.Bool("show-reasoning", &options.show_reasoning, "reasoning to stderr");
  flags.Bool("stats", &options.stats, "tokens, time to first token and tokens/s to stderr");
  flags.Bool("help", &options.help, "print this text");
}

void FillSpec(const GenerateOptions& options, const std::string& text, pb::GenerationSpec* spec) {
  spec->set_model(options.model);
  if (options.raw) {
    spec->mutable_prompt()->add_segments()->set_text(text);
  } else {
    pb::ChatInput* chat = spec->mutable_chat();
    if (!options.system.empty()) {
      pb::ChatMessage* system = chat->add_messages();
      system->set_role(pb::ROLE_SYSTEM);
      system->add_content()->set_text(options.system);
    }
    pb::ChatMessage* user = chat->add_messages();
    user->set_role(pb::ROLE_USER);
    user->add_content()->set_text(text);
    if (!options.thinking) spec->mutable_reasoning()->set_enabled(false);
    const std::pair<const char*, pb::Effort> efforts[] = {
        {"none", pb::EFFORT_NONE}, {"low", pb::EFFORT_LOW}, {"high", pb::EFFORT_HIGH}, {"max", pb::EFFORT_MAX}};
    for (const auto& [name, effort] : efforts) {
      if (options.effort == name) spec->mutable_reasoning()->set_effort(effort);
    }
  }
  pb::Sampling* sampling = spec->mutable_sampling();
  if (options.temperature) sampling->set_temperature(static_cast<float>(*options.temperature));
  if (options.top_p) sampling->set_top_p(static_cast<float>(*options.top_p));
  if (options.top_k) sampling->set_top_k(static_cast<uint32_t>(*options.top_k));
  if (options.min_p) sampling->set_min_p(static_cast<float>(*options.min_p));
  if (options.presence_penalty) sampling->set_presence_penalty(static_cast<float>(*options.presence_penalty));
  if (options.frequency_penalty) sampling->set_frequency_penalty(static_cast<float>(*options.frequency_penalty));
  if (options.repetition_penalty) sampling->set_repetition_penalty(static_cast<float>(*options.repetition_penalty));
  if (options.seed) sampling->set_seed(static_cast<uint64_t>(*options.seed));
  pb::Stopping* stopping = spec->mutable_stopping();
  if (options.max_tokens) stopping->set_max_new_tokens(static_cast<uint32_t>(*options.max_tokens));
  for (const std::string& stop : options.stop) stopping->add_stop(stop);
  stopping->set_ignore_eos(options.ignore_eos);
}

const char* CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
}

std::string ReadAll(std::istream& in) { return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()}; }

// The answer on `out`, reasoning on `err`; a line break wherever one follows the other.
class Printer {
 public:
  Printer(bool show_reasoning, std::ostream& out, std::ostream& err)
      : show_reasoning_(show_reasoning), out_(out), err_(err) {}

  void Print(const pb::Delta& delta) {
    if (delta.text().empty()) return;
    if (delta.channel() == pb::CHANNEL_REASONING) {
      if (show_reasoning_) err_ << delta.text() << std::flush;
      reasoning_ = true;
      return;
    }
    if (reasoning_ && show_reasoning_) err_ << "\n\n" << std::flush;
    reasoning_ = false;
    out_ << delta.text() << std::flush;
    ends_line_ = delta.text().back() == '\n';
  }
  void Print(const pb::ToolCallDelta& call) {
    if (!call.name().empty()) out_ << (ends_line_ ? "" : "\n") << call.name() << " ";
    out_ << call.arguments() << std::flush;
    ends_line_ = false;
  }
  void End() {
    if (reasoning_ && show_reasoning_) err_ << "\n" << std::flush;
    if (!ends_line_) out_ << "\n" << std::flush;
    ends_line_ = true;
  }

 private:
  const bool show_reasoning_;
  std::ostream& out_;
  std::ostream& err_;
  bool reasoning_ = false;
  bool ends_line_ = true;
};

// Fields and retry time of an error, where the server sent them.
void PrintDetails(const grpc::Status& status, std::ostream& err) {
  google::rpc::Status rpc;
  if (!rpc.ParseFromString(status.error_details())) return;
  for (const google::protobuf::Any& detail : rpc.details()) {
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&retry)) {
      const double seconds = static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() * 1e-9;
      err << "try again in " << absl::StrFormat("%g", seconds) << " s\n";
    }
  }
}

int Generate(const GenerateOptions& options, const std::string& text, std::ostream& out, std::ostream& err) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  const auto channel = grpc::CreateCustomChannel(options.target, options.access.ChannelCredentials(), arguments);
  grpc::ClientContext context;
  if (options.timeout.has_value()) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(static_cast<int64_t>(*options.timeout * 1000)));
  }
  if (!options.access.key().empty()) context.AddMetadata("authorization", "Bearer " + options.access.key());
  pb::StreamGenerateRequest request;
  FillSpec(options, text, request.mutable_spec());

  const Clock::time_point start = Clock::now();
  std::optional<Clock::time_point> first;
  pb::Usage usage;
  Printer printer(options.show_reasoning, out, err);
  const auto stub = pb::GenerationService::NewStub(channel);
  const auto reader = stub->StreamGenerate(&context, request);
  pb::StreamGenerateResponse response;
  while (reader->Read(&response)) {
    if (!first.has_value() && (response.has_delta() || response.has_tool_call())) first = Clock::now();
    if (response.has_delta()) printer.Print(response.delta());
    if (response.has_tool_call()) printer.Print(response.tool_call());
    if (response.has_usage()) usage = response.usage();
  }
  const grpc::Status status = reader->Finish();
  const Clock::time_point end = Clock::now();
  printer.End();
  if (!status.ok()) {
    err << "k3serve generate: " << CodeName(status.error_code()) << ": " << status.error_message() << "\n";
    PrintDetails(status, err);
    return kExitNotPassed;
  }
  if (options.stats) {
    const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
    const double decode = first.has_value() ? seconds(end - *first) : 0;
    const uint32_t after_first = usage.completion_tokens() > 0 ? usage.completion_tokens() - 1 : 0;
    err << absl::StrFormat("prompt %d tokens (%d cached), answer %d tokens (%d reasoning), first token after %.0f ms",
                           usage.prompt_tokens(), usage.cached_tokens(), usage.completion_tokens(),
                           usage.reasoning_tokens(), first.has_value() ? seconds(*first - start) * 1000 : 0.0);
    if (decode > 0 && after_first > 0) err << absl::StrFormat(", then %.1f tokens/s", after_first / decode);
    err << "\n";
  }
  return kExitOk;
}

}  // namespace

int RunGenerate(const std::vector<std::string>& args, std::istream& in, std::ostream& out, std::ostream& err) {
  GenerateOptions options;
  FlagSet flags;
  DeclareFlags(flags, options);
  std::vector<std::string> words;
  absl::Status status = flags.ParseArgs(args, &words);
  if (status.ok()) status = flags.Resolve();
  if (status.ok() && options.raw && flags.IsSet("chat") && options.chat) {
    status = absl::InvalidArgumentError("--chat conflicts with --raw");
  }
  if (status.ok() && !options.raw && !options.chat) status = absl::InvalidArgumentError("--no-chat needs --raw");
  if (status.ok() && options.raw && !options.system.empty()) {
    status = absl::InvalidArgumentError("--system conflicts with --raw");
  }
  if (status.ok() && !options.help) status = options.access.Load();
  if (!status.ok()) {
    err << "k3serve generate: " << status.message() << "\n";
    return kExitUsage;
  }
  if (options.help) {
    out << "Usage: k3serve generate TEXT [flags]\n\n"
           "Sends TEXT to a running server and prints the answer as it comes. Without TEXT, reads it from stdin.\n"
        << flags.Help();
    return kExitOk;
  }
  std::string text = absl::StrJoin(words, " ");
  if (words.empty()) text = ReadAll(in);
  if (text.empty()) {
    err << "k3serve generate: TEXT is empty\n";
    return kExitUsage;
  }
  return Generate(options, text, out, err);
}

}  // namespace k3
