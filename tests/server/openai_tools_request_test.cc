#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/server/openai_request_fixture.h"

namespace k3 {
namespace {

using testing::ChatBody;
using testing::Json;
using testing::kChat;
using testing::OpenAiReply;
using testing::OpenAiServer;

TEST_F(OpenAiRequestTest, Tools) {
  const auto tool = [](const std::string& name) {
    return Json({{"type", "function"}, {"function", {{"name", name}}}});
  };
  const auto with = [&](const Json& tools) { return ChatBody({{"tools", tools}}); };
  Accepted(with(Json::array({tool("f"), tool("g-1_X")})));
  Accepted(with(Json::array()));
  const std::pair<Json, const char*> bad[] = {
      {Json::array({nullptr}), "tools[0]"},
      {Json::array({5}), "tools[0]"},
      {Json::array({Json::object()}), "tools[0].type"},
      {Json::array({{{"type", "web_search"}}}), "tools[0].type"},
      {Json::array({{{"type", "function"}}}), "tools[0].function"},
      {Json::array({{{"type", "function"}, {"function", 5}}}), "tools[0].function"},
      {Json::array({{{"type", "function"}, {"function", Json::object()}}}), "tools[0].function.name"},
      {Json::array({tool("")}), "tools[0].function.name"},
      {Json::array({tool("a b")}), "tools[0].function.name"},
      {Json::array({tool("naïve")}), "tools[0].function.name"},
      {Json::array({tool(std::string(65, 'f'))}), "tools[0].function.name"},
      {Json::array({tool("f"), tool("f")}), "tools[1].function.name"},
      {Json::parse(R"([{"type":"function","function":{"name":"f","description":5}}])"),
       "tools[0].function.description"},
      {Json::parse(R"([{"type":"function","function":{"name":"f","parameters":[]}}])"), "tools[0].function.parameters"},
      {Json::parse(R"([{"type":"function","function":{"name":"f","parameters":{"type":"string"}}}])"),
       "tools[0].function.parameters.type"},
      {Json::parse(R"([{"type":"function","function":{"name":"f","strict":"yes"}}])"), "tools[0].function.strict"},
  };
  for (const auto& [tools, param] : bad) {
    Refused(with(tools), param);
    // The same in a system message.
    Json body = ChatBody();
    body["messages"].push_back({{"role", "system"}, {"tools", tools}});
    Refused(body, "messages[1]." + std::string(param));
  }
  Json twice = with(Json::array({tool("f")}));
  twice["messages"].push_back({{"role", "system"}, {"tools", Json::array({tool("f")})}});
  Refused(twice, "messages[1].tools[0].function.name");
  Json by_user = ChatBody();
  by_user["messages"].push_back({{"role", "user"}, {"content", "x"}, {"tools", Json::array({tool("f")})}});
  Refused(by_user, "messages[1].tools");
}

TEST_F(OpenAiRequestTest, ToolChoice) {
  const Json tools = Json::parse(R"([{"type":"function","function":{"name":"f"}}])");
  const auto choose = [&](const Json& choice, bool with_tools = true) {
    Json body = ChatBody({{"tool_choice", choice}});
    if (with_tools) body["tools"] = tools;
    return body;
  };
  const Json named = Json::parse(R"({"type":"function","function":{"name":"f"}})");
  for (const Json& choice : {Json("auto"), Json("none"), Json("required")}) Accepted(choose(choice));
  Accepted(choose(named));
  Accepted(choose("auto", false));
  Accepted(choose("none", false));
  Refused(choose("required", false), "tool_choice");
  Refused(choose(named, false), "tool_choice");
  for (const Json& choice :
       {Json("bogus"), Json(5), Json(true), Json::array(), Json::object(), Json::parse(R"({"type":"function"})"),
        Json::parse(R"({"type":"function","function":{"name":5}})"),
        Json::parse(R"({"type":"function","function":{"name":"g"}})"), Json::parse(R"({"type":"allowed_tools"})")}) {
    Refused(choose(choice), "tool_choice");
  }
  // A call can be required of tools that join later, too.
  Json later = ChatBody({{"tool_choice", "required"}});
  later["messages"].push_back({{"role", "system"}, {"tools", tools}});
  Accepted(later);
}

TEST_F(OpenAiRequestTest, StructuredOutputTakesOneWayAndNamesWhatIsWrong) {
  for (
      const char* members :
      {R"({"response_format":{"type":"json_object"}})",
       R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},"strict":true}}})",
       R"({"response_format":{"type":"regex","pattern":"a+"}})", R"({"guided_json":{"type":"object"}})",
       R"({"guided_json":"{\"type\":\"object\"}"})", R"({"guided_choice":["a","b"]})",
       R"({"guided_grammar":"root ::= \"a\""})", R"({"structured_outputs":{"regex":"a"}})",
       R"({"structured_outputs":null,"guided_regex":null})"}) {
    Accepted(ChatBody(Json::parse(members)));
  }
  const std::pair<const char*, const char*> wrong[] = {
      {R"({"guided_regex":"a","guided_choice":["a"]})", "guided_choice"},
      {R"({"response_format":{"type":"json_object"},"structured_outputs":{"regex":"a"}})", "structured_outputs.regex"},
      {R"({"guided_json":5})", "guided_json"},
      {R"({"guided_json":{"type":"thing"}})", "guided_json.type"},
      {R"({"guided_json":{"type":"object","properties":{"a":{"$ref":"#/nowhere"}}}})", "guided_json.properties.a.$ref"},
      {R"({"guided_choice":[]})", "guided_choice"},
      {R"({"guided_choice":[1]})", "guided_choice"},
      {R"({"guided_regex":"a{9999999}"})", "guided_regex"},
      {R"({"structured_outputs":{"json":{"minItems":-1}}})", "structured_outputs.json.minItems"},
      {R"({"structured_outputs":{"choice":"x"}})", "structured_outputs.choice"},
      {R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"not":{}}}}})",
       "response_format.json_schema.schema.not"},
      {R"({"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","properties":
           {"a":{"not":{}}}}}}]})",
       "tools[0].function.parameters.properties.a.not"},
  };
  for (const auto& [members, param] : wrong) Refused(ChatBody(Json::parse(members)), param);
  Accepted(ChatBody(Json::parse(
      R"({"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":false,"schema":{"not":{}}}}})")));
}

TEST(OpenAiNoGrammarTest, StructuredOutputIsRefusedButRendered) {
  OpenAiServer::Options options;
  options.grammars = false;
  OpenAiServer server(options);
  server.Force({100});
  const auto refused = [&](const Json& members, const std::string& param) {
    const OpenAiReply reply = server.Post(kChat, ChatBody(members));
    EXPECT_EQ(reply.status, 400) << members;
    EXPECT_EQ(reply.Param(), param) << reply.raw.body;
    EXPECT_EQ(reply.Code(), "unsupported_parameter") << reply.raw.body;
  };
  const Json formats[] = {
      Json::parse(R"({"type":"json_object"})"),
      Json::parse(R"({"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"}}})"),
      Json::parse(R"({"type":"regex","pattern":"a+"})"), Json::parse(R"({"type":"ebnf","grammar":"root ::= \"a\""})")};
  const char* const params[] = {"response_format", "response_format.json_schema.schema", "response_format.pattern",
                                "response_format.grammar"};
  for (size_t i = 0; i < 4; ++i) refused({{"response_format", formats[i]}}, params[i]);
  for (const char* key : {"guided_regex", "guided_grammar"}) refused({{key, "a"}}, key);
  refused({{"guided_json", Json::object()}}, "guided_json");
  refused({{"guided_choice", {"a", "b"}}}, "guided_choice");
  refused({{"structured_outputs", {{"regex", "a"}}}}, "structured_outputs.regex");
  const Json tool = Json::parse(R"({"type":"function","function":{"name":"f"}})");
  refused({{"tools", Json::array({tool})}, {"tool_choice", "required"}}, "tool_choice");
  refused(
      {{"tools", Json::array({tool})}, {"tool_choice", Json::parse(R"({"type":"function","function":{"name":"f"}})")}},
      "tool_choice");
  const Json strict = Json::parse(R"({"type":"function","function":{"name":"f","strict":true}})");
  refused({{"tools", Json::array({strict})}}, "tools");
  EXPECT_EQ(server.Post(kChat, ChatBody({{"tools", Json::array({tool})}, {"tool_choice", "none"}})).status, 200);
  EXPECT_EQ(server.Post(kChat, ChatBody({{"response_format", {{"type", "text"}}}})).status, 200);
  const Json plain = server.Post("/render", ChatBody()).body["token_ids"];
  const Json object = server.Post("/render", ChatBody({{"response_format", formats[0]}})).body["token_ids"];
  const Json schema = server.Post("/render", ChatBody({{"response_format", formats[1]}})).body["token_ids"];
  EXPECT_GT(object.size(), plain.size());
  EXPECT_GT(schema.size(), plain.size());
}

TEST(OpenAiStrictRequestTest, Tools) {
  OpenAiServer::Options options;
  options.vendor_strict = true;
  OpenAiServer server(options);
  server.Force({100});
  const auto param = [&](const std::string& messages, const std::string& tools = "[]") {
    return server.Post(kChat, {{"messages", Json::parse(messages)}, {"tools", Json::parse(tools)}}).Param();
  };
  const std::string tool = R"({"type":"function","function":{"name":"f"}})";
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"system","content":"x","tools":[)" + tool + "]}]"),
            "messages[1].content");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"system","content":"","tools":[)" + tool + "]}]"), "?");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"},{"role":"tool","content":"x"}])"), "messages[1].tool_call_id");
  EXPECT_EQ(param(R"([{"role":"user","content":"a"}])", R"([{"type":"function","function":{"name":"1f"}}])"),
            "tools[0].function.name");
  for (const char* format : {R"({"type":"json_schema"})", R"({"type":"json_schema","json_schema":{"schema":{}}})",
                             R"({"type":"json_schema","json_schema":{"name":"n"}})",
                             R"({"type":"json_schema","json_schema":{"name":"n","schema":{},"strict":1}})"}) {
    const OpenAiReply reply = server.Post(kChat, ChatBody({{"response_format", Json::parse(format)}}));
    EXPECT_EQ(reply.status, 400);
    EXPECT_TRUE(reply.Param().starts_with("response_format")) << reply.raw.body;
    EXPECT_NE(reply.Code(), "unsupported_parameter");
  }
}

}  // namespace
}  // namespace k3
