#include "server/commands/verify_server.h"

#include <chrono>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "server/exit_codes.h"

namespace k3 {
namespace {

using Json = nlohmann::json;

constexpr std::chrono::seconds kTimeout(60);

// One call and what its answer must look like. All checks of a kind read alike below.
class HttpContract {
 public:
  explicit HttpContract(const HttpCaller& http) : http_(http) {}

  absl::StatusOr<Json> Get(const std::string& path, int status = 200) const { return Read("GET", path, "", status); }
  absl::StatusOr<Json> Post(const std::string& path, const Json& body, int status = 200) const {
    return Read("POST", path, body.dump(), status);
  }

  absl::StatusOr<Json> Read(const std::string& method, const std::string& path, const std::string& body,
                            int status) const {
    const absl::StatusOr<HttpAnswer> answer = http_.Call(method, path, body);
    if (!answer.ok()) return answer.status();
    if (answer->status != status) {
      return absl::InternalError(absl::StrCat(method, " ", path, " answers ", answer->status, ", not ", status, ": ",
                                              answer->body.substr(0, 300)));
    }
    Json json = Json::parse(answer->body, nullptr, false);
    if (json.is_discarded()) return absl::InternalError(absl::StrCat(method, " ", path, ": the answer is no JSON"));
    return json;
  }

  // An error body of the whole shape, with this status; an empty code or param is not compared.
  absl::Status Refuses(const std::string& method, const std::string& path, const std::string& body, int status,
                       const std::string& code = "", const std::string& param = "") const {
    const absl::StatusOr<Json> json = Read(method, path, body, status);
    if (!json.ok()) return json.status();
    const Json& error = json->at("error");
    absl::Status result =
        AllOf({ExpectTrue(error.at("message").is_string(), "error.message is no string"),
               ExpectTrue(error.at("type").is_string(), "error.type is no string"),
               ExpectTrue(error.contains("param") && error.contains("code"), "param or code is missing")});
    if (result.ok() && !code.empty()) result = Expect("error.code", error.at("code"), code);
    if (result.ok() && !param.empty()) result = Expect("error.param", error.at("param"), param);
    return result;
  }
  absl::Status RefusesBody(const std::string& path, const Json& body, const std::string& param = "",
                           const std::string& code = "") const {
    return Refuses("POST", path, body.dump(), 400, code, param);
  }

  // The data of each event of a stream, "[DONE]" included.
  absl::StatusOr<std::vector<std::string>> Events(const std::string& path, const Json& body) const {
    const absl::StatusOr<HttpAnswer> answer = http_.Call("POST", path, body.dump());
    if (!answer.ok()) return answer.status();
    if (answer->status != 200) return absl::InternalError(absl::StrCat("answers ", answer->status, ": ", answer->body));
    if (answer->Header("content-type") != "text/event-stream") {
      return absl::InternalError(absl::StrCat("content type is ", std::string(answer->Header("content-type"))));
    }
    std::vector<std::string> events;
    std::string_view rest = answer->body;
    while (!rest.empty()) {
      const size_t end = rest.find("\n\n");
      if (end == std::string_view::npos) return absl::InternalError("the last event is cut off");
      const std::string_view event = rest.substr(0, end);
      rest.remove_prefix(end + 2);
      if (event.starts_with(":")) continue;
      if (!event.starts_with("data: ") || event.find('\n') != std::string_view::npos) {
        return absl::InternalError(absl::StrCat("an event is not one data line: ", std::string(event.substr(0, 100))));
      }
      events.emplace_back(event.substr(6));
    }
    if (events.empty() || events.back() != "[DONE]") return absl::InternalError("the stream does not end with [DONE]");
    return events;
  }

  const HttpCaller& http() const { return http_; }

 private:
  const HttpCaller& http_;
};

Json ChatBody(Json members = Json::object()) {
  Json body = {
      {"messages", {{{"role", "user"}, {"content", "What is a shell?"}}}}, {"max_tokens", 16}, {"temperature", 0}};
  body.update(members);
  return body;
}

Json CompletionBody(Json members = Json::object()) {
  Json body = {{"prompt", kContractPrompt}, {"max_tokens", 8}, {"temperature", 0}, {"ignore_eos", true}};
  body.update(members);
  return body;
}

absl::Status CheckUsage(const Json& usage) {
  return Expect("usage.total_tokens", usage.at("total_tokens").get<int64_t>(),
                usage.at("prompt_tokens").get<int64_t>() + usage.at("completion_tokens").get<int64_t>());
}

double Gauge(const HttpContract& http, const std::string& name) {
  const absl::StatusOr<HttpAnswer> page = http.http().Call("GET", "/metrics");
  if (!page.ok()) return -1;
  const size_t at = page->body.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(page->body.substr(at + name.size() + 2));
}

void CheckInfoRoutes(const HttpContract& http, ContractReport& report) {
  report.Run("http.health", [&] {
    return AllOf({http.Get("/health/live").status(), http.Get("/health/ready").status(), http.Get("/health").status()});
  });
  report.Run("http.version", [&] {
    const auto json = http.Get("/version");
    return json.ok() ? ExpectTrue(json->at("version").is_string(), "version is no string") : json.status();
  });
  report.Run("http.openapi", [&] {
    const auto json = http.Get("/openapi.json");
    return json.ok() ? ExpectTrue(json->at("paths").contains("/v1/chat/completions"), "the chat route is missing")
                     : json.status();
  });
  report.Run("http.metrics", [&] {
    const auto page = http.http().Call("GET", "/metrics");
    if (!page.ok()) return page.status();
    for (const char* name : {"requests_running", "requests_waiting", "latent_pages_used", "state_slots_used",
                             "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_bucket",
                             "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"}) {
      if (!absl::StrContains(page->body, absl::StrCat("\nk3serve_", name))) {
        return absl::InternalError(absl::StrCat("k3serve_", name, " is missing"));
      }
    }
    return ExpectTrue(absl::StartsWith(std::string(page->Header("content-type")), "text/plain"), "content type");
  });
  report.Run("http.models", [&] {
    const auto list = http.Get("/v1/models");
    if (!list.ok()) return list.status();
    const Json& first = list->at("data").at(0);
    const auto one = http.Get("/v1/models/" + first.at("id").get<std::string>());
    return AllOf({Expect("object", list->at("object"), "list"), Expect("data[0].object", first.at("object"), "model"),
                  ExpectTrue(first.at("max_model_len").get<int64_t>() > 0, "max_model_len is not positive"),
                  one.status(), one.ok() ? Expect("id", one->at("id"), first.at("id")) : absl::OkStatus()});
  });
  report.Run("http.unknown", [&] {
    const absl::StatusOr<HttpAnswer> wrong = http.http().Call("GET", "/v1/chat/completions");
    return AllOf({http.Refuses("GET", "/nowhere", "", 404), http.Refuses("GET", "/v1/chat/completions", "", 405),
                  wrong.ok() ? ExpectTrue(!wrong->Header("allow").empty(), "405 without Allow") : wrong.status(),
                  http.Refuses("GET", "/v1/models/no-such-model", "", 404, "model_not_found"),
                  http.Refuses("POST", "/v1/completions", CompletionBody({{"model", "no-such-model"}}).dump(), 404,
                               "model_not_found"),
                  http.Refuses("POST", "/v1/responses", "{}", 404)});
  });
}

void CheckText(const HttpContract& http, ContractReport& report) {
  report.Run("http.tokenize", [&] {
    const auto ids = http.Post("/tokenize", {{"prompt", kContractPrompt}});
    if (!ids.ok()) return ids.status();
    const auto text = http.Post("/detokenize", {{"tokens", ids->at("token_ids")}});
    return AllOf({Expect("count", ids->at("count").get<size_t>(), ids->at("token_ids").size()), text.status(),
                  text.ok() ? Expect("prompt", text->at("prompt"), kContractPrompt) : absl::OkStatus()});
  });
  report.Run("http.render", [&] {
    const auto rendered = http.Post("/render", ChatBody());
    const auto reply = http.Post("/v1/chat/completions", ChatBody());
    if (!rendered.ok() || !reply.ok()) return AllOf({rendered.status(), reply.status()});
    return Expect("usage.prompt_tokens", reply->at("usage").at("prompt_tokens"), rendered->at("count"));
  });
}

void CheckChat(const HttpContract& http, ContractReport& report) {
  const std::string route = "/v1/chat/completions";
  report.Run("http.chat", [&] {
    const auto reply = http.Post(route, ChatBody());
    if (!reply.ok()) return reply.status();
    const Json& choice = reply->at("choices").at(0);
    return AllOf({Expect("object", reply->at("object"), "chat.completion"),
                  ExpectTrue(absl::StartsWith(reply->at("id").get<std::string>(), "chatcmpl-"), "id"),
                  Expect("role", choice.at("message").at("role"), "assistant"),
                  ExpectTrue(choice.at("finish_reason").is_string(), "finish_reason is no string"),
                  CheckUsage(reply->at("usage"))});
  });
  report.Run("http.chat.stream", [&] {
    const auto whole = http.Post(route, ChatBody());
    const auto events = http.Events(route, ChatBody({{"stream", true}, {"stream_options", {{"include_usage", true}}}}));
    if (!whole.ok() || !events.ok()) return AllOf({whole.status(), events.status()});
    std::string content, reasoning, finish;
    Json usage, id;
    for (size_t i = 0; i + 1 < events->size(); ++i) {
      const Json chunk = Json::parse((*events)[i]);
      if (id.is_null()) id = chunk.at("id");
      if (chunk.at("id") != id || chunk.at("object") != "chat.completion.chunk") {
        return absl::InternalError("id or object changes in the stream");
      }
      if (chunk.contains("usage") && !chunk.at("usage").is_null()) {
        usage = chunk.at("usage");
        if (!chunk.at("choices").empty() || i + 2 != events->size())
          return absl::InternalError("usage is not by itself at the end");
        continue;
      }
      const Json& choice = chunk.at("choices").at(0);
      const Json& delta = choice.at("delta");
      if (i == 0 && delta.value("role", "") != "assistant") return absl::InternalError("the first delta has no role");
      content += delta.value("content", "");
      reasoning += delta.value("reasoning_content", "");
      if (choice.at("finish_reason").is_string()) {
        finish = choice.at("finish_reason");
        if (!delta.empty()) return absl::InternalError("the end chunk's delta is not empty");
      }
    }
    const Json& message = whole->at("choices").at(0).at("message");
    const Json& expected = message.at("content");
    return AllOf(
        {Expect("streamed content", content, expected.is_null() ? std::string() : expected.get<std::string>()),
         Expect("streamed reasoning", reasoning, message.value("reasoning_content", "")),
         Expect("finish_reason", finish, whole->at("choices").at(0).at("finish_reason").get<std::string>()),
         Expect("usage.completion_tokens", usage.at("completion_tokens"), whole->at("usage").at("completion_tokens"))});
  });
  report.Run("http.chat.refusals", [&] {
    const Json tool = {{"type", "function"}, {"function", {{"name", "bad name!"}}}};
    return AllOf({http.RefusesBody(route, ChatBody({{"messages", Json::array()}}), "messages"),
                  http.RefusesBody(route, ChatBody({{"messages", "hi"}}), "messages"),
                  http.RefusesBody(route, ChatBody({{"max_tokens", 0}}), "max_tokens"),
                  http.RefusesBody(route, ChatBody({{"temperature", -1}}), "temperature"),
                  http.RefusesBody(route, ChatBody({{"top_p", 0}}), "top_p"),
                  http.RefusesBody(route, ChatBody({{"n", 0}}), "n"),
                  http.RefusesBody(route, ChatBody({{"stop", std::vector<std::string>(17, "x")}}), "stop"),
                  http.RefusesBody(route, ChatBody({{"tools", {tool}}})),
                  http.RefusesBody(route, ChatBody({{"tool_choice", "required"}}), "tool_choice"),
                  http.RefusesBody(route, ChatBody({{"max_tokens", 1 << 30}}), "max_tokens", "context_length_exceeded"),
                  http.Refuses("POST", route, "{\"messages\": [", 400), http.Refuses("POST", route, "[]", 400),
                  http.Refuses("POST", route, "{\"a\": \"\xff\"}", 400),
                  http.Refuses("POST", route, std::string(2000, '[') + std::string(2000, ']'), 400)});
  });
}

void CheckCompletions(const HttpContract& http, ContractReport& report, std::string* greedy) {
  const std::string route = "/v1/completions";
  report.Run("http.completions.greedy", [&] {
    const auto first = http.Post(route, CompletionBody());
    const auto second = http.Post(route, CompletionBody());
    if (!first.ok() || !second.ok()) return AllOf({first.status(), second.status()});
    const Json& choice = first->at("choices").at(0);
    *greedy = choice.at("text").get<std::string>();
    return AllOf({Expect("object", first->at("object"), "text_completion"),
                  Expect("finish_reason", choice.at("finish_reason"), "length"),
                  Expect("usage.completion_tokens", first->at("usage").at("completion_tokens"), 8),
                  Expect("the second answer", second->at("choices").at(0).at("text"), *greedy),
                  CheckUsage(first->at("usage"))});
  });
  report.Run("http.completions.seed", [&] {
    const Json body = CompletionBody({{"temperature", 1}, {"seed", 7}});
    const auto first = http.Post(route, body);
    const auto second = http.Post(route, body);
    if (!first.ok() || !second.ok()) return AllOf({first.status(), second.status()});
    return Expect("the second answer", second->at("choices").at(0).at("text"), first->at("choices").at(0).at("text"));
  });
  report.Run("http.completions.batch", [&] {
    const auto ids = http.Post("/tokenize", {{"prompt", kContractPrompt}});
    if (!ids.ok()) return ids.status();
    const Json prompts = Json::array({ids->at("token_ids"), ids->at("token_ids")});
    const auto reply = http.Post(route, CompletionBody({{"prompt", prompts}, {"n", 2}}));
    if (!reply.ok()) return reply.status();
    absl::Status status = Expect("number of choices", reply->at("choices").size(), size_t{4});
    for (size_t i = 0; status.ok() && i < 4; ++i) {
      const Json& choice = reply->at("choices").at(i);
      status =
          AllOf({Expect("index", choice.at("index").get<size_t>(), i), Expect("text", choice.at("text"), *greedy)});
    }
    return status;
  });
  report.Run("http.completions.logprobs", [&] {
    const auto reply = http.Post(route, CompletionBody({{"echo", true}, {"logprobs", 2}, {"max_tokens", 1}}));
    if (!reply.ok()) return reply.status();
    const Json& logprobs = reply->at("choices").at(0).at("logprobs");
    const size_t tokens = reply->at("usage").at("total_tokens").get<size_t>();
    absl::Status status =
        AllOf({Expect("tokens", logprobs.at("tokens").size(), tokens),
               Expect("token_logprobs", logprobs.at("token_logprobs").size(), tokens),
               ExpectTrue(logprobs.at("token_logprobs").at(0).is_null(), "the first value is not null")});
    for (size_t i = 1; status.ok() && i < tokens; ++i) {
      status = ExpectTrue(logprobs.at("token_logprobs").at(i).get<double>() <= 0, "a log-probability is above 0");
    }
    return status;
  });
  report.Run("http.completions.stop", [&] {
    if (greedy->size() < 4) return absl::InternalError("no greedy text to stop in");
    std::string stop = greedy->substr(greedy->size() / 2, 2);
    if (Json(stop).dump(-1, ' ', false, Json::error_handler_t::replace) != Json(stop).dump()) return absl::OkStatus();
    const auto reply = http.Post(route, CompletionBody({{"stop", {stop}}}));
    if (!reply.ok()) return reply.status();
    return AllOf({Expect("text", reply->at("choices").at(0).at("text"), greedy->substr(0, greedy->find(stop))),
                  Expect("finish_reason", reply->at("choices").at(0).at("finish_reason"), "stop")});
  });
  report.Run("http.ids", [&] {
    const std::string trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const auto reply = http.http().Call("POST", route, CompletionBody().dump(),
                                        {{"x-request-id", "verify-1"}, {"traceparent", trace}});
    if (!reply.ok()) return reply.status();
    return AllOf({Expect("x-request-id", std::string(reply->Header("x-request-id")), "verify-1"),
                  ExpectTrue(absl::StrContains(std::string(reply->Header("traceparent")), trace.substr(3, 32)),
                             "the trace is not returned")});
  });
  report.Run("http.disconnect", [&] {
    const absl::Status status = http.http().CallAndLeave(
        "POST", route, CompletionBody({{"stream", true}, {"max_tokens", 100000}}).dump(), 1000);
    if (!status.ok() && status.message() != "the answer ended early") return status;
    for (int i = 0; i < 50; ++i) {
      if (Gauge(http, "k3serve_requests_running") + Gauge(http, "k3serve_requests_waiting") == 0)
        return absl::OkStatus();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return absl::InternalError("five seconds after the client left, requests are still running (is there other load?)");
  });
}

}  // namespace

void CheckHttpContract(const HttpUrl& url, const ClientAccess& access, ContractReport& report, std::string* greedy) {
  HttpCaller::Headers headers;
  if (!access.key().empty()) headers.emplace_back("Authorization", "Bearer " + access.key());
  const HttpCaller http(url, access, std::move(headers), kTimeout);
  const HttpContract contract(http);
  if (!access.key().empty()) {
    report.Run("http.keys", [&] {
      const HttpCaller stranger(url, access, {{"Authorization", "Bearer none"}}, kTimeout);
      const HttpContract refused(stranger);
      return AllOf({refused.Refuses("GET", "/v1/models", "", 401),
                    refused.Refuses("POST", "/v1/chat/completions", ChatBody().dump(), 401),
                    refused.Get("/health/live").status(), refused.Get("/version").status()});
    });
  }
  CheckInfoRoutes(contract, report);
  CheckText(contract, report);
  CheckChat(contract, report);
  CheckCompletions(contract, report, greedy);
}

int RunVerifyServer(VerifyServerOptions options, std::ostream& out, std::ostream& err) {
  absl::Status status = options.access.Load();
  absl::StatusOr<HttpUrl> url = HttpUrl();
  if (status.ok() && !options.url.empty()) {
    url = ParseHttpUrl(options.url, "--server");
    status = url.ok() ? options.access.CheckUrl("--server", url->https) : url.status();
  }
  if (!status.ok()) {
    err << "k3serve verify: " << status.message() << "\n";
    return kExitUsage;
  }
  ContractReport report(out);
  std::string greedy;
  if (!options.url.empty()) CheckHttpContract(*url, options.access, report, &greedy);
  if (!options.target.empty()) CheckGrpcContract(options.target, options.access, report, &greedy);
  return report.Finish() ? kExitOk : kExitNotPassed;
}

}  // namespace k3
