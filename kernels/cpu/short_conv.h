#pragma once

#include <cstdint>

#include "kernels/op_params.h"

namespace k3 {

// The short convolution reads the last W raw inputs of a sequence: rows of this step's qkv, and before them the W - 1
// rows that the state slot keeps.
class ConvHistory {
 public:
  // `state` [width - 1, channels] oldest first; `inputs` the sequence's first row of this step.
  ConvHistory(const float* state, const float* inputs, int64_t input_stride, int64_t channels, int width)
      : state_(state), inputs_(inputs), input_stride_(input_stride), channels_(channels), width_(width) {}

  // Tap j of the token at `index` within the step: the input that lies width - 1 - j tokens before it.
  const float* Row(int64_t index, int tap) const {
    const int64_t row = index + tap - (width_ - 1);
    return row >= 0 ? inputs_ + row * input_stride_ : state_ + (row + width_ - 1) * channels_;
  }

 private:
  const float* state_;
  const float* inputs_;
  int64_t input_stride_;
  int64_t channels_;
  int width_;
};

// Stores the raw inputs that the token after `count` tokens of this step will need, to `to` [width - 1, channels]. `to`
// may be the slot that the history reads: rows move towards the front.
void StoreConvState(const ConvHistory& history, int64_t count, int64_t channels, int width, float* to);

// taps [channels, width] to [width, channels].
void TransposeTaps(const float* taps, int64_t channels, int width, float* out);

}  // namespace k3
