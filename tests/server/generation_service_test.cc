#include "server/generation_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "server/error_details.h"
#include "server/text/json_parser.h"
#include "tests/testing/mock_server.h"

namespace k3 {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using testing::MockService;

class GenerationServiceTest : public ::testing::Test {
 protected:
  static absl::StatusOr<std::shared_ptr<ResponseStream>> Start(MockService& service, GenerationRequest request) {
    std::promise<absl::StatusOr<std::shared_ptr<ResponseStream>>> done;
    service.generation.Start(std::move(request), std::make_shared<std::atomic<bool>>(false),
                             [&](auto stream) { done.set_value(std::move(stream)); });
    return done.get_future().get();
  }
  static std::vector<StreamEvent> Finish(ResponseStream& stream) {
    std::vector<StreamEvent> events;
    while (events.empty() || !std::holds_alternative<FinishedEvent>(events.back())) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      stream.Drain();
      StreamEvent event;
      while (stream.Next(&event)) events.push_back(std::move(event));
    }
    return events;
  }
  static GenerationRequest Chat(const std::string& text) {
    GenerationRequest request;
    request.request_id = "r1";
    ChatRequest chat;
    ChatMessage message;
    message.role = "user";
    message.content = ChatContent::Text(text);
    chat.messages.push_back(message);
    request.input = chat;
    return request;
  }
  static GenerationRequest Tokens(size_t count) {
    GenerationRequest request;
    request.input = std::vector<uint32_t>(count, 100);
    return request;
  }
  static std::string FieldOf(const absl::Status& status) {
    const ErrorDetails details = DetailsOf(status);
    return details.fields.empty() ? "" : details.fields[0].path;
  }
};

TEST_F(GenerationServiceTest, RendersWhatItRuns) {
  MockService service({});
  auto stream = Start(service, Chat("What does grep do?"));
  ASSERT_TRUE(stream.ok()) << stream.status();
  const Request ran = service.engine.LastRequest();
  std::promise<absl::StatusOr<std::vector<int32_t>>> ids;
  service.generation.Render(Chat("What does grep do?"), [&](auto result) { ids.set_value(std::move(result)); });
  const auto rendered = ids.get_future().get();
  ASSERT_TRUE(rendered.ok());
  EXPECT_THAT(ran.prompt_tokens, ElementsAreArray(*rendered));
  EXPECT_EQ(ran.external_id, "r1");
  EXPECT_EQ(ran.sampling.temperature, 0.6f);
  EXPECT_EQ(ran.sampling.max_new_tokens, service.engine.Limits().max_model_len - static_cast<int>(rendered->size()));
  // The served default effort is max: its message is part of the prompt.
  const std::string text = MockService::tokenizer()->Decode(*rendered);
  EXPECT_THAT(text, HasSubstr("`thinking_effort=max`"));
  (*stream)->Cancel();
  const auto events = Finish(**stream);
  EXPECT_EQ(std::get<FinishedEvent>(events.back()).status.code(), absl::StatusCode::kCancelled);
}

TEST_F(GenerationServiceTest, EffortFollowsRequestThenServer) {
  MockService::Options options;
  options.service.default_effort = "low";
  MockService service(options);
  const auto prompt = [&](GenerationRequest request) {
    std::promise<std::string> text;
    service.generation.Render(std::move(request), [&](auto ids) {
      text.set_value(ids.ok() ? MockService::tokenizer()->Decode(*ids) : std::string(ids.status().message()));
    });
    return text.get_future().get();
  };
  EXPECT_THAT(prompt(Chat("x")), HasSubstr("thinking_effort=low"));
  GenerationRequest high = Chat("x");
  high.reasoning.effort = Effort::kHigh;
  EXPECT_THAT(prompt(high), HasSubstr("thinking_effort=high"));
  GenerationRequest none = Chat("x");
  none.reasoning.effort = Effort::kNone;
  EXPECT_THAT(prompt(none), ::testing::Not(HasSubstr("thinking_effort")));
}

TEST_F(GenerationServiceTest, HistoryReasoningIsKeptUnlessSaidOtherwise) {
  MockService service({});
  GenerationRequest request = Chat("first");
  auto& chat = std::get<ChatRequest>(request.input);
  ChatMessage answer;
  answer.role = "assistant";
  answer.reasoning_content = "SECRET THOUGHT";
  answer.content = ChatContent::Text("answer");
  chat.messages.push_back(answer);
  chat.messages.push_back(chat.messages[0]);
  const auto prompt = [&](const GenerationRequest& wanted) {
    std::promise<std::string> text;
    service.generation.Render(wanted, [&](auto ids) { text.set_value(MockService::tokenizer()->Decode(*ids)); });
    return text.get_future().get();
  };
  EXPECT_THAT(prompt(request), HasSubstr("SECRET THOUGHT"));
  request.reasoning.keep_history = false;
  EXPECT_THAT(prompt(request), ::testing::Not(HasSubstr("SECRET THOUGHT")));
}

TEST_F(GenerationServiceTest, SegmentsAreEncodedOneByOne) {
  MockService service({});
  GenerationRequest request;
  std::vector<PromptSegment> segments(3);
  segments[0] = {std::string("<|open|>user"), true};
  segments[1] = {std::string("<|open|>user"), false};
  segments[2] = {std::vector<uint32_t>{5, 6}, false};
  request.input = segments;
  request.stopping.max_new_tokens = 1;
  auto stream = Start(service, request);
  ASSERT_TRUE(stream.ok()) << stream.status();
  std::vector<int32_t> expected = *MockService::tokenizer()->Encode("<|open|>user", EncodeMode::kControl);
  const auto plain = *MockService::tokenizer()->Encode("<|open|>user", EncodeMode::kOrdinary);
  expected.insert(expected.end(), plain.begin(), plain.end());
  expected.insert(expected.end(), {5, 6});
  EXPECT_THAT(service.engine.LastRequest().prompt_tokens, ElementsAreArray(expected));
  Finish(**stream);
  EXPECT_EQ(service.generation.active(), 0u);
}

TEST_F(GenerationServiceTest, BadInputsNameTheirField) {
  MockService service({});
  EXPECT_EQ(FieldOf(Start(service, {}).status()), "input");
  EXPECT_EQ(FieldOf(Start(service, Tokens(0)).status()), "tokens.ids");
  GenerationRequest outside;
  outside.input = std::vector<uint32_t>{1, 4096};
  EXPECT_EQ(FieldOf(Start(service, outside).status()), "tokens.ids[1]");
  GenerationRequest empty_text;
  empty_text.input = std::vector<PromptSegment>{{std::string(), false}};
  EXPECT_EQ(FieldOf(Start(service, empty_text).status()), "prompt");
  GenerationRequest invalid;
  invalid.input = std::vector<PromptSegment>{{std::string("a\xFF"), false}};
  EXPECT_EQ(FieldOf(Start(service, invalid).status()), "prompt.segments[0].text");
  GenerationRequest no_messages;
  no_messages.input = ChatRequest();
  EXPECT_EQ(FieldOf(Start(service, no_messages).status()), "chat.messages");
  GenerationRequest unknown = Chat("x");
  unknown.model = std::string(100000, 'x');
  const absl::Status not_found = Start(service, unknown).status();
  EXPECT_EQ(not_found.code(), absl::StatusCode::kNotFound);
  EXPECT_LT(not_found.message().size(), 300u);
  EXPECT_EQ(DetailsOf(not_found).resource->type, "model");
  GenerationRequest alias = Chat("x");
  alias.model = "alias";
  alias.stopping.max_new_tokens = 1;
  EXPECT_TRUE(Start(service, alias).ok());
}

TEST_F(GenerationServiceTest, LargeTextRunsElsewhereAndGivesTheSameIds) {
  MockService service({});
  std::string text;
  while (text.size() < 1 << 20) text += "the quick brown fox jumps over the lazy dog. ";
  GenerationRequest request;
  request.input = std::vector<PromptSegment>{{text, false}};
  request.stopping.max_new_tokens = 1;
  std::promise<std::thread::id> thread;
  service.generation.Start(request, std::make_shared<std::atomic<bool>>(false),
                           [&](auto) { thread.set_value(std::this_thread::get_id()); });
  EXPECT_NE(thread.get_future().get(), std::this_thread::get_id());
  EXPECT_THAT(service.engine.LastRequest().prompt_tokens, ElementsAreArray(MockService::Encode(text)));
}

TEST_F(GenerationServiceTest, WhateverIsLongRunsElsewhere) {
  MockService service({});
  const std::string text(100'000, 'a');
  const auto runs_elsewhere = [&](const GenerationRequest& request) {
    std::promise<std::thread::id> thread;
    service.generation.Start(request, std::make_shared<std::atomic<bool>>(false),
                             [&](const auto&) { thread.set_value(std::this_thread::get_id()); });
    return thread.get_future().get() != std::this_thread::get_id();
  };
  EXPECT_FALSE(runs_elsewhere(Chat("a")));
  EXPECT_TRUE(runs_elsewhere(Chat(text)));
  std::vector<GenerationRequest> long_ones(6, Chat("a"));
  const auto chat = [&](size_t i) -> ChatRequest& { return std::get<ChatRequest>(long_ones[i].input); };
  const JsonValue tools =
      ParseJson(R"([{"type":"function","function":{"name":"f","description":")" + text + "\"}}]").value();
  chat(0).tools = tools;
  chat(1).messages.emplace_back();
  chat(1).messages[1].role = "system";
  chat(1).messages[1].tools = tools;
  chat(2).messages[0].name = text;
  chat(3).messages.emplace_back();
  chat(3).messages[1].role = "assistant";
  chat(3).messages[1].tool_calls.emplace_back();
  chat(3).messages[1].tool_calls[0].name = "f";
  chat(3).messages[1].tool_calls[0].arguments = JsonValue::Object();
  chat(3).messages[1].tool_calls[0].arguments->Set("x", JsonValue::String(text));
  long_ones[4].constraint.kind = RequestedConstraint::Kind::kJsonSchema;
  long_ones[4].constraint.text = R"({"description":")" + text + "\"}";
  chat(5).messages[0].reasoning_content = text;
  for (size_t i = 0; i < long_ones.size(); ++i) EXPECT_TRUE(runs_elsewhere(long_ones[i])) << i;
}

TEST_F(GenerationServiceTest, LongPromptsThatWaitAreLimitedInNumberAndBytes) {
  const std::string text(1 << 20, 'a');
  for (const bool by_bytes : {false, true}) {
    MockService::Options options;
    options.service.text_threads = 0;  // whatever is posted waits
    (by_bytes ? options.service.max_queued_bytes : options.service.max_queued_prompts) = by_bytes ? 2 * text.size() : 2;
    MockService service(options);
    int waiting = 0, refused = 0;
    for (int i = 0; i < 5; ++i) {
      bool told = false;
      service.generation.Tokenize("", text, false, [&](const auto& ids) {
        told = true;
        EXPECT_EQ(ids.status().code(), absl::StatusCode::kResourceExhausted);
        EXPECT_EQ(DetailsOf(ids.status()).reason, "queue_full");
      });
      (told ? refused : waiting) += 1;
    }
    EXPECT_EQ(waiting, 2) << by_bytes;
    EXPECT_EQ(refused, 3) << by_bytes;
  }
  // One that is longer than all that may wait is taken by an idle server, and what is done makes room.
  MockService::Options options;
  options.service.max_queued_bytes = 1000;
  MockService service(options);
  for (int i = 0; i < 3; ++i) {
    std::promise<absl::Status> done;
    service.generation.Tokenize("", text, false, [&](const auto& ids) { done.set_value(ids.status()); });
    const absl::Status status = done.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
    for (int wait = 0; wait < 1000 && service.generation.queued_bytes() > 0; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(service.generation.queued_bytes(), 0u);
  }
}

TEST_F(GenerationServiceTest, DeadlinesAreCheckedBeforeWork) {
  MockService service({});
  GenerationRequest request = Chat("x");
  request.deadline = Clock::now() - std::chrono::milliseconds(1);
  EXPECT_EQ(Start(service, request).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(service.engine.Load().steps, 0u);
}

TEST_F(GenerationServiceTest, RequestTimeoutBoundsEveryRequest) {
  MockService::Options options;
  options.engine.step_time = std::chrono::milliseconds(1);
  options.engine.script = [](const Request&, int32_t, int32_t) { return 100; };
  options.service.request_timeout = std::chrono::milliseconds(50);
  MockService service(options);
  auto stream = Start(service, Tokens(3));
  ASSERT_TRUE(stream.ok());
  const auto events = Finish(**stream);
  const auto& finished = std::get<FinishedEvent>(events.back());
  EXPECT_EQ(finished.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_GT(finished.usage.completion_tokens, 0);
}

TEST_F(GenerationServiceTest, AFullQueueTellsWhenToRetry) {
  MockService::Options options;
  options.engine.manual = true;
  options.engine.limits.max_queue = 2;
  MockService service(options);
  auto first = Start(service, Tokens(3));
  auto second = Start(service, Tokens(3));
  const absl::Status status = Start(service, Tokens(3)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const ErrorDetails details = DetailsOf(status);
  EXPECT_EQ(details.reason, "queue_full");
  EXPECT_FALSE(details.quotas.empty());
  EXPECT_TRUE(details.retry_after.has_value());
}

TEST_F(GenerationServiceTest, LoadingAndDrainingRefuse) {
  MockService::Options options;
  options.loaded = false;
  MockService service(options);
  EXPECT_EQ(DetailsOf(Start(service, Chat("x")).status()).reason, "loading");
  service.Install();
  EXPECT_TRUE(Start(service, Tokens(1)).ok());
  service.health.StartDrain(Clock::duration::zero());
  EXPECT_EQ(DetailsOf(Start(service, Chat("x")).status()).reason, "draining");
}

TEST_F(GenerationServiceTest, AbortAllEndsEveryStreamWithItsStatus) {
  MockService::Options options;
  options.engine.manual = true;
  MockService service(options);
  auto stream = Start(service, Tokens(3));
  service.engine.Step();
  EXPECT_EQ(service.generation.active(), 1u);
  service.generation.AbortAll(absl::UnavailableError("bye"));
  const auto events = Finish(**stream);
  EXPECT_EQ(std::get<FinishedEvent>(events.back()).status, absl::UnavailableError("bye"));
  EXPECT_EQ(service.generation.active(), 0u);
  service.engine.Step();
  EXPECT_EQ(service.engine.Load().running, 0);
}

TEST_F(GenerationServiceTest, AClientThatIsGoneStartsNothing) {
  MockService service({});
  std::promise<absl::Status> done;
  service.generation.Start(Chat("x"), std::make_shared<std::atomic<bool>>(true),
                           [&](auto stream) { done.set_value(stream.status()); });
  EXPECT_EQ(done.get_future().get().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(service.generation.active(), 0u);
}

TEST_F(GenerationServiceTest, DetokenizesWithAndWithoutControlTokens) {
  MockService service({});
  std::vector<uint32_t> ids;
  for (const int32_t id : MockService::Encode("ab")) ids.push_back(static_cast<uint32_t>(id));
  ids.push_back(static_cast<uint32_t>(MockService::eos()));
  EXPECT_EQ(*service.generation.Detokenize("", ids, false), "ab<|end_of_msg|>");
  EXPECT_EQ(*service.generation.Detokenize("", ids, true), "ab");
  EXPECT_EQ(FieldOf(service.generation.Detokenize("", {4096}, false).status()), "token_ids[0]");
}

TEST_F(GenerationServiceTest, OneKeyCannotTakeAllStreams) {
  MockService::Options options;
  options.engine.manual = true;
  options.service.max_streams_per_key = 2;
  MockService service(options);
  const auto start = [&](uint64_t caller) {
    GenerationRequest request = Tokens(3);
    request.stopping.max_new_tokens = 1;
    request.caller = caller;
    return Start(service, std::move(request));
  };
  auto first = start(7);
  auto second = start(7);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status refused = start(7).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(refused).reason, "too_many_streams");
  EXPECT_TRUE(DetailsOf(refused).retry_after.has_value());
  auto other = start(8);
  EXPECT_TRUE(other.ok());
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(start(0).ok()) << "without keys there is nobody to count for";
  for (int i = 0; i < 3; ++i) service.engine.Step();
  Finish(**first);
  EXPECT_TRUE(start(7).ok());
  EXPECT_FALSE(start(7).ok());
}

TEST_F(GenerationServiceTest, NobodyWaitsLongerThanTheQueueTimeout) {
  MockService::Options options;
  options.engine.manual = true;
  options.engine.limits.max_num_seqs = 1;
  options.service.queue_timeout = std::chrono::milliseconds(50);
  MockService service(options);
  auto running = Start(service, Tokens(3));
  auto waiting = Start(service, Tokens(3));
  ASSERT_TRUE(running.ok() && waiting.ok());
  service.engine.Step();
  service.generation.EndOverdue();
  EXPECT_FALSE((*waiting)->HasLeftQueue());
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  service.generation.EndOverdue();
  const FinishedEvent end = std::get<FinishedEvent>(Finish(**waiting).back());
  EXPECT_EQ(end.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailsOf(end.status).reason, "queue_timeout");
  (*running)->Drain();
  for (StreamEvent event; (*running)->Next(&event);) EXPECT_FALSE(std::holds_alternative<FinishedEvent>(event));
  service.engine.Step();
  EXPECT_EQ(service.engine.Load().waiting, 0);
  EXPECT_EQ(service.engine.Load().running, 1);
}

// Whoever looks for overdue requests may be the last to hold one whose client left.
TEST_F(GenerationServiceTest, StreamsMayEndWhileTheOverdueAreSought) {
  MockService::Options options;
  options.service.queue_timeout = std::chrono::microseconds(1);
  MockService service(options);
  std::atomic<bool> stop{false};
  std::thread seeker([&] {
    while (!stop) service.generation.EndOverdue();
  });
  for (int round = 0; round < 300; ++round) {
    std::vector<std::shared_ptr<ResponseStream>> streams;
    for (int i = 0; i < 32; ++i) {
      auto stream = Start(service, Tokens(1));
      if (stream.ok()) streams.push_back(*std::move(stream));
    }
    for (const auto& stream : streams) stream->Cancel();
    while (service.engine.Load().running + service.engine.Load().waiting > 0) std::this_thread::yield();
    streams.clear();
  }
  stop = true;
  seeker.join();
  EXPECT_EQ(service.generation.active(), 0u);
}

}  // namespace
}  // namespace k3
