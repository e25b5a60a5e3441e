#include <iterator>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/metrics.h"

// --metrics-compat vllm: the same figures under the names that dashboards and routers ask for.
namespace k3 {
namespace {

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

struct Alias {
  std::string_view own;
  std::string_view vllm;
};

// Same type and meaning on both sides; what differs is computed in AddVllmAliases.
constexpr Alias kVllmAliases[] = {
    {"k3serve_requests_running", "vllm:num_requests_running"},
    {"k3serve_requests_waiting", "vllm:num_requests_waiting"},
    {"k3serve_prefix_cache_query_tokens_total", "vllm:prefix_cache_queries_total"},
    {"k3serve_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"},
    {"k3serve_prompt_tokens_total", "vllm:prompt_tokens_total"},
    {"k3serve_generation_tokens_total", "vllm:generation_tokens_total"},
    {"k3serve_requests_finished_total", "vllm:request_success_total"},
    {"k3serve_preemptions_total", "vllm:num_preemptions_total"},
    {"k3serve_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"},
    {"k3serve_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"},
    {"k3serve_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"},  // its name in older releases
    {"k3serve_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"},
    {"k3serve_queue_time_seconds", "vllm:request_queue_time_seconds"},
    {"k3serve_prefill_time_seconds", "vllm:request_prefill_time_seconds"},
    {"k3serve_decode_time_seconds", "vllm:request_decode_time_seconds"},
    {"k3serve_request_prompt_tokens", "vllm:request_prompt_tokens"},
    {"k3serve_request_generation_tokens", "vllm:request_generation_tokens"},
};

}  // namespace

void Metrics::AddVllmAliases(std::vector<prometheus::MetricFamily>& families) const {
  const prometheus::ClientMetric::Label model{"model_name", options_.model_name};
  const prometheus::ClientMetric::Label engine{"engine", "0"};
  std::vector<prometheus::MetricFamily> aliases;
  for (const Alias& alias : kVllmAliases) {
    for (const prometheus::MetricFamily& family : families) {
      if (family.name != alias.own) continue;
      prometheus::MetricFamily& copy = aliases.emplace_back(family);
      copy.name = std::string(alias.vllm);
      for (prometheus::ClientMetric& metric : copy.metric) {
        for (prometheus::ClientMetric::Label& label : metric.label) {
          if (label.name == "reason") label.name = "finished_reason";
        }
        metric.label.push_back(model);
        metric.label.push_back(engine);
      }
    }
  }
  const auto add_gauge = [&](const std::string& name, const std::string& help, double value,
                             std::vector<prometheus::ClientMetric::Label> labels) {
    prometheus::MetricFamily& family = aliases.emplace_back();
    family.name = name;
    family.help = help;
    family.type = prometheus::MetricType::Gauge;
    prometheus::ClientMetric& metric = family.metric.emplace_back();
    metric.gauge.value = value;
    metric.label = std::move(labels);
    metric.label.push_back(model);
    metric.label.push_back(engine);
  };
  // Pages only; the state slots have their own gauges. One maximum over both pools would mislead an autoscaler.
  add_gauge("vllm:kv_cache_usage_perc", "Latent pages held by live sequences, 0 to 1",
            Ratio(static_cast<double>(last_load_.pages_used), static_cast<double>(last_load_.pages_total)), {});
  add_gauge("vllm:cache_config_info", "Always 1", 1,
            {{"block_size", absl::StrCat(limits_.page_size)}, {"num_gpu_blocks", absl::StrCat(limits_.latent_pages)}});
  families.insert(families.end(), std::make_move_iterator(aliases.begin()), std::make_move_iterator(aliases.end()));
}

}  // namespace k3
