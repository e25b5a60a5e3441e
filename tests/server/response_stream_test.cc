#include "server/response_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/mock_server.h"

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MockService;

// An engine that only remembers what it was told.
class RecordingEngine : public EngineInterface {
 public:
  absl::StatusOr<RequestId> Submit(std::unique_ptr<Request>) override { return 1; }
  void Cancel(RequestId id) override { cancelled.push_back(id); }
  void StopChoice(RequestId id, int32_t choice) override { stopped.emplace_back(id, choice); }
  EngineLimits Limits() const override { return {}; }
  EngineLoad Load() const override { return {}; }
  void FlushCache() override {}
  void StopAdmission() override {}

  std::vector<RequestId> cancelled;
  std::vector<std::pair<RequestId, int32_t>> stopped;
};

struct StreamSetup {
  std::vector<std::string> stops = {};
  int choices = 1;
  bool token_ids = false;
  int top_logprobs = -1;
  int coalesce = 0;
  ChatFormat format = ChatFormat::kNone;
  OpenChannel open_channel = OpenChannel::kNone;
  bool parallel_tool_calls = true;
};

class ResponseStreamTest : public ::testing::Test {
 protected:
  std::shared_ptr<ResponseStream> Make(const StreamSetup& setup) {
    ResponseStream::Options options;
    options.accepted.request_id = "r";
    options.accepted.model = "m";
    options.accepted.prompt_tokens = 5;
    options.accepted.effective.num_choices = setup.choices;
    options.accepted.effective.params.top_logprobs = setup.top_logprobs;
    options.eos_token_ids = {MockService::eos()};
    options.prompt_tokens = {1, 2, 3, 4, 5};
    options.token_ids = setup.token_ids;
    options.coalesce_tokens = setup.coalesce;
    options.drain_eagerly = !setup.stops.empty();
    ChoiceReader::Options reader;
    reader.tokenizer = MockService::tokenizer();
    reader.format = setup.format;
    reader.open_channel = setup.open_channel;
    reader.stop_strings = setup.stops;
    reader.parallel_tool_calls = setup.parallel_tool_calls;
    for (int i = 0; i < setup.choices; ++i) options.readers.push_back(std::make_unique<ChoiceReader>(reader));
    auto stream = std::make_shared<ResponseStream>(&engine_, std::move(options));
    stream->SetAccepted(7, nullptr);
    return stream;
  }

  static void Feed(ResponseStream& stream, const std::string& bytes, int choice = 0) {
    for (const int32_t id : MockService::Encode(bytes)) stream.OnToken(choice, id, nullptr);
  }
  // Tokens of single bytes, so that characters are split.
  static void FeedBytes(ResponseStream& stream, const std::string& bytes) {
    for (const char byte : bytes) stream.OnToken(0, MockService::TokenOf(std::string(1, byte)), nullptr);
  }
  static void Control(ResponseStream& stream, const std::string& markup) {
    const std::vector<int32_t> ids = *MockService::tokenizer()->Encode(markup, EncodeMode::kControl);
    for (const int32_t id : ids) stream.OnToken(0, id, nullptr);
  }

  static std::vector<StreamEvent> Take(ResponseStream& stream) {
    stream.Drain();
    std::vector<StreamEvent> events;
    StreamEvent event;
    while (stream.Next(&event)) events.push_back(std::move(event));
    return events;
  }
  static std::string Text(const std::vector<StreamEvent>& events, OutputChannel channel = OutputChannel::kContent) {
    std::string text;
    for (const StreamEvent& event : events) {
      const auto* delta = std::get_if<DeltaEvent>(&event);
      if (delta != nullptr && delta->channel == channel) text += delta->text;
    }
    return text;
  }
  template <class Event>
  static const Event* Find(const std::vector<StreamEvent>& events) {
    for (const StreamEvent& event : events) {
      if (const auto* found = std::get_if<Event>(&event)) return found;
    }
    return nullptr;
  }

  RecordingEngine engine_;
};

TEST_F(ResponseStreamTest, EventsComeInOrderAndAdjacentTextIsMerged) {
  auto stream = Make({});
  stream->OnAdmitted(3);
  stream->OnPrefillProgress(2, 5);
  stream->OnPrefillProgress(4, 5);
  stream->OnPrefillProgress(5, 5);
  Feed(*stream, "grep finds lines");
  stream->OnToken(0, MockService::eos(), nullptr);
  stream->OnChoiceFinished(0, FinishReason::kStop, MockService::eos());
  RequestUsage usage;
  usage.prompt_tokens = 5;
  usage.completion_tokens = 99;
  stream->OnFinished(absl::OkStatus(), usage);
  const auto events = Take(*stream);
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(std::get<AcceptedEvent>(events[0]).cached_tokens, 3);
  EXPECT_EQ(std::get<PrefillEvent>(events[1]).done, 4);
  EXPECT_EQ(std::get<DeltaEvent>(events[2]).text, "grep finds lines");
  const auto& finished = std::get<ChoiceFinishedEvent>(events[3]);
  EXPECT_EQ(finished.reason, StopKind::kStop);
  EXPECT_TRUE(std::holds_alternative<MatchedEos>(finished.matched));
  const int32_t tokens = static_cast<int32_t>(MockService::Encode("grep finds lines").size()) + 1;
  EXPECT_EQ(finished.completion_tokens, tokens);
  EXPECT_EQ(std::get<FinishedEvent>(events[4]).usage.completion_tokens, tokens);
}

TEST_F(ResponseStreamTest, NotifiesOncePerDrain) {
  auto stream = Make({});
  int calls = 0;
  stream->OnAdmitted(0);
  stream->SetNotify([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  Feed(*stream, "several tokens of text");
  EXPECT_EQ(calls, 1);
  stream->Drain();
  Feed(*stream, "more");
  EXPECT_EQ(calls, 2);
}

// B24: the start of a stop string never shows.
TEST_F(ResponseStreamTest, StopStringsAreHeldBackAndStopTheEngine) {
  for (const auto& [pieces, stops, text, matched] :
       std::vector<std::tuple<std::vector<std::string>, std::vector<std::string>, std::string, std::string>>{
           {{"abc", "\nUs", "er", ": x"}, {"\nUser:"}, "abc", "\nUser:"},
           {{"aE", "ND", "X"}, {"END", "NDX"}, "a", "END"},
           {{"fooSTOPbar"}, {"STOP"}, "foo", "STOP"}}) {
    engine_.stopped.clear();
    auto stream = Make({.stops = stops});
    stream->OnAdmitted(0);
    std::vector<StreamEvent> events;
    for (const std::string& piece : pieces) {
      Feed(*stream, piece);
      for (StreamEvent& event : Take(*stream)) events.push_back(std::move(event));
    }
    EXPECT_EQ(Text(events), text);
    const auto* finished = Find<ChoiceFinishedEvent>(events);
    ASSERT_NE(finished, nullptr);
    EXPECT_EQ(finished->reason, StopKind::kStop);
    EXPECT_EQ(std::get<MatchedString>(finished->matched).text, matched);
    EXPECT_THAT(engine_.stopped, ElementsAre(std::pair<RequestId, int32_t>(7, 0)));
    // The engine's own end, and tokens that it made before it heard, change nothing.
    Feed(*stream, "late");
    stream->OnChoiceFinished(0, FinishReason::kStop, -1);
    stream->OnFinished(absl::OkStatus(), {});
    const auto rest = Take(*stream);
    ASSERT_EQ(rest.size(), 1u);
    EXPECT_EQ(std::get<FinishedEvent>(rest[0]).usage.completion_tokens, finished->completion_tokens);
  }
}

TEST_F(ResponseStreamTest, ASplitEmojiCanBeAStopString) {
  auto stream = Make({.stops = {"\xF0\x9F\x98\x80"}});
  stream->OnAdmitted(0);
  FeedBytes(*stream,
            "ab\xF0\x9F\x98\x80"
            "cd");
  const auto events = Take(*stream);
  EXPECT_EQ(Text(events), "ab");
  EXPECT_NE(Find<ChoiceFinishedEvent>(events), nullptr);
}

TEST_F(ResponseStreamTest, HeldTextIsShownWhenNoStopComes) {
  auto stream = Make({.stops = {"\nUser:"}});
  stream->OnAdmitted(0);
  Feed(*stream, "abc\nUs");
  EXPECT_EQ(Text(Take(*stream)), "abc");
  stream->OnChoiceFinished(0, FinishReason::kLength, -1);
  EXPECT_EQ(Text(Take(*stream)), "\nUs");
}

// B22: split characters appear whole, and the joined stream does not depend on when it was drained.
TEST_F(ResponseStreamTest, SplitCharactersAppearWhole) {
  auto stream = Make({});
  stream->OnAdmitted(0);
  Take(*stream);
  for (const char byte : std::string("\xF0\x9F\x98")) {
    stream->OnToken(0, MockService::TokenOf(std::string(1, byte)), nullptr);
    EXPECT_EQ(Text(Take(*stream)), "");
  }
  stream->OnToken(0, MockService::TokenOf("\x80"), nullptr);
  EXPECT_EQ(Text(Take(*stream)), "\xF0\x9F\x98\x80");
  FeedBytes(*stream, "\xE4\xB8\xAD\xE5\x9B\xBD");
  EXPECT_EQ(Text(Take(*stream)), "\xE4\xB8\xAD\xE5\x9B\xBD");
  FeedBytes(*stream, "\xF0");
  Feed(*stream, " a");
  EXPECT_EQ(Text(Take(*stream)), "\xEF\xBF\xBD a");
}

// B23: a character cut in half goes to `undecoded`.
TEST_F(ResponseStreamTest, HalfACharacterAtTheEndIsUndecoded) {
  auto stream = Make({});
  stream->OnAdmitted(0);
  FeedBytes(*stream, "\xF0\x9F");
  stream->OnChoiceFinished(0, FinishReason::kLength, -1);
  const auto events = Take(*stream);
  EXPECT_EQ(Text(events), "");
  const auto* delta = Find<DeltaEvent>(events);
  ASSERT_NE(delta, nullptr);
  EXPECT_EQ(delta->undecoded, "\xF0\x9F");
  EXPECT_EQ(Find<ChoiceFinishedEvent>(events)->reason, StopKind::kLength);
}

TEST_F(ResponseStreamTest, TokenIdsAndLogprobsCoverEveryToken) {
  auto stream = Make({.token_ids = true, .top_logprobs = 2});
  stream->OnAdmitted(0);
  const TopLogprob top[] = {{11, -0.1f}};
  const TokenLogprob logprob{-0.5f, top};
  stream->OnToken(0, MockService::TokenOf("a"), &logprob);
  stream->OnToken(0, MockService::eos(), &logprob);
  stream->OnChoiceFinished(0, FinishReason::kStop, MockService::eos());
  std::vector<int32_t> ids;
  LogprobRows rows;
  for (const StreamEvent& event : Take(*stream)) {
    const auto* delta = std::get_if<DeltaEvent>(&event);
    if (delta == nullptr) continue;
    ids.insert(ids.end(), delta->token_ids.begin(), delta->token_ids.end());
    rows.logprobs.insert(rows.logprobs.end(), delta->logprobs.logprobs.begin(), delta->logprobs.logprobs.end());
    rows.top.insert(rows.top.end(), delta->logprobs.top.begin(), delta->logprobs.top.end());
  }
  EXPECT_THAT(ids, ElementsAre(MockService::TokenOf("a"), MockService::eos()));
  EXPECT_THAT(rows.logprobs, ElementsAre(-0.5f, -0.5f));
  ASSERT_EQ(rows.top.size(), 4u);
  EXPECT_EQ(rows.top[0].token, 11);
  EXPECT_EQ(rows.top[1].token, -1);
}

TEST_F(ResponseStreamTest, PromptLogprobsNameTheirTokens) {
  auto stream = Make({.top_logprobs = 0});
  stream->OnAdmitted(0);
  for (int i = 1; i < 5; ++i) stream->OnPromptLogprob(i, TokenLogprob{-1.0f * static_cast<float>(i), {}});
  const auto events = Take(*stream);
  const auto* prompt = Find<PromptLogprobsEvent>(events);
  ASSERT_NE(prompt, nullptr);
  EXPECT_THAT(prompt->rows.token_ids, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(prompt->rows.logprobs, ElementsAre(-1, -2, -3, -4));
}

// Each event is one gRPC message, of which clients take 4 MiB.
TEST_F(ResponseStreamTest, WhatWaitsIsMergedUpToASize) {
  constexpr size_t kTop = 20, kTokens = 10'000;
  auto stream = Make({.top_logprobs = kTop});
  const std::vector<TopLogprob> top(kTop, TopLogprob{100, -1});
  for (size_t i = 0; i < kTokens; ++i) stream->OnPromptLogprob(1, TokenLogprob{-1, top});
  for (size_t i = 0; i < kTokens; ++i) {
    const TokenLogprob logprob{-2, top};
    stream->OnToken(0, 100, &logprob);
  }
  size_t prompt = 0, generated = 0, most = 0, events = 0;
  for (const StreamEvent& event : Take(*stream)) {
    const auto* rows = std::get_if<PromptLogprobsEvent>(&event);
    const auto* delta = std::get_if<DeltaEvent>(&event);
    const LogprobRows& taken = rows != nullptr ? rows->rows : delta->logprobs;
    (rows != nullptr ? prompt : generated) += taken.logprobs.size();
    EXPECT_EQ(taken.top.size(), kTop * taken.logprobs.size());
    most = std::max(most, taken.logprobs.size() + taken.top.size());
    ++events;
  }
  EXPECT_EQ(prompt, kTokens);
  EXPECT_EQ(generated, kTokens);
  EXPECT_LE(most, 70'000u);
  EXPECT_LE(events, 10u) << "still merged";
}

TEST_F(ResponseStreamTest, ReasoningContentAndToolCallsOfK3) {
  auto stream = Make({.format = ChatFormat::kXtml, .open_channel = OpenChannel::kReasoning});
  stream->OnAdmitted(0);
  Feed(*stream, "hm");
  Control(*stream, "<|close|>think<|sep|><|open|>response<|sep|>");
  Feed(*stream, "yes");
  Control(*stream, "<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|>");
  Control(*stream, "<|open|>argument key=\"x\" type=\"string\"<|sep|>");
  Feed(*stream, "v");
  Control(*stream, "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>");
  stream->OnToken(0, MockService::eos(), nullptr);
  stream->OnChoiceFinished(0, FinishReason::kStop, MockService::eos());
  stream->OnFinished(absl::OkStatus(), {});
  const auto events = Take(*stream);
  EXPECT_EQ(Text(events, OutputChannel::kReasoning), "hm");
  EXPECT_EQ(Text(events), "yes");
  std::string arguments;
  int names = 0;
  for (const StreamEvent& event : events) {
    if (const auto* call = std::get_if<ToolCallEvent>(&event)) {
      arguments += call->arguments;
      names += call->name == "f" ? 1 : 0;
    }
  }
  EXPECT_EQ(names, 1);
  EXPECT_THAT(arguments, HasSubstr("\"v\""));
  EXPECT_EQ(Find<ChoiceFinishedEvent>(events)->reason, StopKind::kToolCalls);
  EXPECT_GT(Find<FinishedEvent>(events)->reasoning_tokens, 0);
}

TEST_F(ResponseStreamTest, ChoicesAreMergedEachForItself) {
  auto stream = Make({.choices = 2});
  stream->OnAdmitted(0);
  for (int i = 0; i < 10; ++i) {
    Feed(*stream, "x", 0);
    Feed(*stream, "y", 1);
  }
  const auto events = Take(*stream);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(std::get<DeltaEvent>(events[1]).text, "xxxxxxxxxx");
  EXPECT_EQ(std::get<DeltaEvent>(events[2]).text, "yyyyyyyyyy");
}

TEST_F(ResponseStreamTest, CoalescingWaitsForEnoughTokensOrTheEnd) {
  auto stream = Make({.coalesce = 4});
  stream->OnAdmitted(0);
  for (int i = 0; i < 3; ++i) Feed(*stream, "x");
  EXPECT_EQ(Take(*stream).size(), 1u);  // accepted
  Feed(*stream, "x");
  EXPECT_EQ(Text(Take(*stream)), "xxxx");
  Feed(*stream, "x");
  EXPECT_TRUE(Take(*stream).empty());
  stream->OnChoiceFinished(0, FinishReason::kLength, -1);
  EXPECT_EQ(Text(Take(*stream)), "x");
}

TEST_F(ResponseStreamTest, CancelBeforeTheEngineIdIsKnownIsKept) {
  ResponseStream::Options options;
  options.accepted.effective.num_choices = 0;
  auto stream = std::make_shared<ResponseStream>(&engine_, std::move(options));
  stream->Cancel();
  EXPECT_TRUE(engine_.cancelled.empty());
  stream->SetAccepted(9, nullptr);
  EXPECT_THAT(engine_.cancelled, ElementsAre(9u));
}

TEST_F(ResponseStreamTest, AbortIsFinalAtOnceAndCancelsTheEngine) {
  auto stream = Make({});
  stream->OnAdmitted(0);
  stream->Abort(absl::UnavailableError("shutting down"));
  Feed(*stream, "late");
  stream->OnFinished(absl::CancelledError(""), {});
  const auto events = Take(*stream);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(std::get<FinishedEvent>(events[1]).status, absl::UnavailableError("shutting down"));
  EXPECT_THAT(engine_.cancelled, ElementsAre(7u));
}

}  // namespace
}  // namespace k3
