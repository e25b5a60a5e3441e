#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/testing/openai_server.h"

namespace k3 {

// Requests that a server refuses or takes; whatever was sent, it is healthy and idle afterwards.
class OpenAiRequestTest : public ::testing::Test {
 protected:
  OpenAiRequestTest() { server_.ForceText("a⟨/think⟩⟨response⟩b⟨/response⟩⟨/message⟩"); }
  ~OpenAiRequestTest() override {
    EXPECT_EQ(server_.Post(testing::kChat, testing::ChatBody()).status, 200) << "still healthy";
    EXPECT_TRUE(server_.NothingLeaked());
  }

  // A 400 with this param, whole and streamed; the stream's refusal is plain JSON.
  void Refused(const testing::Json& body, const std::string& param, const std::string& code = "",
               const char* path = testing::kChat) {
    const std::string text = body.dump().substr(0, 300);
    const testing::OpenAiReply reply = server_.Post(path, body);
    EXPECT_EQ(reply.status, 400) << text << " -> " << reply.raw.body;
    EXPECT_EQ(reply.Param(), param) << text << " -> " << reply.raw.body;
    EXPECT_EQ(reply.Code(), code) << text;
    if (!reply.body.contains("error")) return;
    EXPECT_EQ(reply.body["error"]["type"], "invalid_request_error");
    EXPECT_FALSE(reply.body["error"]["message"].get<std::string>().empty());
    EXPECT_EQ(reply.body["error"].size(), 4u);
    EXPECT_LE(reply.raw.body.size(), 4096u);
    const testing::OpenAiStream stream = server_.Stream(path, body);
    EXPECT_EQ(stream.problem, "");
    EXPECT_EQ(stream.status, 400) << text;
    EXPECT_EQ(stream.error, reply.body);
  }
  void Accepted(const testing::Json& body, const char* path = testing::kChat) {
    const testing::OpenAiReply reply = server_.Post(path, body);
    EXPECT_EQ(reply.status, 200) << body.dump().substr(0, 300) << " -> " << reply.raw.body;
  }

  testing::OpenAiServer server_;
};

}  // namespace k3
