#include "tests/kernels/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/core/bfloat16.h"

namespace k3::testing::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double Silu(double x) { return x * Sigmoid(x); }
double Softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

double Activate(double gate, double up, const ActivationSpec& spec) {
  if (spec.kind == Activation::kSwiglu) return Silu(gate) * up;
  const double capped = spec.linear_beta > 0 ? spec.linear_beta * std::tanh(up / double{spec.linear_beta}) : up;
  return spec.beta * std::tanh(gate / double{spec.beta}) * Sigmoid(gate) * capped;
}

}  // namespace

Doubles ToDouble(const Floats& x) { return Doubles(x.begin(), x.end()); }

Doubles Linear(const Doubles& x, const Floats& w, int64_t rows, int64_t in, int64_t out) {
  Doubles y(static_cast<size_t>(rows * out));
  Doubles transposed(static_cast<size_t>(in * out));  // outputs innermost, so that the compiler vectorises over them
  for (int64_t n = 0; n < out; ++n) {
    for (int64_t k = 0; k < in; ++k) transposed[k * out + n] = double{w[n * in + k]};
  }
  for (int64_t r = 0; r < rows; ++r) {
    double* row = y.data() + r * out;
    for (int64_t k = 0; k < in; ++k) {
      const double scalar = x[r * in + k];
      const double* weights = transposed.data() + k * out;
      for (int64_t n = 0; n < out; ++n) row[n] += scalar * weights[n];
    }
  }
  return y;
}

Doubles RmsNorm(const Doubles& x, const Floats& weight, double eps, int64_t rows, int64_t cols) {
  Doubles y(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t c = 0; c < cols; ++c) sum += x[r * cols + c] * x[r * cols + c];
    const double scale = 1 / std::sqrt(sum / static_cast<double>(cols) + eps);
    for (int64_t c = 0; c < cols; ++c) y[r * cols + c] = x[r * cols + c] * scale * double{weight[c]};
  }
  return y;
}

AttnResResult AttnRes(const std::vector<Doubles>& blocks, const Floats& query, double mix_eps,
                      const Floats& norm_weight, double norm_eps, int64_t rows, int64_t cols) {
  AttnResResult result;
  result.mix.resize(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    Doubles scores;
    for (const Doubles& block : blocks) {
      double squares = 0, dot = 0;
      for (int64_t c = 0; c < cols; ++c) {
        const double v = block[r * cols + c];
        squares += v * v;
        if (blocks.size() > 1) dot += v * double{query[c]};
      }
      scores.push_back(dot / std::sqrt(squares / static_cast<double>(cols) + mix_eps));
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& s : scores) sum += s = std::exp(s - top);
    for (size_t j = 0; j < blocks.size(); ++j) {
      for (int64_t c = 0; c < cols; ++c) result.mix[r * cols + c] += scores[j] / sum * blocks[j][r * cols + c];
    }
  }
  result.normed = RmsNorm(result.mix, norm_weight, norm_eps, rows, cols);
  return result;
}

Doubles GatedActivation(const Doubles& gate_up, const ActivationSpec& spec, int64_t rows, int64_t width) {
  Doubles out(static_cast<size_t>(rows * width));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      out[r * width + c] = Activate(gate_up[r * 2 * width + c], gate_up[r * 2 * width + width + c], spec);
    }
  }
  return out;
}

RouterResult Router(const Doubles& logits, const Floats& bias, const RouterTopKParams& p) {
  RouterResult result;
  const int64_t experts = p.experts;
  for (int64_t t = 0; t < p.tokens; ++t) {
    Doubles scores(logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
    if (p.score == RouterScore::kSigmoid) {
      for (double& s : scores) s = Sigmoid(s);
    } else {
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& s : scores) sum += s = std::exp(s - top);
      for (double& s : scores) s /= sum;
    }
    Doubles biased = scores;
    if (!bias.empty()) {
      for (int64_t e = 0; e < experts; ++e) biased[e] += double{bias[e]};
    }
    Doubles eligible = biased;
    if (p.topk_group < p.groups) {
      const int64_t size = experts / p.groups;
      std::vector<std::pair<double, int64_t>> groups;
      for (int64_t g = 0; g < p.groups; ++g) {
        Doubles members(biased.begin() + g * size, biased.begin() + (g + 1) * size);
        std::sort(members.rbegin(), members.rend());
        groups.push_back({-(members[0] + (size > 1 ? members[1] : 0)), g});
      }
      std::sort(groups.begin(), groups.end());
      for (int64_t i = p.topk_group; i < p.groups; ++i) {
        for (int64_t e = 0; e < size; ++e) eligible[groups[i].second * size + e] = -kInf;
      }
    }
    std::vector<int32_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return eligible[a] > eligible[b]; });
    const bool complete = p.top_k == experts || p.topk_group < p.groups;
    result.margin.push_back(complete ? kInf : eligible[order[p.top_k - 1]] - eligible[order[p.top_k]]);
    std::sort(order.begin(), order.begin() + p.top_k);
    double sum = 0;
    for (int32_t j = 0; j < p.top_k; ++j) sum += p.biased_weights ? biased[order[j]] : scores[order[j]];
    for (int32_t j = 0; j < p.top_k; ++j) {
      const double weight = p.biased_weights ? biased[order[j]] : scores[order[j]];
      result.ids.push_back(order[j]);
      result.weights.push_back((p.renormalize ? weight / (sum + 1e-20) : weight) * double{p.scale});
    }
  }
  return result;
}

void RoundToMxfp8(Doubles& values) {
  std::vector<double> magnitudes;  // of E4M3: 0, subnormals, then normal ones up to 448
  for (int m = 0; m < 8; ++m) magnitudes.push_back(m * std::exp2(-9));
  for (int e = -6; e <= 8; ++e) {
    for (int m = 0; m < (e == 8 ? 7 : 8); ++m) magnitudes.push_back((1 + m / 8.0) * std::exp2(e));
  }
  for (size_t begin = 0; begin < values.size(); begin += 32) {
    double largest = 0;
    for (size_t i = begin; i < begin + 32; ++i) largest = std::max(largest, std::abs(values[i]));
    double scale = std::exp2(-126);
    while (largest / scale > 448) scale *= 2;
    for (size_t i = begin; i < begin + 32; ++i) {
      const double x = std::abs(values[i]) / scale;
      size_t best = 0;
      for (size_t j = 1; j < magnitudes.size(); ++j) {
        const double gain = std::abs(magnitudes[best] - x) - std::abs(magnitudes[j] - x);
        if (gain > 0 || (gain == 0 && j % 2 == 0)) best = j;  // an even place in the list is an even mantissa
      }
      values[i] = std::copysign(magnitudes[best] * scale, values[i]);
    }
  }
}

Doubles Moe(const Doubles& x, const std::vector<int32_t>& ids, const Doubles& weights, int32_t top_k,
            const std::vector<Expert>& experts, int32_t first, const ActivationSpec& spec, int64_t rows, int64_t in,
            int64_t inner, bool mxfp8_inputs) {
  Doubles y(static_cast<size_t>(rows * in));
  for (int64_t t = 0; t < rows; ++t) {
    Doubles row(x.begin() + t * in, x.begin() + (t + 1) * in);
    if (mxfp8_inputs) RoundToMxfp8(row);
    for (int32_t j = 0; j < top_k; ++j) {
      const int32_t e = ids[t * top_k + j] - first;
      if (e < 0 || e >= static_cast<int32_t>(experts.size())) continue;
      Doubles gate_up = Linear(row, experts[e].w1, 1, in, inner);
      const Doubles up = Linear(row, experts[e].w3, 1, in, inner);
      gate_up.insert(gate_up.end(), up.begin(), up.end());
      Doubles activated = GatedActivation(gate_up, spec, 1, inner);
      if (mxfp8_inputs) RoundToMxfp8(activated);
      const Doubles out = Linear(activated, experts[e].w2, 1, inner, in);
      for (int64_t c = 0; c < in; ++c) y[t * in + c] += weights[t * top_k + j] * out[c];
    }
  }
  return y;
}

double KdaLogDecay(KdaGate kind, double lower_bound, double a_log, double z) {
  return kind == KdaGate::kBounded ? lower_bound * Sigmoid(std::exp(a_log) * z) : -std::exp(a_log) * Softplus(z);
}

Doubles KdaRecurrence(const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& g, const Doubles& beta,
                      int64_t tokens, int64_t d, Doubles& state) {
  Doubles out(static_cast<size_t>(tokens * d));
  Doubles u(static_cast<size_t>(d));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < d; ++i) {
      const double decay = std::exp(g[t * d + i]);
      for (int64_t c = 0; c < d; ++c) state[i * d + c] *= decay;
    }
    for (int64_t c = 0; c < d; ++c) u[c] = v[t * d + c];
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t c = 0; c < d; ++c) u[c] -= k[t * d + i] * state[i * d + c];
    }
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t c = 0; c < d; ++c) {
        state[i * d + c] += k[t * d + i] * beta[t] * u[c];
        out[t * d + c] += q[t * d + i] * state[i * d + c];
      }
    }
  }
  return out;
}

Doubles Kda(const KdaInput& in, KdaState& state, std::vector<KdaState>* after) {
  const int64_t d = in.head_dim, width = in.heads * d, channels = 3 * width, taps = in.conv_width;
  Doubles out(static_cast<size_t>(in.tokens * width));
  for (int64_t t = 0; t < in.tokens; ++t) {
    // Inputs of the last `taps` positions, the current one last.
    Doubles window = state.conv;
    for (int64_t c = 0; c < channels; ++c) window.push_back(double{in.qkv[t * channels + c]});
    Doubles conv(window.end() - channels, window.end());
    if (!in.conv_taps.empty()) {
      std::fill(conv.begin(), conv.end(), 0.0);
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t j = 0; j < taps; ++j) conv[c] += double{in.conv_taps[c * taps + j]} * window[j * channels + c];
        conv[c] = Silu(conv[c]);
      }
      state.conv.assign(window.begin() + channels, window.end());
    }

    for (int64_t h = 0; h < in.heads; ++h) {
      const auto slice = [&](int64_t part) {
        const auto begin = conv.begin() + part * width + h * d;
        return Doubles(begin, begin + d);
      };
      Doubles q = slice(0), k = slice(1);
      const Doubles v = slice(2);
      const auto inverse_norm = [](const Doubles& x) {
        return 1 / std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0) + 1e-6);
      };
      const double q_scale = inverse_norm(q) / std::sqrt(static_cast<double>(d)), k_scale = inverse_norm(k);
      for (double& x : q) x *= q_scale;
      for (double& x : k) x *= k_scale;
      Doubles g(static_cast<size_t>(d));
      for (int64_t i = 0; i < d; ++i) {
        const double z = double{in.decay[t * width + h * d + i]} + double{in.dt_bias[h * d + i]};
        g[i] = KdaLogDecay(in.gate_kind, in.lower_bound, double{in.a_log[h]}, z);
      }
      const Doubles beta{Sigmoid(double{in.beta[t * in.heads + h]})};
      const auto head_begin = state.state.begin() + h * d * d;
      Doubles head(head_begin, head_begin + d * d);
      const Doubles o = KdaRecurrence(q, k, v, g, beta, 1, d, head);
      if (in.bf16_state) {
        for (double& x : head) x = double{Bf16ToFloat(FloatToBf16(static_cast<float>(x)))};
      }
      std::copy(head.begin(), head.end(), head_begin);
      if (in.norm_weight.empty()) {
        std::copy(o.begin(), o.end(), out.begin() + t * width + h * d);
        continue;
      }
      const Doubles normed = RmsNorm(o, in.norm_weight, in.norm_eps, 1, d);
      for (int64_t i = 0; i < d; ++i) {
        out[t * width + h * d + i] = normed[i] * Sigmoid(double{in.gate[t * width + h * d + i]});
      }
    }
    if (after != nullptr) after->push_back(state);
  }
  return out;
}

Doubles Mla(const MlaInput& in) {
  const int64_t line = in.latent + in.rope, rows_per_head = in.nope + in.value;
  Doubles out(static_cast<size_t>(in.tokens * in.heads * in.value));
  for (int64_t t = 0; t < in.tokens; ++t) {
    for (int64_t h = 0; h < in.heads; ++h) {
      const float* q = in.q.data() + (t * in.heads + h) * (in.nope + in.rope);
      const float* keys = in.kv_b.data() + h * rows_per_head * in.latent;
      const float* values = keys + in.nope * in.latent;
      // The absorbed query costs latent work per position instead of nope * latent.
      Doubles query(static_cast<size_t>(line));
      for (int64_t n = 0; n < in.nope; ++n) {
        for (int64_t c = 0; c < in.latent; ++c) query[c] += double{q[n]} * double{keys[n * in.latent + c]};
      }
      for (int64_t c = 0; c < in.rope; ++c) query[in.latent + c] = double{q[in.nope + c]};
      const int64_t length = in.context + t + 1;
      Doubles p(static_cast<size_t>(length));
      for (int64_t j = 0; j < length; ++j) {
        p[j] = in.scale * std::inner_product(query.begin(), query.end(), in.lines.begin() + j * line, 0.0);
      }
      const double top = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - top);
      Doubles mix(static_cast<size_t>(in.latent));
      for (int64_t j = 0; j < length; ++j) {
        for (int64_t c = 0; c < in.latent; ++c) mix[c] += p[j] / sum * in.lines[j * line + c];
      }
      for (int64_t v = 0; v < in.value; ++v) {
        double value = 0;
        for (int64_t c = 0; c < in.latent; ++c) value += mix[c] * double{values[v * in.latent + c]};
        const int64_t at = (t * in.heads + h) * in.value + v;
        out[at] = in.gate.empty() ? value : value * Sigmoid(double{in.gate[at]});
      }
    }
  }
  return out;
}

SampleResult Sample(const Floats& logits, const SampleRow& row, const std::vector<LogitEdit>& edits,
                    const std::vector<uint32_t>& mask) {
  SampleResult result;
  Doubles z = ToDouble(logits);
  const bool bad = std::any_of(z.begin(), z.end(), [](double x) { return std::isnan(x) || x == kInf; });
  const double raw_top = bad ? 0 : *std::max_element(z.begin(), z.end());
  if (bad || raw_top == -kInf) {
    result.status = SampleStatus::kNonFinite;
    return result;
  }
  double total = 0;
  for (double x : z) total += std::exp(x - raw_top);
  for (double x : z) result.log_probabilities.push_back(x - raw_top - std::log(total));

  for (int32_t e = row.edit_begin; e < row.edit_end; ++e) {
    const LogitEdit& edit = edits[e];
    if (edit.id < 0 || edit.id >= static_cast<int32_t>(z.size())) continue;
    double& x = z[edit.id];
    if (edit.kind == LogitEditKind::kBias) {
      x += double{edit.value};
      continue;
    }
    if (edit.count > 0 || edit.in_prompt != 0)
      x = x > 0 ? x / double{row.repetition_penalty} : x * double{row.repetition_penalty};
    if (edit.count > 0) x -= double{row.presence_penalty} + double{row.frequency_penalty} * edit.count;
  }
  for (size_t i = 0; row.mask_row >= 0 && i < z.size(); ++i) {
    if ((mask[i / 32] >> (i % 32) & 1) == 0) z[i] = -kInf;
  }
  result.edited = z;
  const double top = *std::max_element(z.begin(), z.end());
  if (top == -kInf) {
    result.status = SampleStatus::kNothingAllowed;
    return result;
  }
  result.greedy = static_cast<int32_t>(std::max_element(z.begin(), z.end()) - z.begin());
  result.kept.assign(z.size(), 0);
  if (row.temperature == 0) {
    result.kept[result.greedy] = 1;
    return result;
  }
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return z[a] > z[b]; });
  size_t kept = order.size();
  if (row.top_k > 0) kept = std::min<size_t>(kept, static_cast<size_t>(row.top_k));
  const auto probability = [&](int32_t id) { return std::exp((z[id] - top) / double{row.temperature}); };
  if (row.top_p < 1) {
    double mass = 0, reached = 0;
    for (size_t i = 0; i < kept; ++i) mass += probability(order[i]);
    size_t n = 0;
    while (n < kept) {
      reached += probability(order[n++]);
      if (reached >= double{row.top_p} * mass) break;
    }
    kept = n;
  }
  for (size_t i = 0; i < kept; ++i) {
    const double p = probability(order[i]);
    if (p >= double{row.min_p}) result.kept[order[i]] = p;
  }
  return result;
}

int32_t Draw(const SampleResult& result, double uniform) {
  const double total = std::accumulate(result.kept.begin(), result.kept.end(), 0.0);
  double cumulative = 0;
  int32_t last = -1;
  for (size_t i = 0; i < result.kept.size(); ++i) {
    if (result.kept[i] <= 0) continue;
    last = static_cast<int32_t>(i);
    cumulative += result.kept[i];
    if (cumulative > uniform * total) break;
  }
  return last;
}

}  // namespace k3::testing::oracle
