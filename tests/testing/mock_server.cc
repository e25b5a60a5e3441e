#include "tests/testing/mock_server.h"

#include <cstdio>
#include <cstdlib>

#include "tests/testing/paths.h"

namespace k3::testing {
namespace {

MockEngine::Options WithModel(MockEngine::Options options) {
  options.limits.vocab_size = MockService::tokenizer()->vocab_size();
  if (options.eos_token_ids.empty()) options.eos_token_ids = MockService::tokenizer()->stop_ids();
  return options;
}

}  // namespace

MockService::MockService(Options options)
    : metrics(Metrics::Options{"test", "test", "tiny-k3", false}),
      generation(std::move(options.service), &health, &metrics),
      engine(WithModel(std::move(options.engine))) {
  if (options.loaded) Install();
}

void MockService::Install() {
  auto model = std::make_shared<ServedModel>();
  model->names = {"tiny-k3", "alias"};
  model->root = "tiny-k3";
  model->created = 1234567890;
  model->weights_version = "test-weights";
  model->device = "mock";
  model->tokenizer = tokenizer();
  model->renderer = std::make_shared<ChatRenderer>(tokenizer());
  model->eos_token_ids = tokenizer()->stop_ids();
  model->defaults = *LoadSamplingDefaults(TinyK3());
  model->engine = &engine;
  generation.Install(std::move(model));
  health.SetServing();
}

MockEngine::Script MockService::Tokens(std::vector<int32_t> tokens) {
  return [tokens = std::move(tokens)](const Request&, int32_t, int32_t position) {
    return static_cast<size_t>(position) < tokens.size() ? tokens[static_cast<size_t>(position)] : eos();
  };
}

std::vector<int32_t> MockService::Encode(const std::string& text) { return *tokenizer()->Encode(text); }

int32_t MockService::TokenOf(const std::string& bytes) {
  for (int32_t id = 0; id < tokenizer()->vocab_size(); ++id) {
    if (tokenizer()->TokenBytes(id) == bytes) return id;
  }
  std::fprintf(stderr, "tiny-k3 has no token of these bytes\n");
  std::abort();
}

std::shared_ptr<const Tokenizer> MockService::tokenizer() {
  static const std::shared_ptr<const Tokenizer> shared = *Tokenizer::Load(TinyK3());
  return shared;
}

int32_t MockService::eos() { return *tokenizer()->SpecialId("<|end_of_msg|>"); }

}  // namespace k3::testing
