#!/usr/bin/env bash
# The whole pipeline on one GPU with SmolLM2-135M: what the drafter accepts after minutes of training, chain and tree.
#   benchmarks/smollm2_gpu.sh answer   the target answers the demo mix (0.7 to 1M tokens); states go to a local store
#   benchmarks/smollm2_gpu.sh train    B=16 and B=8 side by side on the one card
#   benchmarks/smollm2_gpu.sh eval     32 seeded prompts a task: chain and DDTree 16..128 in fp32; losslessness, both dtypes
# OUT: reports and logs. WORK: data, store, checkpoints. MINUTES: of training. DATA: another mix than the one below.
set -uo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-runs/smollm2_gpu}; out=${OUT:-$work/reports}; python=${PYTHON:-python3}
# The demo's 4,096 prompts give 343,000 answer tokens, which a 5-layer drafter has learnt by heart after 500 steps.
read -ra data <<< "${DATA:-data=demo +data.sources.evals.options.per_folder=40 data.sources.evals.take=5500 data.sources.stdlib.take=2500}"
common=("${data[@]}" target=smollm2_135m target.dtype=bfloat16 "work_dir=$work" data.answers.max_new_tokens=256
        data.answers.batch_size=768 data.answers.greedy_share=0.5)
mkdir -p "$out"

answer() {
  $python -m dflash_train.extract "${common[@]}" store.root="$work/store" extract.max_tokens=1024 extract.batch_tokens=65536 || exit
  for name in samples heldout; do gzip -9 -c "$work"/data/*/answers-smollm2_135m/$name.jsonl > "$out/$name.jsonl.gz"; done
}

train_one() {  # block size
  $python -m dflash_train.train "${common[@]}" store.root="$work/store" drafter="small_b$1" train=gpu_small \
    train.max_minutes="${MINUTES:-6}" train.output_dir="$work/ck/b$1" train.wandb.mode=disabled > "$out/train_b$1.log" 2>&1 \
    || echo "train B=$1 ended with $?"
}

train() {
  train_one 16 & train_one 8 & wait
  for b in 16 8; do echo "== B=$b"; grep -E "^step" "$out/train_b$b.log" | tail -n 2; tail -n 22 "$out/train_b$b.log"; done
}

measure() {  # name, block size, then overrides
  local name=$1 b=$2; shift 2
  $python -m dflash_train.eval "${common[@]}" drafter="small_b$b" eval.checkpoint="$work/ck/b$b/best" \
    eval.max_new_tokens="${TOKENS:-128}" "eval.tasks=[humaneval,gsm8k,mtbench]" eval=dflash hardware.num_threads=4 \
    eval.output_dir="$work/eval/$name" "$@" > "$work/eval/$name.log" 2>&1 || echo "eval $name ended with $?"
}

evaluate() {  # rounds are bound by launches: replayed where only acceptance is asked for, decoded to show losslessness
  mkdir -p "$work/eval"
  for b in 16 8; do
    measure "b$b-replay" $b eval.dtype=float32 eval.num_prompts="${PROMPTS:-32}" eval.replay=true \
      eval.replay_batch_size=128 "eval.also=[ddtree:16,ddtree:32,ddtree:64,ddtree:128]" &
  done
  for dtype in float32 bfloat16; do
    measure "b16-decode-$dtype" 16 eval.dtype=$dtype eval.num_prompts="${LOSSLESS_PROMPTS:-4}" eval.max_margin=1.0 \
      "eval.also=[ddtree:64]" &
  done
  wait
  for report in "$work"/eval/*/*.md; do echo "== $report"; cat "$report"; done | tee "$out/reports.md"
}

case ${1:-} in answer | train) $1 ;; eval) evaluate ;; *) sed -n '2,6p' "$0"; exit 2 ;; esac
