#include "server/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/grpc_acceptor.h"
#include "server/grpc_credentials.h"
#include "server/grpc_generation.h"
#include "server/grpc_health.h"
#include "server/grpc_malformed.h"
#include "server/grpc_reflection.h"

namespace k3 {
namespace {

constexpr char kPackage[] = "k3serve.inference.v1.";
constexpr std::chrono::seconds kDisconnectTime{1};  // for gRPC to notice that its peers are gone
constexpr int kHandshakeTimeoutMs = 10000;          // TLS and the HTTP/2 preface
constexpr int kAdminConnections = 64;
constexpr char kHealth[] = "grpc.health.v1.Health";

void SetTransport(grpc::ServerBuilder& builder, const GrpcServerOptions& options) {
  const auto bytes = static_cast<int>(options.max_message_mib << 20);
  builder.SetMaxReceiveMessageSize(bytes);
  builder.SetMaxSendMessageSize(bytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Clients may ping every 10 s; half of it leaves room for late and early pings.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(options.max_concurrent_streams));
}

// What gRPC may hold of messages that are on their way. A message is known to be somebody's only when all of it is
// there, so without a bound strangers could fill the memory; beyond it gRPC ends calls with RESOURCE_EXHAUSTED.
size_t BufferBytes(const GrpcServerOptions& options) {
  constexpr size_t kLeast = size_t{256} << 20;
  constexpr size_t kMessages = 16;
  return std::max(kLeast, kMessages * (static_cast<size_t>(options.max_message_mib) << 20));
}

// gRPC's own lines: peers that speak something else or leave within a handshake, at any rate they like. What matters of
// them the server reports itself, in its own format.
void LogLine(gpr_log_func_args* line) { spdlog::debug("grpc {}:{}: {}", line->file, line->line, line->message); }

// Until `done`, at most for `limit`.
template <class Done>
void WaitFor(std::chrono::milliseconds limit, const Done& done) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!done() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// One listener and its services, which live as long as the server does.
struct Listener {
  std::shared_ptr<grpc::ServerCredentials> credentials;  // asked at each handshake
  std::vector<std::unique_ptr<grpc::Service>> services;
  std::unique_ptr<GrpcAcceptor> acceptor;
  std::unique_ptr<grpc::Server> server;
};

int PortOf(const Listener& listener) { return listener.acceptor == nullptr ? 0 : listener.acceptor->port(); }

absl::Status Listen(const GrpcServerOptions& options, int port, int max_connections, ServerHealth* health,
                    std::vector<std::string> names, Listener* listener) {
  absl::StatusOr<std::unique_ptr<GrpcAcceptor>> acceptor = GrpcAcceptor::Listen(options.host, port, max_connections);
  if (!acceptor.ok()) return acceptor.status();
  listener->services.push_back(MakeHealthService(health, names));
  names.push_back(kHealth);
  names.push_back("grpc.reflection.v1.ServerReflection");
  names.push_back("grpc.reflection.v1alpha.ServerReflection");
  listener->services.push_back(MakeReflectionV1(names));
  listener->services.push_back(MakeReflectionV1Alpha(names));
  grpc::ServerBuilder builder;
  SetTransport(builder, options);
  builder.SetResourceQuota(grpc::ResourceQuota("k3serve").Resize(BufferBytes(options)));
  builder.experimental().SetInterceptorCreators(MakeMalformedMessageInterceptors());
  listener->credentials = MakeServerCredentials(options.tls);
  auto connections = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, listener->credentials);
  for (const auto& service : listener->services) builder.RegisterService(service.get());
  listener->server = builder.BuildAndStart();
  if (listener->server == nullptr) return absl::UnavailableError("the gRPC server cannot be built");
  listener->acceptor = *std::move(acceptor);
  listener->acceptor->Start(std::move(connections));
  return absl::OkStatus();
}

}  // namespace

struct GrpcServer::Impl {
  std::atomic<int> calls{0};  // outlives the service that counts
  Listener main;
  Listener admin;
};

GrpcServer::GrpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GrpcServer::~GrpcServer() { Shutdown(std::chrono::milliseconds(0)); }

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const GrpcServerOptions& options,
                                                              GenerationService* generation, ServerHealth* health,
                                                              const ApiKeys* keys, AdminActions actions) {
  gpr_set_log_function(&LogLine);
  auto impl = std::make_unique<Impl>();
  const auto name = [](const char* service) { return absl::StrCat(kPackage, service); };
  if (options.port.has_value()) {
    GrpcGenerationOptions generation_options;
    generation_options.write_stall_limit = options.write_stall_limit;
    generation_options.pump_threads = options.pump_threads;
    generation_options.calls = &impl->calls;
    impl->main.services.push_back(MakeGrpcGenerationService(generation, keys, generation_options));
    impl->main.services.push_back(MakeGrpcTokenizerService(generation, keys));
    impl->main.services.push_back(
        MakeGrpcModelService(generation, health, keys, {options.max_message_mib, options.default_effort}));
    const absl::Status status =
        Listen(options, *options.port, options.max_connections, health,
               {name("GenerationService"), name("TokenizerService"), name("ModelService")}, &impl->main);
    if (!status.ok()) return status;
  }
  if (options.admin_port.has_value()) {
    impl->admin.services.push_back(MakeGrpcAdminService(generation, keys, std::move(actions)));
    const absl::Status status =
        Listen(options, *options.admin_port, kAdminConnections, health, {name("AdminService")}, &impl->admin);
    if (!status.ok()) return status;
  }
  return std::unique_ptr<GrpcServer>(new GrpcServer(std::move(impl)));
}

int GrpcServer::port() const { return PortOf(impl_->main); }
int GrpcServer::admin_port() const { return PortOf(impl_->admin); }
int GrpcServer::calls() const { return impl_->calls.load(); }

void GrpcServer::Shutdown(std::chrono::milliseconds grace) {
  const std::array<Listener*, 2> listeners = {&impl_->main, &impl_->admin};
  for (Listener* listener : listeners) {
    if (listener->server != nullptr) listener->acceptor->Stop();
  }
  WaitFor(grace, [this] { return impl_->calls == 0; });
  for (Listener* listener : listeners) {
    if (listener->server == nullptr) continue;
    WaitFor(kDisconnectTime, [acceptor = listener->acceptor.get()] { return acceptor->EndConnections() == 0; });
    listener->server->Shutdown(std::chrono::system_clock::now());
    listener->server->Wait();
    listener->server.reset();
  }
}

}  // namespace k3
