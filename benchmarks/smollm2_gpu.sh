#!/usr/bin/env bash
# The whole pipeline on one GPU with SmolLM2-135M: what the drafter accepts after minutes of training, chain and tree.
#   benchmarks/smollm2_gpu.sh answer          the target answers the demo mix (about 0.8M tokens), states captured to a local store
#   benchmarks/smollm2_gpu.sh train           B=16 and B=8 side by side on the one card
#   benchmarks/smollm2_gpu.sh eval            32 seeded prompts a task: chain, DDTree 16..128; bf16 and fp32
# OUT: where reports go; MINUTES: of training.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/smollm2_gpu}; work=${WORK:-runs/smollm2_gpu}; python=${PYTHON:-python3}
common=(data=demo target=smollm2_135m target.dtype=bfloat16 "work_dir=$work" data.answers.max_new_tokens=256
        data.answers.batch_size=768 data.answers.greedy_share=0.5)
mkdir -p "$out"

answer() {
  $python -m dflash_train.extract "${common[@]}" store.root="$work/store" extract.max_tokens=1024 extract.batch_tokens=65536
  $python - "$work" "$out" <<'PY'
import gzip, pathlib, sys
work, out = map(pathlib.Path, sys.argv[1:])
for name in ("samples.jsonl", "heldout.jsonl"):
    source = work / "data/demo/answers-smollm2_135m" / name
    (out / f"{name}.gz").write_bytes(gzip.compress(source.read_bytes(), 9))
PY
}

train_one() {
  MASTER_PORT=$((29500 + $1)) $python -m dflash_train.train "${common[@]}" store.root="$work/store" drafter="small_b$1" \
    train=gpu_small train.max_minutes="${MINUTES:-6}" train.output_dir="$work/ck/b$1" train.wandb.mode=disabled > "$out/train_b$1.log" 2>&1
}

train() {
  train_one 16 & train_one 8 &
  wait -n; wait -n
  tail -n 25 "$out"/train_b*.log
}

eval_one() {  # block size, task, dtype, prompts
  $python -m dflash_train.eval --method dflash "${common[@]}" drafter="small_b$1" eval.checkpoint="$work/ck/b$1/best" \
    "eval.tasks=[$2]" eval.num_prompts="$4" eval.max_new_tokens=128 eval.dtype="$3" \
    "eval.also=[ddtree:16,ddtree:32,ddtree:64,ddtree:128]" eval.output_dir="$out/b$1-$2-$3" > "$out/eval_b$1_$2_$3.log" 2>&1 \
    || echo "eval B=$1 $2 $3 ended with $?"
}

evaluate() {
  for b in 16 8; do
    for task in humaneval gsm8k mtbench heldout; do eval_one $b $task bfloat16 32 & done
    eval_one $b humaneval float32 8 &
  done
  wait
  grep -hE '^\| ' "$out"/b*/*.md
}

case ${1:-} in answer) answer ;; train) train ;; eval) evaluate ;; *) sed -n '2,6p' "$0"; exit 2 ;; esac
