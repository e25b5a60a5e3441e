#include "tests/testing/reference_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace k3::testing {
namespace {

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double Softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

const std::vector<double>& ReferenceModel::Tensor(const std::string& name) {
  auto it = cache_.find(name);
  if (it == cache_.end()) it = cache_.emplace(name, getter_(name)).first;
  if (it->second.empty()) throw std::runtime_error("reference model: no tensor " + name);
  return it->second;
}

ReferenceModel::Matrix ReferenceModel::Linear(const Matrix& x, int64_t in, const std::string& weight, int64_t out) {
  const std::vector<double>& w = Tensor(weight);
  const int64_t rows = static_cast<int64_t>(x.size()) / in;
  if (static_cast<int64_t>(w.size()) != in * out) throw std::runtime_error("reference model: shape of " + weight);
  Matrix y(rows * out);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  }
  return y;
}

ReferenceModel::Matrix ReferenceModel::RmsNorm(const Matrix& x, int64_t width, const std::string& weight, double eps) {
  const std::vector<double>& w = Tensor(weight);
  Matrix y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += x[row + i] * x[row + i];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(width) + eps);
    for (int64_t i = 0; i < width; ++i) y[row + i] = w[i] * x[row + i] * scale;
  }
  return y;
}

double ReferenceModel::Activate(double gate, double up) const {
  const ActivationSpec& a = config_.activation;
  if (a.kind == Activation::kSwiglu) return gate * Sigmoid(gate) * up;
  const double capped = a.linear_beta > 0 ? a.linear_beta * std::tanh(up / a.linear_beta) : up;
  return a.beta * std::tanh(gate / a.beta) * Sigmoid(gate) * capped;
}

ReferenceModel::Matrix ReferenceModel::Mlp(const Matrix& x, const std::string& prefix, const char* gate, const char* up,
                                           const char* down, int64_t in, int64_t inner) {
  const Matrix g = Linear(x, in, prefix + gate + ".weight", inner);
  const Matrix u = Linear(x, in, prefix + up + ".weight", inner);
  Matrix h(g.size());
  for (size_t i = 0; i < h.size(); ++i) h[i] = Activate(g[i], u[i]);
  return Linear(h, inner, prefix + down + ".weight", in);
}

ReferenceModel::Matrix ReferenceModel::Kda(const Matrix& x, const std::string& p) {
  const int64_t heads = config_.kda_heads, d = config_.kda_head_dim, width = config_.conv_width;
  const int64_t channels = heads * d, hidden = config_.hidden_size;
  auto project = [&](const std::string& name) {
    const Matrix raw = Linear(x, hidden, p + name + "_proj.weight", channels);
    const std::vector<double>& taps = Tensor(p + name + "_conv1d.weight");
    Matrix y(raw.size());
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = 0;
        for (int64_t j = 0; j < width; ++j) {
          const int64_t source = t - (width - 1) + j;
          if (source >= 0) sum += raw[source * channels + c] * taps[c * width + j];
        }
        y[t * channels + c] = sum * Sigmoid(sum);
      }
    }
    return y;
  };
  Matrix q = project("q"), k = project("k"), v = project("v");
  const Matrix f = Linear(Linear(x, hidden, p + "f_a_proj.weight", d), d, p + "f_b_proj.weight", channels);
  const Matrix b = Linear(x, hidden, p + "b_proj.weight", heads);
  const Matrix gate = config_.use_full_rank_gate
                          ? Linear(x, hidden, p + "g_proj.weight", channels)
                          : Linear(Linear(x, hidden, p + "g_a_proj.weight", d), d, p + "g_b_proj.weight", channels);
  const std::vector<double>& a_log = Tensor(p + "A_log");
  const std::vector<double>& dt_bias = Tensor(p + "dt_bias");
  const std::vector<double>& o_norm = Tensor(p + "o_norm.weight");

  Matrix out(tokens_ * channels);
  for (int64_t h = 0; h < heads; ++h) {
    std::vector<double> state(d * d, 0.0);
    for (int64_t t = 0; t < tokens_; ++t) {
      double* qt = &q[t * channels + h * d];
      double* kt = &k[t * channels + h * d];
      const double* vt = &v[t * channels + h * d];
      double qq = 0, kk = 0;
      for (int64_t c = 0; c < d; ++c) qq += qt[c] * qt[c], kk += kt[c] * kt[c];
      for (int64_t c = 0; c < d; ++c) {
        qt[c] = qt[c] / std::sqrt(qq + 1e-6) / std::sqrt(static_cast<double>(d));
        kt[c] = kt[c] / std::sqrt(kk + 1e-6);
      }
      const double beta = Sigmoid(b[t * heads + h]);
      for (int64_t c = 0; c < d; ++c) {
        const double z = f[t * channels + h * d + c] + dt_bias[h * d + c];
        const double g = config_.kda_gate == KdaGate::kBounded
                             ? config_.gate_lower_bound * Sigmoid(std::exp(a_log[h]) * z)
                             : -std::exp(a_log[h]) * Softplus(z);
        for (int64_t e = 0; e < d; ++e) state[c * d + e] *= std::exp(g);
      }
      std::vector<double> o(d, 0.0);
      for (int64_t e = 0; e < d; ++e) {
        double predicted = 0;
        for (int64_t c = 0; c < d; ++c) predicted += kt[c] * state[c * d + e];
        const double u = beta * (vt[e] - predicted);
        for (int64_t c = 0; c < d; ++c) state[c * d + e] += kt[c] * u;
        for (int64_t c = 0; c < d; ++c) o[e] += qt[c] * state[c * d + e];
      }
      double sum = 0;
      for (double value : o) sum += value * value;
      const double scale = 1 / std::sqrt(sum / static_cast<double>(d) + config_.rms_norm_eps);
      for (int64_t e = 0; e < d; ++e) {
        out[t * channels + h * d + e] = o_norm[e] * o[e] * scale * Sigmoid(gate[t * channels + h * d + e]);
      }
    }
  }
  return Linear(out, channels, p + "o_proj.weight", hidden);
}

ReferenceModel::Matrix ReferenceModel::Mla(const Matrix& x, const std::string& p) {
  const int64_t heads = config_.num_attention_heads, nope = config_.qk_nope_head_dim, rope = config_.qk_rope_head_dim;
  const int64_t latent = config_.kv_lora_rank, value = config_.v_head_dim, hidden = config_.hidden_size;
  const int64_t key = nope + rope, line = latent + rope;
  const double latent_eps = config_.latent_norm_eps;
  const Matrix q = config_.q_lora_rank > 0
                       ? Linear(RmsNorm(Linear(x, hidden, p + "q_a_proj.weight", config_.q_lora_rank),
                                        config_.q_lora_rank, p + "q_a_layernorm.weight", latent_eps),
                                config_.q_lora_rank, p + "q_b_proj.weight", heads * key)
                       : Linear(x, hidden, p + "q_proj.weight", heads * key);
  const Matrix kv_a = Linear(x, hidden, p + "kv_a_proj_with_mqa.weight", line);
  Matrix lat(tokens_ * latent);
  for (int64_t t = 0; t < tokens_; ++t) std::copy_n(&kv_a[t * line], latent, &lat[t * latent]);
  const Matrix kv = Linear(RmsNorm(lat, latent, p + "kv_a_layernorm.weight", latent_eps), latent,
                           p + "kv_b_proj.weight", heads * (nope + value));
  Matrix out(tokens_ * heads * value);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens_; ++t) {
      std::vector<double> s(t + 1);
      const double* qt = &q[(t * heads + h) * key];
      for (int64_t j = 0; j <= t; ++j) {
        double sum = 0;
        for (int64_t c = 0; c < nope; ++c) sum += qt[c] * kv[(j * heads + h) * (nope + value) + c];
        for (int64_t c = 0; c < rope; ++c) sum += qt[nope + c] * kv_a[j * line + latent + c];
        s[j] = sum / std::sqrt(static_cast<double>(key));
      }
      const double top = *std::max_element(s.begin(), s.end());
      double total = 0;
      for (double& w : s) total += w = std::exp(w - top);
      for (int64_t c = 0; c < value; ++c) {
        double sum = 0;
        for (int64_t j = 0; j <= t; ++j) sum += s[j] * kv[(j * heads + h) * (nope + value) + nope + c];
        out[(t * heads + h) * value + c] = sum / total;
      }
    }
  }
  if (config_.mla_use_output_gate) {
    const Matrix gate = Linear(x, hidden, p + "g_proj.weight", heads * value);
    for (size_t i = 0; i < out.size(); ++i) out[i] *= Sigmoid(gate[i]);
  }
  return Linear(out, heads * value, p + "o_proj.weight", hidden);
}

ReferenceModel::Matrix ReferenceModel::Moe(const Matrix& x, const std::string& p, Output* output) {
  const int64_t hidden = config_.hidden_size, width = config_.expert_width(), inner = config_.moe_intermediate_size;
  const int32_t experts = config_.num_experts, top_k = config_.num_experts_per_token;
  const Matrix logits = Linear(x, hidden, p + "gate.weight", experts);
  const std::vector<double>& bias = Tensor(p + "gate.e_score_correction_bias");
  const bool latent = config_.routed_expert_hidden_size > 0;
  const Matrix z = latent ? Linear(x, hidden, p + "routed_expert_down_proj.weight", width) : x;
  Matrix y(tokens_ * width, 0.0);
  std::vector<int32_t> chosen;
  std::vector<double> margins;
  for (int64_t t = 0; t < tokens_; ++t) {
    std::vector<double> score(experts), biased(experts);
    double sum = 0;
    for (int32_t e = 0; e < experts; ++e) {
      const double l = logits[t * experts + e];
      score[e] = config_.router_score == RouterScore::kSigmoid ? Sigmoid(l) : std::exp(l);
      sum += score[e];
    }
    if (config_.router_score == RouterScore::kSoftmax) {
      for (double& s : score) s /= sum;
    }
    for (int32_t e = 0; e < experts; ++e) biased[e] = score[e] + bias[e];
    if (config_.num_expert_group > config_.topk_group) {
      const int32_t groups = config_.num_expert_group, size = experts / groups;
      std::vector<std::pair<double, int32_t>> best(groups);
      for (int32_t g = 0; g < groups; ++g) {
        std::vector<double> in_group(biased.begin() + g * size, biased.begin() + (g + 1) * size);
        std::sort(in_group.rbegin(), in_group.rend());
        best[g] = {-(in_group[0] + (size > 1 ? in_group[1] : 0)), g};
      }
      std::sort(best.begin(), best.end());
      for (int32_t i = config_.topk_group; i < groups; ++i) {
        std::fill_n(biased.begin() + best[i].second * size, size, -std::numeric_limits<double>::infinity());
      }
    }
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return biased[a] > biased[b]; });
    margins.push_back(top_k < experts ? biased[order[top_k - 1]] - biased[order[top_k]] : 1.0);
    order.resize(top_k);
    std::sort(order.begin(), order.end());
    double weight_sum = 0;
    for (int32_t e : order) weight_sum += score[e];
    for (int32_t e : order) {
      double w = score[e];
      if (config_.moe_renormalize && top_k > 1) w /= weight_sum + 1e-20;
      w *= config_.routed_scaling_factor;
      const Matrix in(z.begin() + t * width, z.begin() + (t + 1) * width);
      const Matrix e_out = Mlp(in, p + "experts." + std::to_string(e) + ".", "w1", "w3", "w2", width, inner);
      for (int64_t c = 0; c < width; ++c) y[t * width + c] += w * e_out[c];
      chosen.push_back(e);
    }
  }
  output->experts.push_back(std::move(chosen));
  output->margins.push_back(std::move(margins));
  if (latent) {
    if (config_.latent_moe_use_norm) y = RmsNorm(y, width, p + "routed_expert_norm.weight", config_.rms_norm_eps);
    y = Linear(y, width, p + "routed_expert_up_proj.weight", hidden);
  }
  if (config_.num_shared_experts > 0) {
    const Matrix shared =
        Mlp(x, p + "shared_experts.", "gate_proj", "up_proj", "down_proj", hidden, config_.shared_intermediate_size());
    for (size_t i = 0; i < y.size(); ++i) y[i] += shared[i];
  }
  return y;
}

ReferenceModel::Matrix ReferenceModel::Mix(const std::vector<Matrix>& sources, const std::string& p) {
  const int64_t hidden = config_.hidden_size;
  const std::vector<double>& norm = Tensor(p + "norm.weight");
  const std::vector<double>& proj = Tensor(p + "proj.weight");
  Matrix out(tokens_ * hidden, 0.0);
  for (int64_t t = 0; t < tokens_; ++t) {
    std::vector<double> s;
    for (const Matrix& v : sources) {
      double square = 0, dot = 0;
      for (int64_t c = 0; c < hidden; ++c) {
        square += v[t * hidden + c] * v[t * hidden + c];
        dot += v[t * hidden + c] * norm[c] * proj[c];
      }
      s.push_back(dot / std::sqrt(square / static_cast<double>(hidden) + config_.rms_norm_eps));
    }
    const double top = *std::max_element(s.begin(), s.end());
    double total = 0;
    for (double& w : s) total += w = std::exp(w - top);
    for (size_t j = 0; j < sources.size(); ++j) {
      for (int64_t c = 0; c < hidden; ++c) out[t * hidden + c] += s[j] / total * sources[j][t * hidden + c];
    }
  }
  return out;
}

ReferenceModel::Output ReferenceModel::Forward(const std::vector<int32_t>& tokens) {
  const int64_t hidden = config_.hidden_size;
  tokens_ = static_cast<int64_t>(tokens.size());
  Output output;
  const std::vector<double>& table = Tensor("model.embed_tokens.weight");
  Matrix stream(tokens_ * hidden);
  for (int64_t t = 0; t < tokens_; ++t) std::copy_n(&table[tokens[t] * hidden], hidden, &stream[t * hidden]);
  auto add = [](Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  };

  std::vector<Matrix> blocks;
  const int32_t block_size = config_.attn_res_block_size;
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    auto attention = [&](const Matrix& h) {
      const Matrix x = RmsNorm(h, hidden, p + "input_layernorm.weight", config_.rms_norm_eps);
      return config_.layers[layer] == LayerKind::kKda ? Kda(x, p + "self_attn.") : Mla(x, p + "self_attn.");
    };
    auto feed_forward = [&](const Matrix& h) {
      const Matrix x = RmsNorm(h, hidden, p + "post_attention_layernorm.weight", config_.rms_norm_eps);
      if (config_.IsMoe(layer)) return Moe(x, p + "block_sparse_moe.", &output);
      return Mlp(x, p + "mlp.", "gate_proj", "up_proj", "down_proj", hidden, config_.intermediate_size);
    };
    if (block_size == 0) {
      stream = add(stream, attention(stream));
      stream = add(stream, feed_forward(stream));
      continue;
    }
    auto with = [&](const Matrix& live) {
      std::vector<Matrix> sources = blocks;
      sources.push_back(live);
      return sources;
    };
    const Matrix mixed = blocks.empty() ? stream : Mix(with(stream), p + "self_attention_res_");
    const bool close = layer % block_size == 0;
    if (close) blocks.push_back(stream);
    const Matrix a = attention(mixed);
    stream = close ? a : add(stream, a);
    stream = add(stream, feed_forward(Mix(with(stream), p + "mlp_res_")));
  }
  if (block_size != 0) {
    std::vector<Matrix> sources = blocks;
    sources.push_back(stream);
    stream = Mix(sources, "model.output_attn_res_");
  }
  stream = RmsNorm(stream, hidden, "model.norm.weight", config_.rms_norm_eps);
  output.logits = Linear(stream, hidden, config_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
                         config_.vocab_size);
  return output;
}

}  // namespace k3::testing
