#!/bin/sh
# What only two GPUs of one host can show: verify over both, equal bits of one and two expert ranks, the cost of reaching
# experts, a model of the Kimi-Linear-48B shape over both, a long run under random load, and the end of a rank.
#   scripts/two_gpus.sh BIN_DIR OUT_DIR [PART...]     parts: verify equal comm skew model soak kill; all when none is named
# BIN_DIR holds k3serve, parallel_bench and skew_bench of a CUDA build. Results: OUT_DIR/two_gpus*.json and OUT_DIR/two_gpus.log.
set -u
bin=$1 out=$2
shift 2
parts=${*:-verify equal comm skew kill model soak}
root=$(cd "$(dirname "$0")/.." && pwd)
tiny=$root/configs/models/tiny-k3 golden=$root/tests/data/tiny-k3.safetensors
linear=$root/tests/data/tiny-kimi-linear linear_golden=$root/tests/data/tiny-kimi-linear.safetensors
mkdir -p "$out"
log=$out/two_gpus.log
failed=0
export NCCL_NVLS_ENABLE=0  # no multicast

# The library may lie in a Python package only.
if ! ldconfig -p 2>/dev/null | grep -q libnccl.so.2; then
  for folder in $(python3 -c 'import nvidia.nccl, os; print(os.path.join(list(nvidia.nccl.__path__)[0], "lib"))' 2>/dev/null) \
                /usr/local/cuda/lib64 /usr/local/cuda/lib; do
    [ -e "$folder/libnccl.so.2" ] && LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} && break
  done
  export LD_LIBRARY_PATH
fi

say() { echo "$*" | tee -a "$log"; }
check() { # NAME COMMAND...: runs, logs, counts failures
  name=$1
  shift
  start=$(date +%s)
  if timeout "${limit:-150}" "$@" >"$out/$name.txt" 2>&1; then result=passed; else result="FAILED ($?)" failed=1; fi
  say "$name: $result, $(($(date +%s) - start)) s: $(tail -n 1 "$out/$name.txt" | cut -c 1-200)"
}
wants() { case " $parts " in *" $1 "*) return 0 ;; esac; return 1; }

say "$(date -u +%FT%TZ) $(nvidia-smi -L 2>/dev/null | tr '\n' ';')"

if wants verify; then
  for layout in 1x1 2x1 1x2; do
    tensor=${layout%x*} data=${layout#*x}
    check "verify_k3_$layout" "$bin/k3serve" verify "$tiny" --golden "$golden" --device cuda --tensor-parallel "$tensor" --data-parallel "$data"
    check "verify_kl_$layout" "$bin/k3serve" verify "$linear" --golden "$linear_golden" --device cuda --tensor-parallel "$tensor" --data-parallel "$data"
  done
fi

if wants equal; then
  for data in 1 2; do
    check "equal_ep$data" "$bin/k3serve" verify "$tiny" --golden "$golden" --device cuda --compute-dtype fp32 --batch-invariant --expert-leaves 2 --data-parallel $data --logits-hash
  done
  if grep -o '"logits_hash":"[^"]*"' "$out/equal_ep1.txt" >"$out/hash1" && grep -o '"logits_hash":"[^"]*"' "$out/equal_ep2.txt" >"$out/hash2" \
     && cmp -s "$out/hash1" "$out/hash2"; then
    say "equal: the logits of $(wc -l <"$out/hash1") prompts have the same bits on one and two expert ranks"
  else
    say "equal: FAILED, the logits differ"
    failed=1
  fi
fi

wants comm && check comm "$bin/parallel_bench" --device cuda --only comm --json "$out/two_gpus_comm.json"

# One rank's experts 1.4 times as popular: how much less the slowest rank works with local-quantile.
wants skew && check skew "$bin/skew_bench" --device cuda --ranks 2 --model "$root/configs/models/kimi-linear-48b" --tokens 8192 \
  --skew 1.4 --json "$out/two_gpus_skew.json"

if wants kill; then
  # A process a GPU, as a launcher starts them; then one is killed.
  port=29611
  for rank in 1 0; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$bin/k3serve" serve "$tiny" --device cuda \
      --tensor-parallel-size 2 --port 18321 --grpc-port 18322 --max-num-seqs 8 >"$out/kill_rank$rank.txt" 2>&1 &
    eval "pid$rank=$!"
  done
  waited=0
  until grep -q "k3serve ready" "$out/kill_rank0.txt" || [ $waited -ge 90 ] || ! kill -0 "$pid0" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
  done
  curl -s -m 20 http://127.0.0.1:18321/v1/completions -H 'content-type: application/json' \
    -d '{"model":"tiny-k3","prompt":"The kernel","max_tokens":16,"temperature":0}' >"$out/kill_answer.txt"
  say "kill: answer over two processes: $(cut -c 1-160 "$out/kill_answer.txt")"
  kill -9 "$pid1"
  start=$(date +%s%N)
  waited=0
  while kill -0 "$pid0" 2>/dev/null && [ $waited -lt 300 ]; do
    sleep 0.1
    waited=$((waited + 1))
  done
  wait "$pid0"
  code=$?
  took=$((($(date +%s%N) - start) / 1000000))
  if [ $took -le 10000 ] && [ $code -ne 0 ] && grep -q "is lost" "$out/kill_rank0.txt"; then
    say "kill: passed, the server ended with code $code after $took ms: $(grep -m 1 'is lost' "$out/kill_rank0.txt")"
  else
    say "kill: FAILED, code $code after $took ms: $(tail -n 1 "$out/kill_rank0.txt")"
    failed=1
  fi
fi

wants model && check model "$bin/parallel_bench" --device cuda --only model --model "$root/configs/models/kimi-linear-48b" \
  --layouts 1x1,2x1,1x2 --json "$out/two_gpus_model.json"
limit=400  # 10,000 steps in each layout
wants soak && check soak "$bin/parallel_bench" --device cuda --only soak --model "$root/configs/models/kimi-linear-48b" \
  --layouts 2x1,1x2 --steps 10000 --json "$out/two_gpus_soak.json"
say "all: $([ $failed -eq 0 ] && echo passed || echo FAILED)"
exit $failed
