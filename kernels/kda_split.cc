#include "kernels/kda_split.h"

#include <algorithm>
#include <cmath>

namespace k3 {
namespace {

constexpr int64_t kTile = 16;
// Microseconds: a block besides its tokens, a token of a block, a segment of the composition, a token and run after the
// first segment in the correction, with the norm also of the first; two more launches.
constexpr double kBlock = 16, kCoreToken = 0.073, kToken = 0.112, kSegment = 1.1, kCorrected = 0.00025,
                 kNormed = 0.0002;
constexpr double kLaunches = 10;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace

KdaSegments ChooseKdaSegments(int64_t tokens, double runs, bool core, int64_t multiprocessors) {
  const double token = core ? kCoreToken : kToken;
  KdaSegments best;
  double least = token * static_cast<double>(tokens) - kLaunches;
  const double rest = static_cast<double>(multiprocessors) - runs;
  for (int64_t segments = 2; segments <= kMostKdaSegments && rest >= 1; ++segments) {
    const int64_t waves = static_cast<int64_t>(std::ceil(2 * runs * static_cast<double>(segments - 1) / rest));
    const int64_t others = RoundUp(CeilDiv(tokens, waves + segments - 1), kTile);
    const int64_t first = RoundUp(tokens - others * (segments - 1), kTile);
    if (std::min(first, others) < kLeastKdaSegment) continue;
    const double walk = std::max(token * static_cast<double>(first),
                                 static_cast<double>(waves) * (token * static_cast<double>(others) + kBlock) - kBlock);
    const double us = walk + kSegment * static_cast<double>(segments) +
                      kCorrected * static_cast<double>(tokens - first) * runs +
                      (core ? 0 : kNormed * static_cast<double>(first) * runs);
    if (us < least) least = us, best = {first, others};
  }
  return best;
}

std::string KdaSegmentsText(int64_t heads) {
  std::string text;
  for (const int64_t tokens : {2048, 8192, 32768}) {
    const KdaSegments cut = ChooseKdaSegments(tokens, static_cast<double>(heads), false, 132);
    text += (text.empty() ? "" : ", ") + std::to_string(tokens) + " tokens ";
    text += cut.first == 0
                ? "whole"
                : std::to_string(cut.first) + " + " + std::to_string(CeilDiv(tokens - cut.first, cut.others)) + " x " +
                      std::to_string(cut.others);
  }
  return text;
}

}  // namespace k3
