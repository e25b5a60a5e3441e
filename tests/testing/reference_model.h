#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/model/model_config.h"

namespace k3::testing {

// The text model in double precision by plain loops over the published formulas: expanded MLA, token recurrence, one
// sequence, no cache. Written apart from the product code, to compare it with on any shape. Slow; for tiny shapes.
class ReferenceModel {
 public:
  // Yields the named tensor (name without the "language_model." prefix) as doubles, experts dequantised
  // ("...experts.3.w1.weight"); empty when there is none.
  using TensorGetter = std::function<std::vector<double>(const std::string& name)>;

  ReferenceModel(const ModelConfig& config, TensorGetter getter) : config_(config), getter_(std::move(getter)) {}

  struct Output {
    std::vector<double> logits;                 // [T, V]
    std::vector<std::vector<int32_t>> experts;  // per MoE layer [T, top_k] ascending
    std::vector<std::vector<double>> margins;   // per MoE layer [T]: gap between the last chosen and the next score
  };
  Output Forward(const std::vector<int32_t>& tokens);

 private:
  using Matrix = std::vector<double>;  // row-major, row count implied
  const std::vector<double>& Tensor(const std::string& name);
  Matrix Linear(const Matrix& x, int64_t in, const std::string& weight, int64_t out);
  Matrix RmsNorm(const Matrix& x, int64_t width, const std::string& weight, double eps);
  Matrix Mlp(const Matrix& x, const std::string& prefix, const char* gate, const char* up, const char* down, int64_t in,
             int64_t inner);
  Matrix Kda(const Matrix& x, const std::string& prefix);
  Matrix Mla(const Matrix& x, const std::string& prefix);
  Matrix Moe(const Matrix& x, const std::string& prefix, Output* output);
  Matrix Mix(const std::vector<Matrix>& sources, const std::string& prefix);
  double Activate(double gate, double up) const;

  const ModelConfig& config_;
  TensorGetter getter_;
  std::map<std::string, std::vector<double>> cache_;
  int64_t tokens_ = 0;
};

}  // namespace k3::testing
