#include "engine/model/expert_parallel.h"

#include "kernels/core/check.h"

namespace k3 {
namespace {

constexpr uint8_t kNoExpert = 0xFF;  // bytes of id -1, which is on no rank

// This rank's experts for tokens of all groups: one call, or one for each leaf of the fixed tree.
void ApplyExperts(const LayerContext& context, const MoeWeights& weights, MoeExpertsParams params) {
  Workspace& ws = context.workspace;
  if (weights.experts.size() == 1) {
    params.experts = weights.experts[0].get();
    context.ops.MoeExperts(params, context.stream);
    return;
  }
  const int64_t count = params.out.rows * params.out.cols;
  const MatrixView out = params.out;
  K3_CHECK(out.ld == out.cols);
  for (size_t leaf = 0; leaf < weights.experts.size(); ++leaf) {
    params.experts = weights.experts[leaf].get();
    params.out = ws.leaf_out.Rows(static_cast<int64_t>(leaf) * out.rows, out.rows);
    context.ops.MoeExperts(params, context.stream);
  }
  context.ops.TreeSum({.data = ws.leaf_out.data,
                       .parts = static_cast<int32_t>(weights.experts.size()),
                       .count = count,
                       .dtype = out.dtype,
                       .out = out.data},
                      context.stream);
}

}  // namespace

// The rows of all groups, [group][dispatch_rows, ...].
void Dispatch(const LayerContext& context, const MatrixView& x, int64_t rows) {
  Workspace& ws = context.workspace;
  Communicator& groups = *context.parallel.data;
  const int64_t top_k = context.config.num_experts_per_token;
  const size_t pick_bytes = static_cast<size_t>(rows * top_k) * 4;
  K3_CHECK(x.ld == ws.gathered_in.cols);
  if (context.parallel.transport == ExpertTransport::kAllGather) {
    if (x.rows < rows) {
      context.ops.Fill(ws.expert_ids + x.rows * top_k, kNoExpert, static_cast<size_t>((rows - x.rows) * top_k) * 4,
                       context.stream);
    }
    groups.BeginGroup();
    groups.AllGather(x.data, ws.gathered_in.data, static_cast<size_t>(rows * x.ld) * SizeOf(x.dtype), context.stream);
    groups.AllGather(ws.expert_ids, ws.gathered_ids, pick_bytes, context.stream);
    groups.AllGather(ws.expert_weights, ws.gathered_weights, pick_bytes, context.stream);
    groups.EndGroup();
    return;
  }
  // A row goes, once, to each group whose rank at this place has an expert of it.
  const int32_t peers = groups.size(), shares = peers * context.parallel.tensor_size();
  context.ops.PackSlots({.x = x,
                         .ids = ws.expert_ids,
                         .weights = ws.expert_weights,
                         .top_k = context.config.num_experts_per_token,
                         .experts = context.config.num_experts,
                         .parts = shares,
                         .first_part = context.parallel.tensor_rank() * peers,
                         .peers = peers,
                         .rows = rows,
                         .out = ws.send_slots.Rows(0, peers * rows),
                         .out_ids = ws.send_ids,
                         .out_weights = ws.send_weights,
                         .counts = ws.send_counts,
                         .slots = ws.slots},
                        context.stream);
  // Slots that nothing comes to.
  context.ops.Fill(ws.gathered_ids, kNoExpert, pick_bytes * static_cast<size_t>(peers), context.stream);
  const auto send = [&](const void* from, void* to, size_t row_bytes, int32_t* received) {
    groups.AllToAllRows(from, to, rows, row_bytes, ws.send_counts, received, context.stream);
  };
  groups.BeginGroup();
  send(ws.send_slots.data, ws.gathered_in.data, static_cast<size_t>(x.ld) * SizeOf(x.dtype), ws.received_counts);
  send(ws.send_ids, ws.gathered_ids, static_cast<size_t>(top_k) * 4, nullptr);
  send(ws.send_weights, ws.gathered_weights, static_cast<size_t>(top_k) * 4, nullptr);
  groups.EndGroup();
}

// This group's rows of the sums over all groups' ranks; `out` has room for dispatch_rows rows.
void Combine(const LayerContext& context, int64_t rows, const MatrixView& out) {
  Workspace& ws = context.workspace;
  Communicator& groups = *context.parallel.data;
  const int64_t count = rows * out.cols;
  if (context.parallel.transport == ExpertTransport::kAllGather) {
    groups.ReduceScatter(ws.gathered_out.data, out.data, count, out.dtype, context.stream);
    return;
  }
  // Back by the way they came.
  groups.AllToAllRows(ws.gathered_out.data, ws.send_slots.data, rows, static_cast<size_t>(out.cols) * SizeOf(out.dtype),
                      ws.received_counts, nullptr, context.stream);
  context.ops.SumSlots(
      {.data = ws.send_slots.data, .slots = ws.slots, .peers = groups.size(), .rows = rows, .out = out},
      context.stream);
}

void RunExperts(const LayerContext& context, const MoeWeights& weights, const MatrixView& x, const MatrixView& out) {
  Workspace& ws = context.workspace;
  MoeExpertsParams params;
  params.mxfp8_inputs = context.config.mxfp8_expert_inputs;
  params.top_k = context.config.num_experts_per_token;
  params.activation = context.config.activation;
  params.scratch = ws.scratch;
  const int32_t groups = context.parallel.data_size();
  if (groups == 1) {
    params.x = x;
    params.ids = ws.expert_ids;
    params.weights = ws.expert_weights;
    params.out = out;
    ApplyExperts(context, weights, params);
    return;
  }
  const int64_t rows = context.dispatch_rows;
  Dispatch(context, x, rows);
  params.x = ws.gathered_in.Rows(0, groups * rows);
  params.ids = ws.gathered_ids;
  params.weights = ws.gathered_weights;
  params.out = ws.gathered_out.Rows(0, groups * rows);
  ApplyExperts(context, weights, params);
  Combine(context, rows, out);
}

}  // namespace k3
