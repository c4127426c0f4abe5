# Sourced by smollm2_gpu.sh and hybrid_gpu.sh: drafters of several block sizes trained side by side on one card, and
# what they accept. They set: common, training (overrides), blocks, work, out, python.

train_one() {  # block size
  $python -m dflash_train.train "${common[@]}" store.root="$work/store" drafter="small_b$1" "${training[@]}" \
    train.output_dir="$work/ck/b$1" train.wandb.mode=disabled > "$out/train_b$1.log" 2>&1 \
    || echo "train B=$1 ended with $?"
}

train() {
  for b in "${blocks[@]}"; do train_one "$b" & done; wait
  for b in "${blocks[@]}"; do
    echo "== B=$b"; grep -E "^step" "$out/train_b$b.log" | tail -n 2; tail -n 22 "$out/train_b$b.log"
  done
}

measure() {  # name, block size, then overrides
  local name=$1 b=$2; shift 2
  mkdir -p "$work/eval"
  $python -m dflash_train.eval "${common[@]}" drafter="small_b$b" eval.checkpoint="$work/ck/b$b/best" eval=dflash \
    eval.max_new_tokens="${TOKENS:-128}" "eval.tasks=[humaneval,gsm8k,mtbench]" hardware.num_threads=2 \
    eval.output_dir="$work/eval/$name" "$@" > "$work/eval/$name.log" 2>&1 || echo "eval $name ended with $?"
}

replayed() {  # name, block size, then overrides: acceptance alone, rounds replayed on answers written in batches
  measure "$1" "$2" eval.dtype=float32 eval.replay=true eval.num_prompts="${PROMPTS:-32}" eval.replay_batch_size=128 \
    "eval.also=[ddtree:16,ddtree:32,ddtree:64,ddtree:128]" "${@:3}"
}

lossless() {  # dtype: decoding for real, chain and tree beside autoregressive, a few prompts
  measure "b${blocks[0]}-decode-$1" "${blocks[0]}" eval.dtype="$1" eval.max_margin=1.0 "eval.also=[ddtree:64]" \
    eval.num_prompts="${LOSSLESS_PROMPTS:-4}"
}

report() {  # of what is there; also while it is still running
  for report in "$work"/eval/*/*.md; do echo "== $report"; cat "$report"; done | tee "$out/reports.md"
}
