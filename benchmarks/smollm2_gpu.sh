#!/usr/bin/env bash
# The whole pipeline on one GPU with SmolLM2-135M: what the drafter accepts after minutes of training, chain and tree.
#   benchmarks/smollm2_gpu.sh answer   the target answers the demo mix (0.7 to 1M tokens); states go to a local store
#   benchmarks/smollm2_gpu.sh train    B=16 and B=8 side by side on the one card
#   benchmarks/smollm2_gpu.sh eval     32 seeded prompts a task: chain and DDTree 16..128 in fp32; losslessness, both dtypes
#   benchmarks/smollm2_gpu.sh replay   of that the table alone: rounds replayed on answers written in batches, no decoding
#   benchmarks/smollm2_gpu.sh report   tables of the reports that are there
# OUT: reports and logs. WORK: data, store, checkpoints. MINUTES: of training. DATA: another mix than the one below.
set -uo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-runs/smollm2_gpu}; out=${OUT:-$work/reports}; python=${PYTHON:-python3}
# The demo's 4,096 prompts give 343,000 answer tokens, which a 5-layer drafter has learnt by heart after 500 steps.
read -ra data <<< "${DATA:-data=demo +data.sources.evals.options.per_folder=40 data.sources.evals.take=5500 data.sources.stdlib.take=2500}"
common=("${data[@]}" target=smollm2_135m target.dtype=bfloat16 "work_dir=$work" data.answers.max_new_tokens=256
        data.answers.batch_size=768 data.answers.greedy_share=0.5)
blocks=(16 8); training=(train=gpu_small train.max_minutes="${MINUTES:-2.5}")
mkdir -p "$out"
. benchmarks/gpu_drafters.sh

answer() {
  $python -m dflash_train.extract "${common[@]}" store.root="$work/store" extract.max_tokens=1024 extract.batch_tokens=65536 || exit
  for name in samples heldout; do gzip -9 -c "$work"/data/*/answers-smollm2_135m/$name.jsonl > "$out/$name.jsonl.gz"; done
}

evaluate() {
  for dtype in float32 bfloat16; do lossless $dtype & done
  replay
}

replay() {
  for b in "${blocks[@]}"; do replayed "b$b-replay" "$b" & done
  wait
  report
}

case ${1:-} in answer | train | replay | report) $1 ;; eval) evaluate ;; *) sed -n '2,8p' "$0"; exit 2 ;; esac
