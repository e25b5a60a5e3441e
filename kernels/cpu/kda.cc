#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/core/shape_check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/short_conv.h"

// The KDA sublayer by token recurrence (spec 3.3). Three passes, each over independent outputs: convolution, norms and
// gates of every (token, head); the recurrence of every (sequence, head, slice of value columns); the gated norm of
// every (token, head).
namespace k3 {
namespace {

// One function lays out the scratch and thereby says its size.
struct KdaScratch {
  float *q, *k, *v, *decay_base, *decay_delta, *decayed_k, *o;  // [T, H, d] each
  float* beta;                                                  // [T, H]
  float* taps;                                                  // [W, 3 * H * d]
  size_t bytes;

  KdaScratch(void* base, int64_t tokens, int64_t heads, int64_t head_dim, int64_t conv_width) {
    size_t offset = 0;
    const auto take = [&](float*& pointer, int64_t count) {
      pointer = base != nullptr ? reinterpret_cast<float*>(static_cast<char*>(base) + offset) : nullptr;
      offset += (static_cast<size_t>(count) * sizeof(float) + 63) / 64 * 64;
    };
    for (float** part : {&q, &k, &v, &decay_base, &decay_delta, &decayed_k, &o}) take(*part, tokens * heads * head_dim);
    take(beta, tokens * heads);
    take(taps, conv_width * 3 * heads * head_dim);
    bytes = offset;
  }
};

constexpr int32_t kCopyTokens = 4;  // from here on copying a slice pays

void CopyRows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t rows, int64_t row_bytes) {
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to + r * to_stride, from + r * from_stride, static_cast<size_t>(row_bytes));
}

void CheckKda(const KdaParams& p) {
  const char* op = "Kda";
  CheckPointer(op, "batch", p.batch);
  const SequenceBatch& batch = *p.batch;
  const int64_t width = int64_t{p.heads} * p.head_dim;
  CheckTrue(batch.num_sequences > 0, op, std::to_string(batch.num_tokens) + " tokens belong to no sequence");
  CheckTrue(p.heads > 0 && p.head_dim > 0 && p.conv_width > 0, op,
            "heads, head_dim and conv_width must be positive, got " + std::to_string(p.heads) + ", " +
                std::to_string(p.head_dim) + ", " + std::to_string(p.conv_width));
  CheckMatrix(op, "qkv", p.qkv, batch.num_tokens, 3 * width, DType::kF32);
  CheckMatrix(op, "decay", p.decay, batch.num_tokens, width, DType::kF32);
  CheckMatrix(op, "beta", p.beta, batch.num_tokens, p.heads, DType::kF32);
  CheckMatrix(op, "gate", p.gate, batch.num_tokens, width, DType::kF32);
  CheckMatrix(op, "out", p.out, batch.num_tokens, width, DType::kF32);
  CheckTrue(p.state_dtype == DType::kF32 || p.state_dtype == DType::kBF16, op,
            std::string("state_dtype must be F32 or BF16, got ") + Name(p.state_dtype));
  CheckTrue(p.gate_kind != KdaGate::kBounded || (p.gate_lower_bound >= -5 && p.gate_lower_bound < 0), op,
            "gate_lower_bound must be in [-5, 0), got " + std::to_string(p.gate_lower_bound));
  for (const auto& [name, pointer] : {std::pair<const char*, const void*>{"dt_bias", p.dt_bias},
                                      {"a_log", p.a_log},
                                      {"state", p.state},
                                      {"scratch", p.scratch},
                                      {"token_begin", batch.token_begin},
                                      {"state_slot", batch.state_slot},
                                      {"sequence_of_token", batch.sequence_of_token}}) {
    CheckPointer(op, name, pointer);
  }
  CheckTrue((p.conv_taps == nullptr) == (p.norm_weight == nullptr), op,
            "conv_taps and norm_weight must both be given or both be null");
  if (p.conv_taps != nullptr && p.conv_width > 1) CheckPointer(op, "conv_state", p.conv_state);
}

}  // namespace

size_t CpuOps::KdaScratchBytes(int64_t tokens, int64_t, int32_t heads, int32_t head_dim, int32_t conv_width) const {
  return KdaScratch(nullptr, tokens, heads, head_dim, conv_width).bytes;
}

void CpuOps::Kda(const KdaParams& p, Stream) {
  if (p.batch != nullptr && p.batch->num_tokens == 0) return;
  CheckKda(p);
  const SequenceBatch& batch = *p.batch;
  const int64_t heads = p.heads, d = p.head_dim, width = heads * d, channels = 3 * width;
  const int32_t conv_width = p.conv_taps != nullptr ? p.conv_width : 1;
  const KdaScratch s(p.scratch, batch.num_tokens, heads, d, conv_width);
  const float* taps = p.conv_taps != nullptr ? TransposedTaps(p.conv_taps, channels, conv_width, s.taps) : nullptr;

  const auto conv_slot = [&](int32_t slot) {
    return reinterpret_cast<float*>(static_cast<char*>(p.conv_state) + slot * p.slot_stride);
  };
  // Padding has no memory and starts from zero.
  const size_t history_floats = static_cast<size_t>((conv_width - 1) * channels);
  if (no_history_.size() < history_floats) no_history_.assign(history_floats, 0.0f);
  const auto conv_history = [&](int64_t sequence) {
    const int32_t slot = batch.state_slot[sequence];
    return ConvHistory(slot >= 0 ? conv_slot(slot) : no_history_.data(),
                       p.qkv.as<float>() + batch.token_begin[sequence] * p.qkv.ld, p.qkv.ld, channels, conv_width);
  };

  // 1. Convolution with SiLU, l2norm, gates.
  ForRows(batch.num_tokens * heads, 3 * d * (conv_width + 12) + 40 * d, [&](int64_t begin, int64_t end, int thread) {
    auto** history = reinterpret_cast<const float**>(ThreadFloats(thread, 3 * conv_width * 2 + 2));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / heads, h = i % heads, sequence = batch.sequence_of_token[t];
      const ConvHistory rows = conv_history(sequence);
      KdaPrepareArgs args;
      args.head_dim = p.head_dim;
      args.conv_width = conv_width;
      args.tap_stride = channels;
      for (int part = 0; part < 3; ++part) {
        const float** part_rows = history + part * conv_width;
        for (int j = 0; j < conv_width; ++j) {
          part_rows[j] = rows.Row(t - batch.token_begin[sequence], j) + part * width + h * d;
        }
        args.history[part] = part_rows;
        args.taps[part] = taps != nullptr ? taps + part * width + h * d : nullptr;
      }
      args.decay = p.decay.as<float>() + t * p.decay.ld + h * d;
      args.dt_bias = p.dt_bias + h * d;
      args.a_log = p.a_log[h];
      args.gate_kind = p.gate_kind;
      args.lower_bound = p.gate_lower_bound;
      args.q = s.q + i * d;
      args.k = s.k + i * d;
      args.v = s.v + i * d;
      args.decay_base = s.decay_base + i * d;
      args.decay_delta = s.decay_delta + i * d;
      args.decayed_k = s.decayed_k + i * d;
      kernels_.kda_prepare(args);
      kernels_.sigmoid(p.beta.as<float>() + t * p.beta.ld + h, 1, s.beta + i);
    }
  });

  // 2. The recurrence, and one more task per sequence for its convolution state.
  const int64_t slices = (d + kKdaSlice - 1) / kKdaSlice;
  const int64_t tasks_per_sequence = heads * slices + 1;
  const auto state_slot = [&](int32_t slot) { return static_cast<char*>(p.state) + slot * p.slot_stride; };
  const int64_t element = static_cast<int64_t>(SizeOf(p.state_dtype));
  const int64_t tokens_per_sequence = batch.num_tokens / batch.num_sequences;
  ForTasks(batch.num_sequences * tasks_per_sequence, tokens_per_sequence * d * kKdaSlice,
           [&](int64_t task, int thread) {
             const int64_t sequence = task / tasks_per_sequence, part = task % tasks_per_sequence;
             const int32_t begin = batch.token_begin[sequence], end = batch.token_begin[sequence + 1];
             const int32_t* snapshot_end = batch.snapshot_row + batch.num_snapshots;
             const int32_t* snapshot =
                 batch.num_snapshots > 0 ? std::lower_bound(batch.snapshot_row, snapshot_end, begin) : snapshot_end;
             const auto slot_of = [&](const int32_t* row) { return batch.snapshot_slot[row - batch.snapshot_row]; };
             const int32_t live = batch.state_slot[sequence];

             if (part == heads * slices) {
               if (conv_width == 1) return;
               const ConvHistory rows = conv_history(sequence);
               for (; snapshot != snapshot_end && *snapshot < end; ++snapshot) {
                 StoreConvState(rows, *snapshot + 1 - begin, channels, conv_width, conv_slot(slot_of(snapshot)));
               }
               if (live >= 0) StoreConvState(rows, end - begin, channels, conv_width, conv_slot(live));
               return;
             }

             const int64_t h = part / slices, column = part % slices * kKdaSlice;
             const int64_t slice_offset = (h * d * d + column) * element;
             KdaStepArgs args;
             args.head_dim = p.head_dim;
             args.columns = static_cast<int>(std::min<int64_t>(kKdaSlice, d - column));
             args.state_dtype = p.state_dtype;
             const int64_t row_bytes = args.columns * element;
             char* const slice = live >= 0 ? state_slot(live) + slice_offset : nullptr;
             // A longer run works on a copy without gaps: in the slot the rows of a slice fill half of the cache's
             // sets.
             const bool copy = slice == nullptr || (end - begin >= kCopyTokens && d > kKdaSlice);
             if (copy) {
               args.state = ThreadFloats(thread, d * kKdaSlice);
               args.row_stride = args.columns;
             }
             if (slice == nullptr) {
               std::memset(args.state, 0, static_cast<size_t>(d * row_bytes));
             } else if (copy) {
               CopyRows(static_cast<char*>(args.state), row_bytes, slice, d * element, d, row_bytes);
             } else {
               args.state = slice;
               args.row_stride = d;
             }
             for (int32_t t = begin; t < end; ++t) {
               const int64_t i = t * heads + h;
               args.q = s.q + i * d;
               args.k = s.k + i * d;
               args.decay_base = s.decay_base + i * d;
               args.decay_delta = s.decay_delta + i * d;
               args.decayed_k = s.decayed_k + i * d;
               args.v = s.v + i * d + column;
               args.beta = s.beta[i];
               args.o = s.o + i * d + column;
               kernels_.kda_step(args);
               for (; snapshot != snapshot_end && *snapshot == t; ++snapshot) {
                 CopyRows(state_slot(slot_of(snapshot)) + slice_offset, d * element, static_cast<char*>(args.state),
                          args.row_stride * element, d, row_bytes);
               }
             }
             if (copy && slice != nullptr)
               CopyRows(slice, d * element, static_cast<char*>(args.state), row_bytes, d, row_bytes);
           });

  // 3. Gated RMSNorm over the head.
  ForRows(batch.num_tokens * heads, 20 * d, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / heads, column = i % heads * d;
      if (p.norm_weight == nullptr) {
        std::copy_n(s.o + i * d, d, p.out.as<float>() + t * p.out.ld + column);
        continue;
      }
      kernels_.kda_output(s.o + i * d, p.norm_weight, p.norm_eps, p.gate.as<float>() + t * p.gate.ld + column, d,
                          p.out.as<float>() + t * p.out.ld + column);
    }
  });
}

}  // namespace k3
