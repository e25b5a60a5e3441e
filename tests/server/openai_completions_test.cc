#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "tests/testing/openai_server.h"
#include "tests/testing/prometheus_text.h"

namespace k3 {
namespace {

using testing::Json;
using testing::kCompletions;
using testing::OpenAiReply;
using testing::OpenAiServer;
using testing::OpenAiStream;

class OpenAiCompletionsTest : public ::testing::Test {
 protected:
  OpenAiServer server_;
};

TEST_F(OpenAiCompletionsTest, WholeAndStreamed) {
  server_.ForceText(" world, hello");
  const Json body = {{"model", "tiny-k3"}, {"prompt", "hello"}, {"max_tokens", 20}};
  const OpenAiReply reply = server_.Post(kCompletions, body);
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_TRUE(reply.body["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(reply.body["object"], "text_completion");
  const Json& choice = reply.body["choices"][0];
  EXPECT_EQ(choice["text"], " world, hello");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_TRUE(choice["logprobs"].is_null());
  EXPECT_EQ(reply.body["usage"]["prompt_tokens"], server_.tokenizer().Encode("hello").value().size());

  Json streamed = body;
  streamed["stream_options"] = {{"include_usage", true}};
  const OpenAiStream stream = server_.Stream(kCompletions, streamed);
  EXPECT_EQ(stream.problem, "");
  EXPECT_TRUE(stream.done);
  EXPECT_EQ(stream.Text(), " world, hello");
  EXPECT_EQ(stream.FinishReason(), "stop");
  EXPECT_EQ(stream.chunks[0]["object"], "text_completion");
  EXPECT_EQ(stream.chunks.back()["choices"], Json::array());
  EXPECT_EQ(stream.chunks.back()["usage"], reply.body["usage"]);
}

TEST_F(OpenAiCompletionsTest, MarkupInAPromptIsTextUnlessAskedOtherwise) {
  server_.ForceText("x");
  server_.Post(kCompletions, {{"prompt", "<|open|>"}});
  const std::vector<int32_t> text = server_.engine().LastRequest().prompt_tokens;
  EXPECT_GT(text.size(), 1u);
  server_.Post(kCompletions, {{"prompt", "<|open|>"}, {"control_tokens", true}});
  EXPECT_EQ(server_.engine().LastRequest().prompt_tokens, (std::vector<int32_t>{3843}));
}

TEST_F(OpenAiCompletionsTest, BatchesKeepTheirOrder) {
  server_.ForceText("!");
  for (const Json& prompts : {Json({"one", "two", "three"}), Json::parse("[[11,12],[13],[14,15,16]]")}) {
    const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", prompts}, {"n", 2}, {"echo", true}});
    ASSERT_EQ(reply.status, 200) << reply.raw.body;
    ASSERT_EQ(reply.body["choices"].size(), 6u);
    int64_t prompt_tokens = 0;
    for (int i = 0; i < 6; ++i) {
      const Json& prompt = prompts[i / 2];
      std::string text;
      std::vector<int32_t> ids;
      if (prompt.is_string()) {
        text = prompt;
        ids = server_.tokenizer().Encode(text).value();
      } else {
        ids = prompt.get<std::vector<int32_t>>();
        text = server_.tokenizer().Decode(ids);
      }
      if (i % 2 == 0) prompt_tokens += static_cast<int64_t>(ids.size());
      EXPECT_EQ(reply.body["choices"][i]["index"], i);
      EXPECT_EQ(reply.body["choices"][i]["text"], text + "!");
    }
    EXPECT_EQ(reply.body["usage"]["prompt_tokens"], prompt_tokens);
    const OpenAiStream stream = server_.Stream(
        kCompletions, {{"prompt", prompts}, {"n", 2}, {"echo", true}, {"stream_options", {{"include_usage", true}}}});
    EXPECT_EQ(stream.problem, "");
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(stream.Text(i), reply.body["choices"][i]["text"]);
      EXPECT_EQ(stream.FinishReason(i), "stop");
    }
    EXPECT_EQ(stream.chunks.back()["usage"], reply.body["usage"]);
  }
}

TEST_F(OpenAiCompletionsTest, ABatchLargerThanTheQueueFinishes) {
  OpenAiServer::Options options;
  options.engine.limits.max_queue = 8;
  options.engine.limits.max_num_seqs = 4;
  OpenAiServer server(options);
  server.ForceText("ok");
  const Json prompts(std::vector<std::string>(200, "p"));
  const OpenAiReply reply = server.Post(kCompletions, {{"prompt", prompts}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  ASSERT_EQ(reply.body["choices"].size(), 200u);
  for (const Json& choice : reply.body["choices"]) EXPECT_EQ(choice["text"], "ok");
  EXPECT_TRUE(server.NothingLeaked());
}

// What waits for room that its own batch takes up was not refused to anybody, and is not tried again and again.
TEST_F(OpenAiCompletionsTest, APromptThatWaitsForItsBatchIsNoRefusal) {
  OpenAiServer::Options options;
  options.engine.limits.max_queue = 2;
  options.engine.limits.max_num_seqs = 1;
  OpenAiServer server(options);
  server.Force({100, 101, 102});
  const std::vector<std::string> prompts(50, "a");
  const OpenAiReply reply = server.Post(kCompletions, {{"prompt", prompts}, {"max_tokens", 3}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_EQ(reply.body["choices"].size(), 50u);
  EXPECT_EQ(testing::PrometheusText::Parse(server.metrics().Render())->Sum("k3serve_rejected_total"), 0);
}

// Each choice repeats what its prompt was worth: a short request must not ask for a reply of many gigabytes.
TEST_F(OpenAiCompletionsTest, EchoedLogprobsAreLimitedOverAllChoices) {
  server_.Force({100});
  Json body = {
      {"prompt", std::vector<int>(20'000, 7)}, {"echo", true}, {"logprobs", 20}, {"max_tokens", 1}, {"n", 128}};
  const OpenAiReply refused = server_.Post(kCompletions, body);
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(refused.Param(), "n");
  EXPECT_EQ(refused.body["error"]["message"],
            "n: the prompt's log-probabilities in 128 choices would be 53760000 numbers; at most 33554432");
  body["n"] = 1;
  EXPECT_EQ(server_.Post(kCompletions, body).status, 200);
  body["n"] = 128;
  body["echo"] = false;
  EXPECT_EQ(server_.Post(kCompletions, body).status, 200);
}

// Before the first runs and before the 200, also where the last of many is bad.
TEST_F(OpenAiCompletionsTest, ABadPromptBehindManyIsFoundFirst) {
  OpenAiServer::Options options;
  options.engine.limits.max_model_len = 100;
  OpenAiServer server(options);
  server.ForceText("ok");
  for (const bool stream : {false, true}) {
    Json prompts = Json::array();
    for (int i = 0; i < 200; ++i) prompts.push_back(Json::array({1, 2}));
    prompts.push_back(Json::array({1, 4096}));
    OpenAiReply reply = server.Post(kCompletions, {{"prompt", prompts}, {"stream", stream}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.Param(), "prompt[200][1]");
    prompts.back() = Json(std::vector<int>(90, 7));
    reply = server.Post(kCompletions, {{"prompt", prompts}, {"max_tokens", 20}, {"stream", stream}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.Code(), "context_length_exceeded");
    const Json texts = {"a", "b", std::string(5000, 'x')};
    reply = server.Post(kCompletions, {{"prompt", texts}, {"stream", stream}});
    EXPECT_EQ(reply.status, 400);
    EXPECT_EQ(reply.Param(), "prompt[2]");
    EXPECT_EQ(reply.Code(), "context_length_exceeded");
    EXPECT_EQ(server.Post(kCompletions, {{"prompt", texts}, {"model", "nope"}, {"stream", stream}}).status, 404);
  }
  EXPECT_EQ(server.engine().Load().steps, 0u);
}

// A request of many prompts is one request: what was let in before a drain is finished, later prompts included.
TEST_F(OpenAiCompletionsTest, ADrainLetsABatchFinish) {
  OpenAiServer::Options options;
  options.engine.limits.max_num_seqs = 4;
  OpenAiServer server(options);
  server.ForceText("ok");
  server.engine().Pause();
  OpenAiReply reply;
  std::thread client([&] { reply = server.Post(kCompletions, {{"prompt", std::vector<std::string>(200, "p")}}); });
  while (server.engine().Load().waiting + server.engine().Load().running < 64) std::this_thread::yield();
  server.health().StartDrain(Clock::duration::zero());
  EXPECT_GT(server.service().active(), 64u);  // those that are to come keep it from being idle
  EXPECT_EQ(server.Post(kCompletions, {{"prompt", std::vector<std::string>(2, "p")}}).status, 503);
  server.engine().Resume();
  client.join();
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  ASSERT_EQ(reply.body["choices"].size(), 200u);
  for (const Json& choice : reply.body["choices"]) EXPECT_EQ(choice["text"], "ok");
  EXPECT_TRUE(server.NothingLeaked());
}

// Two hundred prompts of 100 ms, of which 64 run at a time, take longer than each of them.
TEST_F(OpenAiCompletionsTest, TheRequestTimeoutIsThatOfTheBatch) {
  OpenAiServer::Options options;
  options.request_timeout = std::chrono::milliseconds(250);
  options.engine.step_time = std::chrono::milliseconds(5);
  OpenAiServer server(options);
  server.Force(std::vector<int32_t>(19, 100));
  const OpenAiReply reply =
      server.Post(kCompletions, {{"prompt", std::vector<std::string>(200, "p")}, {"max_tokens", 20}});
  EXPECT_EQ(reply.status, 504) << reply.raw.body;
  EXPECT_EQ(reply.body["error"]["type"], "timeout");
  EXPECT_TRUE(server.NothingLeaked());
}

// What waits for its own batch is past the queue; a batch of which nothing runs is not.
TEST_F(OpenAiCompletionsTest, PromptsThatWaitForTheirBatchAreNotOverdue) {
  OpenAiServer::Options options;
  options.queue_timeout = std::chrono::milliseconds(20);
  options.engine.limits.max_num_seqs = 1;
  options.engine.manual = true;
  OpenAiServer server(options);
  server.ForceText("ok");
  OpenAiReply first, second;
  const auto waiting = [&](int count) {
    while (server.engine().Load().waiting < count) std::this_thread::yield();
  };
  std::thread client([&] { first = server.Post(kCompletions, {{"prompt", {"a", "b", "c"}}}); });
  waiting(3);
  server.engine().Step();  // the first has its slot
  std::thread late([&] { second = server.Post(kCompletions, {{"prompt", {"d", "e"}}}); });
  waiting(4);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  server.service().EndOverdue();
  late.join();
  EXPECT_EQ(second.status, 429);
  EXPECT_EQ(second.Code(), "queue_timeout");
  std::atomic<bool> done{false};
  std::thread steps([&] {
    while (!done) server.engine().Step();
  });
  client.join();
  done = true;
  steps.join();
  ASSERT_EQ(first.status, 200) << first.raw.body;
  for (const Json& choice : first.body["choices"]) EXPECT_EQ(choice["text"], "ok");
  EXPECT_TRUE(server.NothingLeaked());
}

TEST_F(OpenAiCompletionsTest, OneBadPromptRefusesTheBatch) {
  server_.ForceText("ok");
  const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", Json::parse("[[1,2],[3],[4096]]")}});
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.Param(), "prompt[2][0]") << "the prompt, then the token in it";
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", Json::parse("[3,4096]")}}).Param(), "prompt[1]");
  OpenAiServer::Options options;
  options.engine.limits.max_model_len = 20;
  OpenAiServer small(options);
  small.ForceText("ok");
  const Json lengths = {{"prompt", {std::vector<int>(4, 7), std::vector<int>(40, 7)}}, {"max_tokens", 1}};
  EXPECT_EQ(small.Post(kCompletions, lengths).Param(), "prompt[1]");
  EXPECT_TRUE(server_.NothingLeaked());
  for (const char* prompt :
       {"[1,\"a\"]", "[\"a\",1]", "[[1],\"a\"]", "[[1],2]", "[1,-1]", "[1.5]", "[null]", "{}", "true", "5"}) {
    const OpenAiReply bad = server_.Post(kCompletions, {{"prompt", Json::parse(prompt)}});
    EXPECT_EQ(bad.status, 400) << prompt;
    EXPECT_TRUE(bad.Param().starts_with("prompt")) << prompt << bad.raw.body;
  }
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", "a"}, {"suffix", "b"}}).Param(), "suffix");
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", "a"}, {"suffix", ""}}).status, 200);
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", Json(std::vector<std::string>(100, "a"))}, {"n", 100}}).Param(),
            "n");
}

// An end that was ignored is a token without text.
TEST_F(OpenAiCompletionsTest, OffsetsSkipIgnoredEnds) {
  std::vector<int32_t> tokens = server_.Tokens("one");
  const int32_t end = server_.tokenizer().stop_ids().back();
  tokens.push_back(end);
  const size_t more = tokens.size();
  for (const int32_t token : server_.Tokens(" two")) tokens.push_back(token);
  server_.Force(tokens);
  const OpenAiReply reply = server_.Post(
      kCompletions, {{"prompt", "p"}, {"logprobs", 0}, {"max_tokens", tokens.size()}, {"ignore_eos", true}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  EXPECT_EQ(reply.body["choices"][0]["text"], "one two");
  const Json& offsets = reply.body["choices"][0]["logprobs"]["text_offset"];
  ASSERT_EQ(offsets.size(), tokens.size());
  EXPECT_EQ(offsets[more - 1], 3);
  EXPECT_EQ(offsets[more], 3);
}

TEST_F(OpenAiCompletionsTest, Logprobs) {
  server_.ForceText("one two");
  const std::vector<int32_t> tokens = server_.Tokens("one two");
  const OpenAiReply reply =
      server_.Post(kCompletions, {{"prompt", "p"}, {"logprobs", 3}, {"max_tokens", tokens.size()}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  const Json& logprobs = reply.body["choices"][0]["logprobs"];
  ASSERT_EQ(logprobs["tokens"].size(), tokens.size());
  ASSERT_EQ(logprobs["token_logprobs"].size(), tokens.size());
  ASSERT_EQ(logprobs["top_logprobs"].size(), tokens.size());
  ASSERT_EQ(logprobs["text_offset"].size(), tokens.size());
  int64_t offset = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_EQ(logprobs["tokens"][i], server_.tokenizer().TokenBytes(tokens[i]));
    EXPECT_EQ(logprobs["token_logprobs"][i], -0.25);
    EXPECT_EQ(logprobs["top_logprobs"][i].size(), 3u);
    EXPECT_EQ(logprobs["top_logprobs"][i][logprobs["tokens"][i].get<std::string>()], -0.25);
    EXPECT_EQ(logprobs["text_offset"][i], offset);
    offset += static_cast<int64_t>(server_.tokenizer().TokenBytes(tokens[i]).size());
  }
  const OpenAiStream stream =
      server_.Stream(kCompletions, {{"prompt", "p"}, {"logprobs", 3}, {"max_tokens", tokens.size()}});
  Json joined = {{"tokens", Json::array()},
                 {"token_logprobs", Json::array()},
                 {"top_logprobs", Json::array()},
                 {"text_offset", Json::array()}};
  for (const Json& chunk : stream.chunks) {
    for (auto& [key, list] : joined.items()) {
      const Json& part = chunk["choices"][0]["logprobs"];
      if (!part.is_null()) list.insert(list.end(), part[key].begin(), part[key].end());
    }
  }
  EXPECT_EQ(joined, logprobs);
}

// The token itself is always among the alternatives, also when only 0 are asked for or when its text is no whole
// character.
TEST_F(OpenAiCompletionsTest, TheTokenIsAlwaysAmongTheAlternatives) {
  server_.Force({server_.ByteToken(0xF0), server_.ByteToken(0x9F), server_.ByteToken(0x98), server_.ByteToken(0x80)});
  for (const int top : {0, 1, 5}) {
    const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", "p"}, {"logprobs", top}});
    ASSERT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body["choices"][0]["text"], "😀");
    const Json& logprobs = reply.body["choices"][0]["logprobs"];
    ASSERT_EQ(logprobs["tokens"].size(), 5u) << "four bytes and the end token";
    EXPECT_EQ(logprobs["tokens"][0], "bytes:\\xf0");
    for (size_t i = 0; i < 5; ++i) {
      const Json& alternatives = logprobs["top_logprobs"][i];
      ASSERT_TRUE(alternatives.contains(logprobs["tokens"][i].get<std::string>()));
      double best = -1e9;
      for (const auto& [token, value] : alternatives.items()) best = std::max(best, value.get<double>());
      EXPECT_EQ(best, logprobs["token_logprobs"][i].get<double>());
    }
  }
}

// What lm-evaluation-harness sends and how it reads the reply.
TEST_F(OpenAiCompletionsTest, EchoWithPromptLogprobs) {
  server_.ForceText("x");
  for (const int max_tokens : {0, 1}) {
    const Json prompts = Json::parse("[[101,102,103,104],[105,106]]");
    const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", prompts},
                                                          {"echo", true},
                                                          {"logprobs", 1},
                                                          {"max_tokens", max_tokens},
                                                          {"temperature", 0},
                                                          {"seed", 1234}});
    ASSERT_EQ(reply.status, 200) << reply.raw.body;
    for (size_t p = 0; p < 2; ++p) {
      const Json& choice = reply.body["choices"][p];
      const std::vector<int32_t> ids = prompts[p].get<std::vector<int32_t>>();
      const Json& logprobs = choice["logprobs"];
      ASSERT_EQ(logprobs["tokens"].size(), ids.size() + max_tokens);
      EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
      EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
      std::string joined;
      for (size_t i = 0; i < ids.size(); ++i) {
        joined += server_.tokenizer().TokenBytes(ids[i]);
        EXPECT_EQ(logprobs["tokens"][i], server_.tokenizer().TokenBytes(ids[i]));
        if (i == 0) continue;
        EXPECT_EQ(logprobs["token_logprobs"][i], -0.5 * static_cast<double>(i));
        EXPECT_EQ(logprobs["top_logprobs"][i][logprobs["tokens"][i].get<std::string>()], logprobs["token_logprobs"][i]);
      }
      EXPECT_EQ(choice["text"], joined + (max_tokens == 1 ? "x" : ""));
      EXPECT_EQ(choice["finish_reason"], "length");
    }
    EXPECT_EQ(reply.body["usage"]["completion_tokens"], 2 * max_tokens);
  }
  const OpenAiReply without = server_.Post(kCompletions, {{"prompt", "abc"}, {"echo", true}, {"max_tokens", 0}});
  ASSERT_EQ(without.status, 200) << without.raw.body;
  EXPECT_EQ(without.body["choices"][0]["text"], "abc");
  EXPECT_TRUE(without.body["choices"][0]["logprobs"].is_null());
  const OpenAiStream stream =
      server_.Stream(kCompletions, {{"prompt", "abc"}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}});
  EXPECT_EQ(stream.problem, "");
  EXPECT_EQ(stream.Text(), "abc");
  EXPECT_EQ(stream.FinishReason(), "length");
  EXPECT_EQ(server_.Post(kCompletions, {{"prompt", "abc"}, {"max_tokens", 0}}).Param(), "max_tokens");
}

TEST_F(OpenAiCompletionsTest, TokenIdsAndPromptLogprobs) {
  server_.Force({200, 201});
  const OpenAiReply reply =
      server_.Post(kCompletions, {{"prompt", {101, 102}}, {"return_token_ids", true}, {"prompt_logprobs", 2}});
  ASSERT_EQ(reply.status, 200) << reply.raw.body;
  const Json& choice = reply.body["choices"][0];
  EXPECT_EQ(choice["token_ids"], Json({200, 201, 3842}));
  EXPECT_EQ(choice["prompt_token_ids"], Json({101, 102}));
  ASSERT_EQ(choice["prompt_logprobs"].size(), 2u);
  EXPECT_EQ(choice["prompt_logprobs"][1]["102"]["logprob"], -0.5);
  EXPECT_TRUE(choice["logprobs"].is_null());
}

TEST_F(OpenAiCompletionsTest, AStopTokenOfTheRequestIsNamed) {
  server_.Force({200, 201, 202});
  const OpenAiReply reply = server_.Post(kCompletions, {{"prompt", "p"}, {"stop_token_ids", {201}}});
  EXPECT_EQ(reply.body["choices"][0]["stop_reason"], 201);
  EXPECT_EQ(reply.body["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(reply.body["usage"]["completion_tokens"], 2);
}

}  // namespace
}  // namespace k3
