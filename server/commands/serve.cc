#include "server/commands/serve.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/api_keys.h"
#include "server/commands/model_loader.h"
#include "server/descriptor_limit.h"
#include "server/engine_host.h"
#include "server/exit_codes.h"
#include "server/generation_service.h"
#include "server/grpc_server.h"
#include "server/health.h"
#include "server/http_server.h"
#include "server/load_summary.h"
#include "server/logging.h"
#include "server/metrics.h"
#include "server/openai_gateway.h"
#include "server/probe_handler.h"
#include "server/server_config.h"
#include "server/signals.h"
#include "server/span_exporter.h"
#include "server/text_file.h"
#include "server/tls_store.h"
#include "server/version.h"
#include "server/worker_pool.h"

namespace k3 {
namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kFlushTime = std::chrono::milliseconds(500);  // for last events on their way out
constexpr auto kLastWords = std::chrono::seconds(2);
constexpr auto kTransportGrace = std::chrono::milliseconds(200);  // for transports to say goodbye
constexpr auto kFaultNotice = std::chrono::seconds(2);            // clients hear of a device fault before the exit
constexpr auto kTearDownTime = std::chrono::seconds(10);  // last spans take up to 9 s; a step under way serves nobody
constexpr double kSummarySeconds = 10;
constexpr int kHttpTextThreads = 2;
constexpr int kProbeConnections = 256;

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string ListenerText(const std::string& host, const Port& wanted, int port) {
  if (!wanted.has_value()) return "off";
  const bool bare_ipv6 = host.find(':') != std::string::npos && host.front() != '[';
  return bare_ipv6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

[[noreturn]] void EndAtOnce(int signal) {
  spdlog::warn("second signal {}: ending at once", signal);
  std::fflush(nullptr);
  std::_Exit(128 + signal);
}

// While the server is taken apart: a step that hangs on a device would hold the process for ever. Ends the process when
// that takes too long, or at a further signal.
class TearDownGuard {
 public:
  TearDownGuard(const Signals& signals, int code) : thread_([this, &signals, code] { Run(signals, code); }) {}
  ~TearDownGuard() {
    done_ = true;
    thread_.join();
  }

 private:
  void Run(const Signals& signals, int code) const {
    const Clock::time_point until = Clock::now() + kTearDownTime;
    while (!done_) {
      const int signal = signals.Wait(std::chrono::milliseconds(10));
      if (signal != 0 && signal != SIGHUP) EndAtOnce(signal);
      if (Clock::now() < until) continue;
      spdlog::warn("threads still work after {} s: ending without them", kTearDownTime.count());
      std::fflush(nullptr);
      std::_Exit(code);
    }
  }

  std::atomic<bool> done_{false};
  std::thread thread_;  // last: uses the other
};

// One run of the server. Members live in the order in which they need each other.
class Server {
 public:
  // `spans` may be null.
  Server(ServerConfig config, std::unique_ptr<SpanExporter> spans)
      : config_(std::move(config)),
        spans_(std::move(spans)),
        metrics_(
            Metrics::Options{kVersion, kCommit, config_.served_model_names.front(), config_.metrics_compat == "vllm"}),
        generation_(GenerationOptions(config_, spans_.get()), &health_, &metrics_),
        gateway_(OpenAiOptions{.vendor_strict = config_.vendor_strict}, &generation_, &health_, &metrics_, &keys_),
        http_pool_(kHttpTextThreads) {}

  // True when a thread that still loads refers to this object.
  bool gave_up() const { return gave_up_; }

  int Run(const Signals& signals) {
    const Clock::time_point start = Clock::now();
    const bool follows = config_.place.process > 0;  // clients go to the first process
    if (!follows) {
      if (const int code = Listen(); code != kExitOk) return code;
    }
    ModelLoader loader(config_, &health_, &metrics_, profile_);
    while (!loader.Done()) {
      if (const int signal = signals.Wait(kTick)) {
        if (signal == SIGHUP) {
          ReloadSecrets();
          continue;
        }
        spdlog::info("signal {} while loading: ending", signal);
        loader.GiveUp();
        gave_up_ = true;
        health_.StartDrain(Clock::duration::zero());
        if (!follows) CloseListeners();
        return kExitOk;
      }
    }
    EngineHost::Failure failure;
    host_ = loader.Take(&failure);
    if (host_ == nullptr) {
      spdlog::error("{}", failure.message);
      return failure.exit_code;
    }
    if (follows) return Follow(signals);
    Engine& engine = host_->engine();
    generation_.Install(host_->served_model());
    metrics_.WatchEngine([this] { return Load(); }, engine.Limits());
    if (host_->ranks().layout().ranks() > 1) {
      metrics_.WatchCollectives([this] { return host_->ranks().collectives(); });
    }
    health_.SetServing();
    PrintReady(std::chrono::duration<double>(Clock::now() - start).count());
    int code = kExitOk;
    {
      const LoadSummaryLogger summary(
          [&] {
            return LoadSample{engine.Load(), metrics_.prefill_tokens()};
          },
          kSummarySeconds, [](const std::string& line) { spdlog::info("{}", line); });
      code = Serve(signals);
    }
    metrics_.WatchEngine({}, engine.Limits());
    metrics_.WatchCollectives({});
    return code;
  }

 private:
  static GenerationService::Options GenerationOptions(const ServerConfig& config, SpanExporter* spans) {
    GenerationService::Options options;
    options.spans = spans;
    options.max_streams_per_key = config.max_streams_per_key;
    if (config.queue_timeout_seconds.has_value()) options.queue_timeout = Seconds(*config.queue_timeout_seconds);
    options.default_effort = config.default_effort;
    if (config.request_timeout_seconds.has_value()) options.request_timeout = Seconds(*config.request_timeout_seconds);
    options.vendor_strict = config.vendor_strict;
    options.max_queued_prompts = static_cast<size_t>(config.max_queue);
    return options;
  }

  int Fail(int code, const absl::Status& status) {
    spdlog::error("{}", std::string(status.message()));
    return code;
  }

  int Listen() {
    if (!config_.api_key_file.empty()) {
      absl::StatusOr<ApiKeys> keys = ApiKeys::Load(config_.api_key_file);
      if (!keys.ok()) return Fail(kExitUsage, keys.status());
      keys_ = *std::move(keys);
    }
    if (!config_.tls_cert.empty()) {
      auto tls = TlsStore::Open({config_.tls_cert, config_.tls_key, config_.tls_client_ca});
      if (!tls.ok()) return Fail(kExitUsage, tls.status());
      tls_ = *std::move(tls);
    }
    const int listeners = (config_.grpc_port.has_value() ? 1 : 0) + (config_.port.has_value() ? 1 : 0);
    max_connections_ = FitDescriptorLimit(static_cast<int>(config_.max_connections), listeners);
    GrpcServerOptions options;
    options.max_connections = max_connections_;
    options.tls = tls_.get();
    options.host = config_.host;
    options.port = config_.grpc_port;
    options.admin_port = config_.admin_port;
    options.max_message_mib = config_.max_message_mib;
    options.max_concurrent_streams = config_.max_queue + config_.max_num_seqs.value_or(4096);
    options.default_effort = config_.default_effort;
    options.pump_threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency() / 4, 1u, 4u));
    AdminActions actions;
    actions.drain = [this] { health_.StartDrain(Seconds(config_.drain_lag_seconds)); };
    if (config_.admin_port.has_value()) {
      profile_ = std::make_shared<ProfileSwitch>();
      actions.start_profile = [profile = profile_](uint32_t steps) {
        profile->Start(steps > 0 ? steps : ProfileSwitch::kUntilStopped);
        return absl::OkStatus();
      };
      actions.stop_profile = [profile = profile_](std::string* path) {
        const std::optional<ProfileTable> table = profile->Stop();
        if (!table.has_value()) return absl::FailedPreconditionError("no profile was started since the last one");
        absl::StatusOr<std::string> written = WriteTemporaryText("k3serve-profile-", ".txt", table->Text());
        if (!written.ok()) {
          spdlog::error("profile, {}: {}", std::string(written.status().message()), table->Text());
          return written.status();
        }
        *path = *std::move(written);
        return absl::OkStatus();
      };
    }
    auto server = GrpcServer::Start(options, &generation_, &health_, &keys_, std::move(actions));
    if (!server.ok()) return Fail(kExitCannotBind, server.status());
    grpc_ = *std::move(server);
    return ListenHttp();
  }

  int ListenHttp() {
    if (config_.probe_port.has_value()) {
      HttpServerOptions options;
      options.host = config_.host;
      options.port = *config_.probe_port;
      options.io_threads = 1;
      options.max_connections = kProbeConnections;
      options.max_body_bytes = 0;
      auto server = HttpServer::Start(options, probe_handler_, {});
      if (!server.ok()) return Fail(kExitCannotBind, server.status());
      probes_ = *std::move(server);
      spdlog::info("probes are answered on http {}:{}", config_.host, probes_->port());
    }
    if (!config_.port.has_value()) return kExitOk;
    HttpServerOptions options;
    options.tls = tls_.get();
    options.host = config_.host;
    options.port = *config_.port;
    options.max_body_bytes = static_cast<uint64_t>(config_.max_body_mib) << 20;
    options.max_connections = max_connections_;
    auto server =
        HttpServer::Start(options, gateway_, [this](std::function<void()> task) { http_pool_.Post(std::move(task)); });
    if (!server.ok()) return Fail(kExitCannotBind, server.status());
    http_ = *std::move(server);
    return kExitOk;
  }

  // Certificates and keys anew, on both front ends; a file that is not in order changes nothing.
  void ReloadSecrets() {
    const auto report = [](const char* what, const absl::Status& status) {
      if (status.ok()) {
        spdlog::info("SIGHUP: {} read again", what);
      } else {
        spdlog::error("SIGHUP: {} stay as they were: {}", what, std::string(status.message()));
      }
    };
    if (keys_.required()) report("API keys", keys_.Reload());
    if (tls_ != nullptr) report("TLS files", tls_->Reload());
    if (!keys_.required() && tls_ == nullptr) spdlog::info("SIGHUP: no key or TLS files are set");
  }

  // New transports are refused, calls in progress get a moment to say their last words.
  void CloseListeners() {
    std::thread http([this] {
      if (http_ != nullptr) http_->Stop(kTransportGrace);
      if (probes_ != nullptr) probes_->Stop(Clock::duration::zero());
    });
    grpc_->Shutdown(kTransportGrace);
    http.join();
  }

  void PrintReady(double seconds) {
    const EngineLimits limits = host_->engine().Limits();
    std::cout << "k3serve ready http=" << ListenerText(config_.host, config_.port, http_ == nullptr ? 0 : http_->port())
              << " grpc=" << ListenerText(config_.host, config_.grpc_port, grpc_->port())
              << " admin=" << ListenerText(config_.host, config_.admin_port, grpc_->admin_port())
              << " model=" << config_.served_model_names.front() << " pages=" << limits.latent_pages
              << " state_slots=" << limits.state_slots << " snapshots=" << limits.snapshot_slots
              << " seconds=" << absl::StrFormat("%.2f", seconds) << std::endl;
  }

  // A process that only runs ranks: ends when the first one does. A launcher's signal reaches all processes; the first
  // one then drains, and needs this one until it has.
  int Follow(const Signals& signals) {
    std::atomic<bool> done{false};
    int code = kExitOk;
    std::thread steps([&] {
      code = host_->Follow();
      done = true;
    });
    int seen = 0;
    while (!done) {
      const int signal = signals.Wait(kTick);
      if (signal == 0 || signal == SIGHUP) continue;
      if (++seen > 1) EndAtOnce(signal);
      spdlog::info("signal {}: ending with the first process", signal);
    }
    steps.join();
    return code;
  }

  // A lost process is a fault before any step has met it.
  EngineLoad Load() const {
    EngineLoad load = host_->engine().Load();
    load.healthy = load.healthy && host_->lost().empty();
    return load;
  }

  // Until a signal or a device fault; returns the exit code.
  int Serve(const Signals& signals) {
    while (true) {
      const int signal = signals.Wait(kTick);
      const EngineLoad load = Load();
      health_.Observe(load);
      generation_.EndOverdue();
      if (spans_ != nullptr) metrics_.SetSpans(spans_->exported(), spans_->dropped());
      if (const std::string lost = host_->lost(); !load.healthy || !lost.empty()) {
        health_.Observe(Load());
        spdlog::critical("{}: ending", lost.empty() ? "the device has failed" : lost);
        std::this_thread::sleep_for(kFaultNotice);
        CloseListeners();
        return kExitDeviceFault;
      }
      if (signal == SIGHUP) {
        ReloadSecrets();
      } else if (signal != 0) {
        Drain(signals, signal);
        return kExitOk;
      }
    }
  }

  // Waits until `done` or `until`; a further signal ends the process.
  template <class Done>
  void WaitUntil(const Signals& signals, Clock::time_point until, const Done& done) {
    while (!done() && Clock::now() < until) {
      const int signal = signals.Wait(std::chrono::milliseconds(10));
      if (signal == SIGHUP) {
        ReloadSecrets();
      } else if (signal != 0) {
        EndAtOnce(signal);
      }
    }
  }

  void Drain(const Signals& signals, int signal) {
    const Clock::time_point start = Clock::now();
    const Clock::duration lag = Seconds(config_.drain_lag_seconds);
    // What is taken until the lag is over has its time too.
    const Clock::time_point limit = start + lag + Seconds(config_.shutdown_timeout_seconds);
    const auto idle = [this] { return generation_.active() == 0; };
    spdlog::info("signal {}: draining, {} requests", signal, generation_.active());
    health_.StartDrain(lag);
    if (http_ != nullptr) http_->StartDrain();
    WaitUntil(signals, start + lag, [] { return false; });
    WaitUntil(signals, limit, idle);
    host_->engine().StopAdmission();
    const bool aborts = !idle();
    if (aborts) {
      spdlog::warn("--shutdown-timeout has passed: ending {} requests", generation_.active());
      generation_.AbortAll(absl::UnavailableError("the server is shutting down"));
      WaitUntil(signals, Clock::now() + kFlushTime, idle);
    }
    // Last messages and refusals still on their way, on a busy machine for longer than the transports' own grace. A
    // reader that takes nothing must not make an abort longer.
    WaitUntil(signals, Clock::now() + (aborts ? kFlushTime : kLastWords),
              [this] { return grpc_->calls() == 0 && (http_ == nullptr || http_->exchanges() == 0); });
    CloseListeners();
    spdlog::info("drained in {:.2f} s", std::chrono::duration<double>(Clock::now() - start).count());
  }

  const ServerConfig config_;
  int max_connections_ = 0;  // of each front end: what the limit of open files allows
  ApiKeys keys_;
  std::unique_ptr<TlsStore> tls_;
  ServerHealth health_;
  std::unique_ptr<SpanExporter> spans_;
  Metrics metrics_;
  GenerationService generation_;
  OpenAiGateway gateway_;
  ProbeHandler probe_handler_{&gateway_};
  WorkerPool http_pool_;  // reads large bodies
  std::unique_ptr<GrpcServer> grpc_;
  std::shared_ptr<ProfileSwitch> profile_;  // behind the admin port
  bool gave_up_ = false;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<HttpServer> probes_;
  std::unique_ptr<EngineHost> host_;  // ends before the front ends that its streams notify
};

}  // namespace

int RunServe(const std::vector<std::string>& args, const GetEnv& getenv, const std::vector<std::string>& variables) {
  const absl::StatusOr<ServerCommandLine> line = ParseServerCommandLine(args, getenv, variables);
  if (!line.ok()) {
    std::cerr << "k3serve serve: " << line.status().message() << "\n";
    return kExitUsage;
  }
  if (line->help) {
    std::cout
        << "Usage: k3serve serve MODEL_DIR [flags]\n\n"
           "Loads the model and serves it. Every flag may also be an environment variable (K3SERVE_GRPC_PORT for "
           "--grpc-port)\nor a key of the --config file; flags win over the environment, and that over the file.\n"
        << ServerFlagsHelp();
    return kExitOk;
  }
  if (line->print_config) {
    std::cout << line->values;
    return kExitOk;
  }
  const Signals signals;
  SetUpLogging(line->config.log_format, line->config.log_level);
  for (const std::string& warning : line->warnings) spdlog::warn("serve: {}", warning);
  std::unique_ptr<SpanExporter> spans;
  if (!line->config.otlp_endpoint.empty()) {
    auto exporter = SpanExporter::Start({.endpoint = line->config.otlp_endpoint, .version = kVersion});
    if (!exporter.ok()) {
      std::cerr << "k3serve serve: " << exporter.status().message() << "\n";
      return kExitUsage;
    }
    spans = *std::move(exporter);
  }
  auto server = std::make_unique<Server>(line->config, std::move(spans));
  const int code = server->Run(signals);
  if (server->gave_up()) static_cast<void>(server.release());  // belongs to the loading thread until the process ends
  const TearDownGuard guard(signals, code);
  server.reset();
  return code;
}

}  // namespace k3
