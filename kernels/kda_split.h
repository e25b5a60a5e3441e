#pragma once

#include <cstdint>
#include <string>

namespace k3 {

// How the CUDA backend cuts a run of KDA prefill (one head of one sequence) into segments that are walked in parallel:
// the first from the state, the others from zero, each of these with its transition beside it (spec 4.7).
struct KdaSegments {
  int64_t first = 0, others = 0;  // tokens, multiples of 16; 0: not split
};

constexpr int64_t kLeastKdaSegment = 256;  // tokens
constexpr int64_t kMostKdaSegments = 32;   // of a run

// The cheapest cut of `runs` runs of about `tokens` tokens by costs measured on an H200; `core`: without convolution
// and gated norm. First segments take one multiprocessor a run, all others two, in waves on what is left of the device,
// so the first is as long as those waves.
KdaSegments ChooseKdaSegments(int64_t tokens, double runs, bool core, int64_t multiprocessors);

// The choices for a layer of `heads` heads on a device of 132 multiprocessors, for one sequence of 2,048 to 32,768
// tokens, as one line of text without a newline.
std::string KdaSegmentsText(int64_t heads);

}  // namespace k3
