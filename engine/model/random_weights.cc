#include "engine/model/random_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "kernels/core/bfloat16.h"

namespace k3 {
namespace {

constexpr float kMxfp4Rms = 2.93f;  // of the sixteen E2M1 values, equally likely

// The finaliser of SplitMix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t RandomBits(uint64_t seed, uint64_t index) { return Mix(Mix(seed) ^ index); }

uint64_t RandomSeed(uint64_t seed, std::string_view tensor_name, int32_t rank) {
  uint64_t hash = Mix(seed + static_cast<uint64_t>(rank) * 0x632be59bd9b4e019u);
  for (char c : tensor_name) hash = Mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

float RandomNormal(uint64_t seed, uint64_t index) {
  const uint64_t bits = RandomBits(seed, index);
  const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;  // in (0, 1)
  const float angle = static_cast<float>((bits >> 8) & 0xffffff) * 0x1p-24f * 2 * std::numbers::pi_v<float>;
  return std::sqrt(-2 * std::log(u)) * std::cos(angle);
}

float RandomStddev(const TensorSpec& spec) {
  if (spec.role == TensorRole::kEmbedding) return 1.0f;
  return 1.0f / std::sqrt(static_cast<float>(spec.shape.back()));
}

float RandomElement(const TensorSpec& spec, uint64_t seed, uint64_t index) {
  switch (spec.role) {
    case TensorRole::kALog:  // rates from 1 to 16
      return std::log(1 + 15 * static_cast<float>(RandomBits(seed, index) >> 40) * 0x1p-24f);
    case TensorRole::kQConv:
    case TensorRole::kKConv:
    case TensorRole::kVConv:
      return 0.5f * RandomNormal(seed, index);
    case TensorRole::kDtBias:
      return RandomNormal(seed, index);
    case TensorRole::kAttentionMixProj:
    case TensorRole::kMlpMixProj:
    case TensorRole::kOutputMixProj:
      return RandomStddev(spec) * RandomNormal(seed, index);
    case TensorRole::kRouterBias:
      return 0;
    default:
      return 1;
  }
}

void WriteRandomBf16(const HostTensor& tensor, uint16_t* out) {
  const uint64_t count = static_cast<uint64_t>(tensor.elements());
  for (uint64_t i = 0; i < count; ++i) {
    out[i] = FloatToBf16(tensor.random_stddev * RandomNormal(tensor.random_seed, i));
  }
}

void WriteRandomBytes(uint64_t seed, uint8_t* out, uint64_t count) {
  for (uint64_t i = 0; i < count; i += 8) {
    const uint64_t bits = RandomBits(seed, i / 8);
    std::memcpy(out + i, &bits, std::min<uint64_t>(8, count - i));
  }
}

uint8_t RandomScaleCode(float stddev) {
  const int exponent = static_cast<int>(std::lround(std::log2(stddev / kMxfp4Rms)));
  return static_cast<uint8_t>(std::clamp(exponent + 127, 1, 254));
}

}  // namespace k3
