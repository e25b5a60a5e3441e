// Whole encodes of a text, from UTF-8 to ids, on one thread:
//   cpu/tokenizer   how many times as fast as tiktoken; needs its seconds for the same text, see
//   scripts/bench_tokenizer.py
// Prints the best run's seconds of processor time, MB/s, tokens, and the share of splitting. Usage:
// tokenizer_bench MODEL_DIR TEXT_FILE [--runs N] [--tiktoken-seconds S] [--tiktoken-tokens N] [--json FILE]

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "server/text/encode_chunks.h"
#include "server/text/pretokenizer.h"
#include "server/text/tokenizer.h"
#include "tests/bench/result_file.h"

namespace k3 {
namespace {

double ThreadSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

template <typename F>
double BestSeconds(int runs, F&& run) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double begin = ThreadSeconds();
    run();
    best = std::min(best, ThreadSeconds() - begin);
  }
  return best;
}

struct Options {
  const char* model = nullptr;
  const char* text = nullptr;
  int runs = 7;
  double tiktoken_seconds = 0;
  size_t tiktoken_tokens = 0;
  std::string json;
};

bool ParseOptions(int argc, char** argv, Options* options) {
  if (argc < 3) return false;
  options->model = argv[1];
  options->text = argv[2];
  for (int i = 3; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = argv[i + 1];
    if (flag == "--runs") {
      options->runs = std::max(1, std::atoi(value));
    } else if (flag == "--tiktoken-seconds") {
      options->tiktoken_seconds = std::atof(value);
    } else if (flag == "--tiktoken-tokens") {
      options->tiktoken_tokens = std::strtoull(value, nullptr, 10);
    } else if (flag == "--json") {
      options->json = value;
    } else {
      return false;
    }
  }
  return argc % 2 == 1;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, &options)) {
    std::fprintf(
        stderr, "usage: %s MODEL_DIR TEXT_FILE [--runs N] [--tiktoken-seconds S] [--tiktoken-tokens N] [--json FILE]\n",
        argv[0]);
    return 2;
  }
  const auto tokenizer = Tokenizer::Load(options.model);
  if (!tokenizer.ok()) {
    std::fprintf(stderr, "%s\n", tokenizer.status().ToString().c_str());
    return 1;
  }
  std::ifstream file(options.text, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());

  std::vector<int32_t> ids;
  absl::Status status;
  const double seconds = BestSeconds(options.runs, [&] {
    ids.clear();
    status = (*tokenizer)->Encode(text, EncodeMode::kOrdinary, &ids);
  });
  if (!status.ok() || text.empty()) {
    std::fprintf(stderr, "%s: %s\n", options.text, text.empty() ? "empty" : status.ToString().c_str());
    return 1;
  }
  const auto pretokenizer = Pretokenizer::Create().value();
  size_t pieces = 0;
  const double split_seconds = BestSeconds(options.runs, [&] {
    pieces = 0;
    std::vector<uint32_t> ends;
    EncodeChunks chunks(text, /*valid_utf8=*/true);
    for (std::string_view chunk; chunks.Next(&chunk);) {
      ends.clear();
      pretokenizer->Split(chunk, &ends);
      pieces += ends.size();
    }
  });
  std::printf("%zu bytes, %zu pieces, %zu tokens: %.4f s, %.1f MB/s; splitting alone %.4f s\n", text.size(), pieces,
              ids.size(), seconds, static_cast<double>(text.size()) / seconds * 1e-6, split_seconds);
  if (options.tiktoken_seconds <= 0) return 0;
  if (options.tiktoken_tokens != ids.size()) {
    std::fprintf(stderr, "tiktoken made %zu tokens\n", options.tiktoken_tokens);
    return 1;
  }
  const double ratio = options.tiktoken_seconds / seconds;
  std::printf("cpu/tokenizer %.2f times tiktoken (%.4f s)\n", ratio, options.tiktoken_seconds);
  bench::WriteResults(options.json, {{"cpu/tokenizer", ratio, "of tiktoken", {}, {}, {}}}, bench::CpuName(), argc,
                      argv);
  return 0;
}

}  // namespace
}  // namespace k3

int main(int argc, char** argv) { return k3::Main(argc, argv); }
