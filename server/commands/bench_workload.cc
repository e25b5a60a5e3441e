#include "server/commands/bench_workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/counter_random.h"

namespace k3 {
namespace {

// Independent streams of random bits below one seed.
enum Stream : uint64_t { kLengths = 1, kPrompt, kArrivals, kSampling, kGroups, kPrefixes };

// Sub-streams are seeds themselves, so that no two of them overlap in a known way.
uint64_t Derive(uint64_t seed, uint64_t stream) { return CounterRandomBits(seed ^ 0x6b337365727665ull, stream); }

// Uniform in (0, 1].
double Uniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 1) * 0x1p-53; }

// Box-Muller.
double StandardNormal(uint64_t seed, uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(Uniform(CounterRandomBits(seed, 2 * index))));
  return radius * std::cos(2 * 3.14159265358979323846 * Uniform(CounterRandomBits(seed, 2 * index + 1)));
}

int64_t NormalLength(double mean, double stddev, uint64_t seed, uint64_t index) {
  return std::max<int64_t>(1, std::llround(mean + stddev * StandardNormal(seed, index)));
}

// Common short words, most of them one token in any vocabulary.
constexpr std::array<std::string_view, 64> kWords = {
    "the",   "river", "light", "stone", "paper", "green", "house", "water", "night", "small", "table", "south", "north",
    "music", "story", "field", "cloud", "bread", "glass", "horse", "train", "metal", "plant", "apple", "chair", "ocean",
    "voice", "clock", "sugar", "smoke", "shore", "grass", "heart", "brick", "blade", "crown", "dream", "earth", "flame",
    "ghost", "honey", "ivory", "jewel", "knife", "lemon", "mouse", "nurse", "olive", "pearl", "queen", "robin", "sheep",
    "tiger", "uncle", "vapor", "wheel", "yacht", "zebra", "amber", "birch", "cedar", "daisy", "eagle", "frost"};

absl::Status BadLine(const std::string& path, int64_t line, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ":", line, ": ", why));
}

absl::StatusOr<int64_t> Length(const nlohmann::json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) return absl::InvalidArgumentError(absl::StrCat("lacks \"", key, "\""));
  if (!it->is_number_integer() || it->get<int64_t>() < 1 || it->get<int64_t>() > 100'000'000) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be a whole number from 1 to 100000000"));
  }
  return it->get<int64_t>();
}

absl::StatusOr<TraceEntry> ParseEntry(const nlohmann::json& object) {
  TraceEntry entry;
  if (!object.is_object()) return absl::InvalidArgumentError("is not a JSON object");
  if (const auto it = object.find("timestamp"); it != object.end()) {
    if (!it->is_number()) return absl::InvalidArgumentError("\"timestamp\" must be a number of milliseconds");
    entry.seconds = it->get<double>() / 1000;
  }
  absl::StatusOr<int64_t> output = Length(object, "output_length");
  if (!output.ok()) return output.status();
  entry.output_length = *output;
  if (const auto it = object.find("prompt"); it != object.end()) {
    if (!it->is_string() || it->get_ref<const std::string&>().empty()) {
      return absl::InvalidArgumentError("\"prompt\" must be a text that is not empty");
    }
    entry.prompt_text = it->get<std::string>();
    return entry;
  }
  for (const char* key : {"prompt_token_ids", "hash_ids"}) {
    const auto it = object.find(key);
    if (it == object.end()) continue;
    if (!it->is_array()) return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be an array"));
    const bool is_prompt = std::string_view(key) == "prompt_token_ids";
    for (const nlohmann::json& id : *it) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || (is_prompt && id.get<int64_t>() > INT32_MAX)) {
        return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must hold whole numbers from 0"));
      }
      if (is_prompt) {
        entry.prompt_tokens.push_back(id.get<int32_t>());
      } else {
        entry.prefix_blocks.push_back(id.get<int64_t>());
      }
    }
    if (is_prompt && entry.prompt_tokens.empty()) return absl::InvalidArgumentError("\"prompt_token_ids\" is empty");
    if (is_prompt) return entry;
  }
  absl::StatusOr<int64_t> input = Length(object, "input_length");
  if (!input.ok()) return input.status();
  entry.input_length = *input;
  return entry;
}

}  // namespace

absl::StatusOr<std::vector<TraceEntry>> ParseTrace(std::string_view text, const std::string& path) {
  std::vector<TraceEntry> entries;
  int64_t line_number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (object.is_discarded()) return BadLine(path, line_number, "is not JSON");
    absl::StatusOr<TraceEntry> entry = ParseEntry(object);
    if (!entry.ok()) return BadLine(path, line_number, std::string(entry.status().message()));
    if (!entries.empty() && entry->seconds < entries.back().seconds) {
      return BadLine(path, line_number, "\"timestamp\" is earlier than that of the line before");
    }
    entries.push_back(*std::move(entry));
  }
  if (entries.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " has no requests"));
  const double first = entries.front().seconds;
  for (TraceEntry& entry : entries) entry.seconds -= first;
  return entries;
}

Workload::Workload(const BenchConfig& config, std::vector<TraceEntry> trace, int32_t vocab_size, uint64_t seed,
                   int64_t run)
    : config_(config),
      trace_(std::move(trace)),
      vocab_size_(vocab_size),
      seed_(Derive(seed, static_cast<uint64_t>(run) + 1000)),
      size_(config.workload == WorkloadKind::kTrace ? std::min(config.num_requests, static_cast<int64_t>(trace_.size()))
                                                    : config.num_requests) {}

double Workload::PoissonGap(int64_t index, double rate) const {
  if (std::isinf(rate)) return 0;
  return -std::log(Uniform(CounterRandomBits(Derive(seed_, kArrivals), static_cast<uint64_t>(index)))) / rate;
}

void Workload::AppendPrompt(uint64_t stream, int64_t tokens, BenchRequest& request) const {
  if (config_.input == BenchInput::kIds) {
    request.prompt_tokens.reserve(request.prompt_tokens.size() + static_cast<size_t>(tokens));
    for (int64_t i = 0; i < tokens; ++i) {
      const uint64_t bits = CounterRandomBits(stream, static_cast<uint64_t>(i));
      request.prompt_tokens.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size_)));
    }
    return;
  }
  for (int64_t i = 0; i < tokens; ++i) {
    if (!request.prompt_text.empty()) request.prompt_text += ' ';
    request.prompt_text += kWords[CounterRandomBits(stream, static_cast<uint64_t>(i)) % kWords.size()];
  }
}

BenchRequest Workload::Make(int64_t index) const {
  const auto at = static_cast<uint64_t>(index);
  BenchRequest request;
  request.index = index;
  request.seed = CounterRandomBits(Derive(seed_, kSampling), at);
  int64_t own_tokens = config_.input_len;
  int64_t max_tokens = config_.output_len;
  switch (config_.workload) {
    case WorkloadKind::kFixed:
      break;
    case WorkloadKind::kNormal: {
      const uint64_t lengths = Derive(seed_, kLengths);
      own_tokens = NormalLength(static_cast<double>(config_.input_len), config_.input_stddev, lengths, 2 * at);
      max_tokens = NormalLength(static_cast<double>(config_.output_len), config_.output_stddev, lengths, 2 * at + 1);
      break;
    }
    case WorkloadKind::kSharedPrefix: {
      const uint64_t group =
          CounterRandomBits(Derive(seed_, kGroups), at) % static_cast<uint64_t>(config_.prefix_groups);
      AppendPrompt(Derive(Derive(seed_, kPrefixes), group), config_.prefix_len, request);
      break;
    }
    case WorkloadKind::kLongContext:
      // 1 - u lies in [0, 1), so that shares of 0 and 1 are exact.
      if (1 - Uniform(CounterRandomBits(Derive(seed_, kGroups), at)) < config_.long_share) {
        request.kind = "long";
        own_tokens = config_.long_input_len;
      } else {
        request.kind = "short";
      }
      break;
    case WorkloadKind::kTrace: {
      const TraceEntry& entry = trace_[static_cast<size_t>(index)];
      request.arrival_seconds = entry.seconds / config_.trace_speed;
      request.prompt_tokens = entry.prompt_tokens;
      request.prompt_text = entry.prompt_text;
      max_tokens = entry.output_length;
      own_tokens = entry.input_length;
      for (const int64_t block : entry.prefix_blocks) {
        const int64_t tokens = std::min(own_tokens, kTraceBlockTokens);
        AppendPrompt(Derive(Derive(seed_, kPrefixes), static_cast<uint64_t>(block)), tokens, request);
        own_tokens -= tokens;
      }
      break;
    }
  }
  AppendPrompt(Derive(Derive(seed_, kPrompt), at), own_tokens, request);
  request.max_tokens = static_cast<int32_t>(max_tokens);
  return request;
}

}  // namespace k3
