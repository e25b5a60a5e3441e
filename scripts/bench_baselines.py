#!/usr/bin/env python3
"""Times public kernels beside cuda_bench's on the same card and prints by how much they differ.

    python3 scripts/bench_baselines.py --bench BUILD/tests/bench/cuda_bench [--only mla_prefill,kda] [--json FILE]

Of the baselines it takes those that can be imported: cuDNN's attention, the grouped product and RMSNorm of torch, and
FLA (`fla`: Triton kernels of KDA and of attention residuals). Each is timed as cuda_bench times: inputs random and in
rotation over more than the second-level cache, replayed from a CUDA graph where the baseline can be captured. Ours and
theirs take turns, so that both meet the same clocks. Where a baseline leaves out part of what our op does the row says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings

CACHE_BYTES = 160e6  # of inputs in rotation: more than twice the second-level cache


class Ours:
    """Figures of cuda_bench, by name."""

    def __init__(self, bench):
        self.bench = bench
        self.rows = {}

    def measure(self, prefix):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ours.json")
            subprocess.run([self.bench, "--filter", prefix, "--json", path], check=True, stdout=subprocess.DEVNULL)
            with open(path) as file:
                rows = {row["name"]: row for row in json.load(file)}
        if not rows:
            raise RuntimeError(f"{self.bench} has no rows {prefix}")
        self.rows.update(rows)
        return rows


def replay_of(torch, calls):
    """What runs `calls` once, from a graph where they can be captured, and whether they could."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay, True
    except Exception:  # synchronizes or allocates on the host
        torch.cuda.synchronize()
        return lambda: [call() for call in calls], False


def seconds_of(torch, calls, budget=0.03):
    """Median time of one of `calls`, run in turn as cuda_bench does; and whether they were replayed from a graph."""
    def seconds(run):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    run, captured = replay_of(torch, calls)
    seconds(run)
    rounds = min(int(2e-3 / seconds(run)), 64 // len(calls))
    if rounds > 1:  # a graph's start is not the kernel's time
        calls = calls * rounds
        run, captured = replay_of(torch, calls)
    time.sleep(1.5)  # the card rests
    times = []
    while len(times) < 205 and (len(times) < 10 or sum(times) < budget):
        times.append(seconds(run))
    times = sorted(times[5:])
    return times[len(times) // 2] / len(calls), captured


def sets(bytes_each):
    return max(1, min(64, int(CACHE_BYTES / bytes_each) + 1))


def attention(torch, heads, tokens):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def one():
        q, k = (torch.randn(1, heads, tokens, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        v = torch.randn(1, heads, tokens, 128, device="cuda", dtype=torch.bfloat16)

        def call():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(q, k, v, is_causal=True)

        return call

    return [one() for _ in range(2)]


def grouped_products(torch, tokens):
    """Both products of 256 experts, 8 a token, without gather, activation and combination."""
    experts, top_k, hidden, inner = 256, 8, 2304, 1024
    picks = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    ends = torch.cumsum(torch.bincount(picks.flatten(), minlength=experts), 0).to(device="cuda", dtype=torch.int32)

    def one():
        x = torch.randn(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
        h = torch.randn(tokens * top_k, inner, device="cuda", dtype=torch.bfloat16)
        w13 = torch.randn(experts, hidden, 2 * inner, device="cuda", dtype=torch.bfloat16)
        w2 = torch.randn(experts, inner, hidden, device="cuda", dtype=torch.bfloat16)

        def call():
            torch._grouped_mm(x, w13, offs=ends)
            torch._grouped_mm(h, w2, offs=ends)

        return call

    return [one() for _ in range(2)]


def kda(torch, heads, lengths, bounded):
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    total, single = sum(lengths), max(lengths) == 1
    offsets = torch.tensor([0] + lengths).cumsum(0).to(device="cuda", dtype=torch.int32)
    gate = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    if bounded:
        gate["lower_bound"] = -5.0
        if not single:
            gate["safe_gate"] = True
    gate["A_log"] = 0.5 * torch.randn(heads, device="cuda")
    gate["dt_bias"] = torch.randn(heads * 128, device="cuda")

    def one():
        q, k, v, g = (torch.randn(1, total, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        beta = torch.randn(1, total, heads, device="cuda", dtype=torch.bfloat16)
        state = 0.05 * torch.randn(len(lengths), heads, 128, 128, device="cuda")
        options = dict(gate, initial_state=state, output_final_state=True, cu_seqlens=offsets)
        return lambda: (fused_recurrent_kda if single else chunk_kda)(q, k, v, g, beta, **options)

    state_bytes = len(lengths) * heads * 2 * 128 * 128 * 4
    return [one() for _ in range(sets(total * heads * 128 * 10 + state_bytes))]


def residuals(torch, rows):
    from fla.ops.attnres import fused_attnres

    query, key_norm, out_norm = (torch.randn(7168, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def one():
        sources = [torch.randn(rows, 7168, device="cuda", dtype=torch.bfloat16) for _ in range(9)]
        return lambda: fused_attnres(query, sources, key_norm, out_norm)

    return [one() for _ in range(sets(rows * 7168 * 2 * 10))]


def add_norm(torch, rows):
    weight = torch.randn(7168, device="cuda", dtype=torch.bfloat16)

    def one():
        stream, delta = (torch.randn(rows, 7168, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return lambda: torch.nn.functional.rms_norm(stream.add_(delta), (7168,), weight)

    return [one() for _ in range(sets(rows * 7168 * 8))]


def kda_shape(name):
    kind, heads, shape = name.split("/")
    heads = int(heads[1:])
    if kind == "kda_decode":
        return heads, [1] * int(shape[1:])
    if shape == "mixed":
        return heads, [1300, 547, 2048, 963, 271, 3063]
    count, length = shape.split("x")
    return heads, [int(length)] * int(count)


def baseline_of(torch, name):
    """(who, calls, what it leaves out) of a row of cuda_bench; None when nobody has it."""
    if name.startswith("mla_prefill_tflops/"):
        return "cuDNN", attention(torch, int(name.split("/")[1][1:]), 8192), "no latents to expand, no output gate"
    if name.startswith("moe_bf16/") and not name.endswith("/sustained"):
        return "torch", grouped_products(torch, int(name.split("/")[2])), "the two products alone"
    if name.startswith(("kda_prefill/", "kda_prefill_unbounded/", "kda_decode/")):
        heads, lengths = kda_shape(name)
        without = "no convolution, no gated norm" if name.startswith("kda_decode/") else ""
        return "FLA", kda(torch, heads, lengths, "unbounded" not in name), without
    if name.startswith("attn_res/"):
        return "FLA", residuals(torch, int(name.split("/")[2])), ""
    if name.startswith("add_rmsnorm/"):
        return "torch", add_norm(torch, int(name.split("/")[1].split("x")[0])), ""
    return None


def seconds_of_row(row):
    """What cuda_bench's figure is in seconds, or None where it is a rate."""
    scale = {"us": 1e-6, "ms": 1e-3}.get(row["unit"])
    return None if scale is None else row["value"] * scale


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="the built cuda_bench")
    parser.add_argument("--only", default="mla_prefill,kda_decode,kda_prefill,moe_bf16,attn_res,add_rmsnorm",
                        help="beginnings of the rows to compare")
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("bench_baselines: no torch to import, so there is no baseline to run")
    if not torch.cuda.is_available():
        sys.exit("bench_baselines: no CUDA device")
    warnings.filterwarnings("ignore")
    torch.manual_seed(1)
    ours, results, missing = Ours(options.bench), [], {}
    print(f"{'row':<36} {'ours':>10} {'theirs':>10} unit     ours is", flush=True)
    for prefix in options.only.split(","):
        for name, row in ours.measure(prefix).items():
            try:
                with torch.inference_mode():
                    found = baseline_of(torch, name)
                    if found is None:
                        continue
                    who, calls, without = found
                    seconds, captured = seconds_of(torch, calls)
                    del calls, found
                    torch.cuda.empty_cache()
            except ImportError as error:
                missing.setdefault(str(error), []).append(name)
                continue
            except Exception as error:  # another version's interface, too little memory: the others still count
                missing.setdefault(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", []).append(name)
                continue
            if name.startswith("mla_prefill_tflops/"):
                heads = int(name.split("/")[1][1:])
                theirs = 2 * heads * (8192 * 8193 / 2) * (192 + 128) / seconds * 1e-12
                ratio, unit = row["value"] / theirs, "of cuDNN"
                result = name.replace("_tflops", "")
            elif row["unit"] == "TB/s":
                rows, width = map(int, name.split("/")[1].split("x"))
                theirs = rows * width * 2 * 4 / seconds * 1e-12
                ratio, unit, result = row["value"] / theirs, f"of {who}", f"baseline/{name}"
            else:
                own = seconds_of_row(row)
                theirs = seconds * row["value"] / own
                ratio, unit, result = seconds / own, f"of {who}", f"baseline/{name}"
            notes = "; ".join(filter(None, [without, "" if captured else "not from a graph"]))
            print(f"{name:<36} {row['value']:>10.3f} {theirs:>10.3f} {row['unit']:<8} {ratio:.2f} x as fast as {who}"
                  + (f" ({notes})" if notes else ""), flush=True)
            results.append({"name": result, "value": ratio, "unit": unit, "floor_ratio": None,
                            "copy_TBps": row["copy_TBps"], "gemm_TFLOPs": row["gemm_TFLOPs"], "gpu": row["gpu"],
                            "commit": row["commit"],
                            "command": "bench_baselines.py --only " + options.only,
                            "ours": row["value"], "theirs": theirs, "in": row["unit"], "baseline": who,
                            "leaves_out": notes})
            if options.json:  # at once: a kernel that tunes itself for minutes must not cost the other rows
                with open(options.json, "w") as file:
                    json.dump(results, file, indent=1)
                    file.write("\n")
    for reason, names in missing.items():
        print(f"not run: {', '.join(names)}: {reason}")


if __name__ == "__main__":
    main()
