#include "server/server_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>

namespace k3 {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

GetEnv Env(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> const char* {
    const auto it = values.find(name);
    return it == values.end() ? nullptr : it->second.c_str();
  };
}

std::string ErrorOf(const std::vector<std::string>& args) {
  const auto parsed = ParseServerCommandLine(args, Env({}));
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(parsed.status().message());
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) : path_(::testing::TempDir() + "/k3serve_config_test.toml") {
    std::ofstream(path_) << text;
  }
  ~ConfigFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(ServerConfigTest, Defaults) {
  const auto parsed = ParseServerCommandLine({"models/tiny-k3/"}, Env({}));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const ServerConfig& config = parsed->config;
  EXPECT_EQ(config.model_dir, "models/tiny-k3/");
  EXPECT_THAT(config.served_model_names, ElementsAre("tiny-k3"));
  EXPECT_EQ(config.host, "127.0.0.1");
  EXPECT_EQ(config.port, 8000);
  EXPECT_EQ(config.grpc_port, 50051);
  EXPECT_EQ(config.admin_port, std::nullopt);
  EXPECT_EQ(config.max_message_mib, 64);
  EXPECT_EQ(config.page_size, 64);
  EXPECT_EQ(config.snapshot_interval, 1024);
  EXPECT_EQ(config.max_queue, 256);
  EXPECT_EQ(config.shutdown_timeout_seconds, 30);
  EXPECT_EQ(config.latent_norm_eps, 1e-6);
  EXPECT_TRUE(config.enable_prefix_caching);
  EXPECT_EQ(config.max_model_len, std::nullopt);
}

TEST(ServerConfigTest, FlagOverEnvironmentOverFile) {
  const ConfigFile file("port = 1\ngrpc-port = 2\nadmin_port = 3\nlog-level = \"debug\"\n");
  const auto parsed = ParseServerCommandLine({"m", "--port", "9", "--config", file.path(), "--print-config"},
                                             Env({{"K3SERVE_PORT", "8"}, {"K3SERVE_GRPC_PORT", "7"}}));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.port, 9);
  EXPECT_EQ(parsed->config.grpc_port, 7);
  EXPECT_EQ(parsed->config.admin_port, 3);
  EXPECT_EQ(parsed->config.log_level, "debug");
  EXPECT_TRUE(parsed->print_config);
  EXPECT_THAT(parsed->values, HasSubstr("port = 9  # command line\n"));
  EXPECT_THAT(parsed->values, HasSubstr("grpc-port = 7  # environment K3SERVE_GRPC_PORT\n"));
  EXPECT_THAT(parsed->values, HasSubstr("admin-port = 3  # file " + file.path() + ":3\n"));
  EXPECT_THAT(parsed->values, HasSubstr("max-queue = 256  # default\n"));
}

TEST(ServerConfigTest, ConfigFileMayComeFromTheEnvironment) {
  const ConfigFile file("max-queue = 5\nserved-model-name = [\"a\", \"b\"]\n");
  const auto parsed = ParseServerCommandLine({"m"}, Env({{"K3SERVE_CONFIG", file.path()}}));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.max_queue, 5);
  EXPECT_THAT(parsed->config.served_model_names, ElementsAre("a", "b"));
}

TEST(ServerConfigTest, ConflictsAreErrors) {
  EXPECT_THAT(ErrorOf({"m", "--port", "off", "--grpc-port", "off"}), HasSubstr("nothing would be served"));
  EXPECT_THAT(ErrorOf({"m", "--port", "50051"}), HasSubstr("--port conflicts with --grpc-port: both are 50051"));
  EXPECT_THAT(ErrorOf({"m", "--tls-cert", "c"}), HasSubstr("--tls-cert needs --tls-key"));
  EXPECT_THAT(ErrorOf({"m", "--tls-client-ca", "c"}), HasSubstr("--tls-client-ca needs --tls-cert"));
  EXPECT_THAT(ErrorOf({"m", "--device", "cpu", "--gpus", "0"}), HasSubstr("--gpus conflicts with --device"));
  EXPECT_THAT(ErrorOf({"m", "--device", "cpu", "--kv-cache-dtype", "bf16"}), HasSubstr("--kv-cache-dtype bf16"));
  EXPECT_THAT(ErrorOf({"m", "--gpus", "0,1"}), HasSubstr("names 2 GPUs"));
  EXPECT_THAT(ErrorOf({"m", "--gpus", "0,0"}), HasSubstr("names GPU 0 twice"));
  EXPECT_THAT(ErrorOf({"m", "--gpus", "x"}), HasSubstr("--gpus must be GPU numbers"));
  EXPECT_THAT(ErrorOf({"m", "--prefill-chunk", "65", "--max-num-batched-tokens", "64"}),
              HasSubstr("--prefill-chunk conflicts with --max-num-batched-tokens: 65 is more than 64"));
  EXPECT_THAT(ErrorOf({"m", "--no-enable-prefix-caching", "--verify-hits", "0.5"}),
              HasSubstr("--verify-hits conflicts with --enable-prefix-caching"));
  EXPECT_THAT(ErrorOf({"m", "--snapshot-interval", "100"}), HasSubstr("multiple of --page-size (64)"));
  EXPECT_THAT(ErrorOf({"m", "--max-num-seqs", "9", "--state-slots", "8"}), HasSubstr("--max-num-seqs conflicts"));
}

// A setting of the balance of experts that would change nothing must not look as if it did.
TEST(ServerConfigTest, BalanceOfExperts) {
  EXPECT_THAT(ErrorOf({"m", "--routing-kappa", "1.1"}), HasSubstr("--routing-kappa conflicts with --moe-routing"));
  EXPECT_THAT(ErrorOf({"m", "--routing-virtual-ranks", "8"}),
              HasSubstr("nothing is counted without --measure-routing"));
  EXPECT_THAT(ErrorOf({"m", "--moe-routing", "local-quantile"}), HasSubstr("there is only one"));
  const std::vector<std::string> balanced = {"m", "--moe-routing", "local-quantile", "--data-parallel-size", "2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), balanced.begin(), balanced.end());
    return more;
  };
  EXPECT_THAT(ErrorOf(with({"--routing-kappa", "1.2"})), HasSubstr("--routing-kappa"));
  EXPECT_THAT(ErrorOf(with({"--routing-decay", "1"})), HasSubstr("--routing-decay"));
  EXPECT_THAT(ErrorOf(with({"--routing-window", "9"})), HasSubstr("--routing-window"));
  EXPECT_THAT(ErrorOf(with({"--routing-max-bias", "0.3"})), HasSubstr("--routing-max-bias"));
  EXPECT_THAT(ErrorOf(with({"--routing-soft-cap-tau", "0.1"})), HasSubstr("needs --routing-soft-cap"));
  EXPECT_THAT(ErrorOf(with({"--routing-soft-cap", "1.1", "--verify-hits", "1"})),
              HasSubstr("--routing-soft-cap conflicts with --verify-hits"));
  EXPECT_THAT(ErrorOf(with({"--routing-soft-cap", "1.1", "--batch-invariant"})),
              HasSubstr("--routing-soft-cap conflicts with --batch-invariant"));
  const auto parsed = ParseServerCommandLine(with({"--routing-soft-cap", "1.1", "--routing-decay", "3"}), Env({}));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->config.routing_soft_cap, 1.1);
  EXPECT_EQ(parsed->config.routing_kappa, 1.05);
  EXPECT_TRUE(ParseServerCommandLine({"m", "--measure-routing", "--routing-virtual-ranks", "8"}, Env({})).ok());
}

TEST(ServerConfigTest, PositionalArguments) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("MODEL_DIR is missing"));
  EXPECT_THAT(ErrorOf({"a", "b"}), HasSubstr("one MODEL_DIR is served, not 2: a and b"));
  EXPECT_THAT(ErrorOf({"--served-model-name", "x", "dir"}), HasSubstr("must stand before --served-model-name"));
  EXPECT_THAT(ErrorOf({"m", "--config", "/nowhere/x.toml"}),
              HasSubstr("--config: /nowhere/x.toml: cannot be opened: No such file"));
}

TEST(ServerConfigTest, DtypesOfTheCpuAreCheckedForAutoToo) {
  ServerConfig config;
  config.kda_state_dtype = "bf16";
  EXPECT_TRUE(CheckDeviceConflicts(config, /*is_cpu=*/false).ok());
  EXPECT_THAT(std::string(CheckDeviceConflicts(config, /*is_cpu=*/true).message()),
              HasSubstr("--kda-state-dtype bf16"));
}

TEST(ServerConfigTest, HelpNamesEveryFlag) {
  const std::string help = ServerFlagsHelp();
  for (const char* flag : {"--host",
                           "--port",
                           "--grpc-port",
                           "--admin-port",
                           "--probe-port",
                           "--max-connections",
                           "--max-streams-per-key",
                           "--queue-timeout",
                           "--otlp-endpoint",
                           "--device",
                           "--gpus",
                           "--threads",
                           "--served-model-name",
                           "--tokenizer",
                           "--max-model-len",
                           "--max-num-seqs",
                           "--max-num-batched-tokens",
                           "--prefill-chunk",
                           "--page-size",
                           "--snapshot-interval",
                           "--[no-]enable-prefix-caching",
                           "--verify-hits",
                           "--gpu-memory-utilization",
                           "--cpu-memory-gib",
                           "--latent-pages",
                           "--state-slots",
                           "--snapshot-slots",
                           "--kda-state-dtype",
                           "--kv-cache-dtype",
                           "--compute-dtype",
                           "--[no-]batch-invariant",
                           "--latent-norm-eps",
                           "--kl-router-weights",
                           "--expert-activations",
                           "--tensor-parallel-size",
                           "--data-parallel-size",
                           "--moe-routing",
                           "--[no-]measure-routing",
                           "--routing-virtual-ranks",
                           "--routing-kappa",
                           "--routing-window",
                           "--routing-update-steps",
                           "--routing-decay",
                           "--routing-eta",
                           "--routing-max-bias",
                           "--routing-epoch-updates",
                           "--[no-]routing-guards",
                           "--routing-soft-cap",
                           "--routing-soft-cap-tau",
                           "--routing-log",
                           "--routing-replay",
                           "--max-queue",
                           "--request-timeout",
                           "--max-message-mib",
                           "--max-body-mib",
                           "--default-effort",
                           "--api-key-file",
                           "--tls-cert",
                           "--tls-key",
                           "--tls-client-ca",
                           "--log-level",
                           "--log-format",
                           "--metrics-compat",
                           "--drain-lag",
                           "--shutdown-timeout",
                           "--random-weights",
                           "--[no-]vendor-strict",
                           "--profile-steps",
                           "--config",
                           "--[no-]print-config"}) {
    EXPECT_THAT(help, HasSubstr(std::string("  ") + flag)) << flag;
  }
}

}  // namespace
}  // namespace k3
