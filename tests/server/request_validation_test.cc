#include "server/request_validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "server/error_details.h"

namespace k3 {
namespace {

using ::testing::HasSubstr;

const EngineLimits kLimits{.vocab_size = 1000,
                           .max_model_len = 512,
                           .latent_pages = 6,
                           .page_size = 64,
                           .state_slots = 4,
                           .snapshot_slots = 0,
                           .max_num_seqs = 4,
                           .max_queue = 8};

ServedModel Model() {
  ServedModel model;
  model.defaults.temperature = 0.6f;
  model.defaults.top_p = 0.95f;
  return model;
}

std::string BadField(const GenerationRequest& request, bool strict = false) {
  const auto resolved = ResolveSampling(request, Model(), kLimits, {.vendor_strict = strict});
  EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInvalidArgument);
  const ErrorDetails details = DetailsOf(resolved.status());
  return details.fields.empty() ? "" : details.fields[0].path;
}

TEST(RequestValidationTest, AbsentValuesAreTheModelsOwn) {
  GenerationRequest request;
  const auto resolved = ResolveSampling(request, Model(), kLimits, {});
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->params.temperature, 0.6f);
  EXPECT_EQ(resolved->params.top_p, 0.95f);
  EXPECT_EQ(resolved->params.top_k, 0);
  EXPECT_EQ(resolved->params.repetition_penalty, 1.0f);
  EXPECT_EQ(resolved->params.top_logprobs, -1);
  EXPECT_EQ(resolved->num_choices, 1);
  request.sampling.temperature = 0.0f;
  request.sampling.seed = 5;
  const auto greedy = ResolveSampling(request, Model(), kLimits, {});
  EXPECT_EQ(greedy->params.temperature, 0.0f);
  EXPECT_EQ(greedy->params.seed, 5u);
}

TEST(RequestValidationTest, DrawnSeedsDiffer) {
  const GenerationRequest request;
  EXPECT_NE(ResolveSampling(request, Model(), kLimits, {})->params.seed,
            ResolveSampling(request, Model(), kLimits, {})->params.seed);
}

TEST(RequestValidationTest, TopKAboveTheVocabularyIsOff) {
  GenerationRequest request;
  request.sampling.top_k = 4000000000u;
  EXPECT_EQ(ResolveSampling(request, Model(), kLimits, {})->params.top_k, 0);
}

TEST(RequestValidationTest, EveryBadValueNamesItsField) {
  const auto with = [](auto change) {
    GenerationRequest request;
    change(request);
    return request;
  };
  using R = GenerationRequest;
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.temperature = -0.1f; })), "sampling.temperature");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.temperature = NAN; })), "sampling.temperature");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.top_p = 0.0f; })), "sampling.top_p");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.top_p = 1.5f; })), "sampling.top_p");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.min_p = 1.0f; })), "sampling.min_p");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.presence_penalty = 3.0f; })), "sampling.presence_penalty");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.frequency_penalty = INFINITY; })), "sampling.frequency_penalty");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.repetition_penalty = 0.0f; })), "sampling.repetition_penalty");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.n = 0; })), "sampling.n");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.n = 129; })), "sampling.n");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.logit_bias = {{1000, 1.0f}}; })), "sampling.logit_bias[1000]");
  EXPECT_EQ(BadField(with([](R& r) { r.sampling.logit_bias = {{5, NAN}}; })), "sampling.logit_bias[5]");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.stop = {"a", ""}; })), "stopping.stop[1]");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.stop = {std::string(257, 'x')}; })), "stopping.stop[0]");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.stop = {"\xFF"}; })), "stopping.stop[0]");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.stop.assign(17, "x"); })), "stopping.stop");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.stop_token_ids = {5, 1000}; })), "stopping.stop_token_ids[1]");
  EXPECT_EQ(BadField(with([](R& r) {
              r.stopping.max_new_tokens = 3;
              r.stopping.min_new_tokens = 4;
            })),
            "stopping.min_new_tokens");
  EXPECT_EQ(BadField(with([](R& r) { r.stopping.repetition_count = 1; })), "stopping.repetition");
  EXPECT_EQ(BadField(with([](R& r) { r.output.top_logprobs = 21; })), "output.top_logprobs");
  EXPECT_EQ(BadField(with([](R& r) { r.session_id = std::string(257, 'x'); })), "session_id");
  EXPECT_EQ(BadField(with([](R& r) { r.cache.salt = std::string(257, 'x'); })), "cache.salt");
}

TEST(RequestValidationTest, StrictStopLimitsAreTheVendors) {
  GenerationRequest request;
  request.stopping.stop.assign(5, std::string(32, 'x'));
  EXPECT_TRUE(ResolveSampling(request, Model(), kLimits, {.vendor_strict = true}).ok());
  request.stopping.stop.emplace_back("y");
  EXPECT_EQ(BadField(request, true), "stopping.stop");
  request.stopping.stop = {std::string(33, 'x')};
  EXPECT_EQ(BadField(request, true), "stopping.stop[0]");
  EXPECT_TRUE(ResolveSampling(request, Model(), kLimits, {}).ok());
}

TEST(RequestValidationTest, MissingFeaturesAreUnimplemented) {
  GenerationRequest request;
  EXPECT_TRUE(CheckImplemented(request).ok());
  request.reasoning.token_budget = 5;
  EXPECT_EQ(CheckImplemented(request).code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(DetailsOf(CheckImplemented(request)).fields[0].path, "reasoning.token_budget");
}

// B16.
TEST(RequestValidationTest, LengthsAtTheLimit) {
  EngineLimits limits = kLimits;
  limits.latent_pages = 100;
  const auto resolve = [&](int64_t prompt, std::optional<uint32_t> max_new) {
    GenerationRequest request;
    request.stopping.max_new_tokens = max_new;
    EffectiveSampling effective;
    const absl::Status status = ResolveLength(request, prompt, limits, &effective);
    return std::pair(status, effective.params.max_new_tokens);
  };
  EXPECT_TRUE(resolve(511, 1).first.ok());
  EXPECT_EQ(resolve(511, std::nullopt).second, 1);
  EXPECT_EQ(resolve(100, std::nullopt).second, 412);
  for (const auto& [prompt, max_new] :
       std::vector<std::pair<int64_t, std::optional<uint32_t>>>{{512, std::nullopt}, {513, 1}, {500, 100}}) {
    const absl::Status status = resolve(prompt, max_new).first;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const ErrorDetails details = DetailsOf(status);
    EXPECT_EQ(details.reason, "context_length_exceeded");
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(prompt)));
    EXPECT_THAT(std::string(status.message()), HasSubstr("512"));
  }
  EXPECT_EQ(resolve(10, 0).first.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(resolve(1, 4294967295u).first.code(), absl::StatusCode::kInvalidArgument);
}

TEST(RequestValidationTest, MoreThanThePoolsHoldIsAPrecondition) {
  GenerationRequest request;
  EffectiveSampling effective;
  request.stopping.max_new_tokens = 200;
  const absl::Status status = ResolveLength(request, 200, kLimits, &effective);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "capacity_exceeded");
  ASSERT_EQ(details.preconditions.size(), 1u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("384"));
  // Without a wish, the reply is cut to what has room.
  request.stopping.max_new_tokens.reset();
  ASSERT_TRUE(ResolveLength(request, 200, kLimits, &effective).ok());
  EXPECT_EQ(effective.params.max_new_tokens, 184);
}

TEST(RequestValidationTest, MinTokensNeedRoom) {
  GenerationRequest request;
  EffectiveSampling effective;
  request.stopping.min_new_tokens = 200;
  EXPECT_EQ(DetailsOf(ResolveLength(request, 300, kLimits, &effective)).fields[0].path, "stopping.min_new_tokens");
}

}  // namespace
}  // namespace k3
