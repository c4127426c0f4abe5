#!/usr/bin/env bash
# From a bare GPU host to extracting, in one command; the same command goes on after a restart:
#
#   launch/node.sh +data=mix914k store=s3           check, set up .venv, extract (overrides as for dflash_train.extract)
#   launch/node.sh --check +data=mix914k store=s3   only check: driver, torch, Triton, and the stage's own table
#
# Hosts that point at one store share the run. Environment:
#   HF_HOME            where weights are kept; what is not there is fetched from the hub once
#   TRITON_CACHE_DIR   where compiled kernels and their tuning are kept, for all workers and all later runs
#   DFLASH_TORCH       pip's arguments for torch, for a driver that the ordinary build does not run on
#   NODE_TRIES         how often an extraction that broke off is started in a row (5), NODE_PAUSE_S apart, doubling (10)
# Ends with the extraction's exit code: 0 done, 2 refused (final), 128 + n told to end by signal n.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
tries=${NODE_TRIES:-5}
pause=${NODE_PAUSE_S:-10}

say() { echo "node: $1" >&2; }

fail() { # what, fix
  printf 'node: %s\n  fix:  %s\n' "$1" "$2" >&2
  exit 2
}

# ---------------------------------------------------------------- what the host has

check_driver() {
  local answer names version
  command -v nvidia-smi >/dev/null ||
    fail "no NVIDIA driver: nvidia-smi is not on PATH" "install driver $need_driver or newer; a container needs --gpus all"
  answer=$(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>&1) ||
    fail "nvidia-smi fails: ${answer%%$'\n'*}" "after an update of the driver restart the machine; else install it again"
  driver=${answer%%,*}
  [[ $driver =~ ^[0-9]+\. ]] ||
    fail "the driver shows no GPU: ${answer%%$'\n'*}" "start the machine or the container with its GPUs (--gpus all)"
  version=$(nvidia-smi 2>/dev/null || true)
  [[ $version =~ CUDA[A-Za-z\ ]*\ Version:\ *([0-9]+)\.[0-9]+ ]] && cuda=${BASH_REMATCH[1]}
  names=$(cut -d, -f2 <<<"$answer" | sort | uniq -c | sed -E 's/^ *([0-9]+) +/\1 x /' | paste -sd ';')
  say "$names, driver $driver${cuda:+, CUDA $cuda}"
}

check_driver_is_new_enough() { # for a torch that is still to be installed; one that is there is tried
  [ -z "${DFLASH_TORCH:-}" ] || return 0
  # The CUDA version decides where it is known: a data centre's driver can be lifted by NVIDIA's cuda-compat package.
  if [ -n "$cuda" ]; then [ "$cuda" -lt "$need_cuda" ] || return 0; else [ "${driver%%.*}" -lt "$need_driver" ] || return 0; fi
  fail "driver $driver${cuda:+ (CUDA $cuda)} is too old: $(bash launch/pick_torch.sh) is built for CUDA $need_cuda" \
    "install driver $need_driver or newer, or name a torch for yours: DFLASH_TORCH='torch==2.11.0 --index-url <of CUDA 12 builds>'"
}

gpu_problem() { # one line that says why, unless torch and Triton both run here
  local output
  output=$("$bin/python" - 2>&1 <<'PY'
import sys
from dflash_train.util.device import cuda_problem
if problem := cuda_problem():
    sys.exit(problem)
from triton.runtime import driver
driver.active.get_current_target()  # builds what Triton calls the driver by
PY
  ) || echo "${output##*$'\n'}"
}

check_gpu() {
  local problem
  problem=$(gpu_problem)
  case $problem in
    "") ;;
    *"CPU build"*) fail "$problem, and here is a GPU" "rm -r .venv; $0, and where pip finds no other (pip config list): DFLASH_TORCH=..." ;;
    *"C compiler"* | *Python.h* | *"Command '["*) fail "Triton cannot build its launcher: $problem" "apt-get install gcc python3-dev" ;;
    *"cannot use a GPU"* | *"cannot run torch"*) fail "$problem" "install driver $need_driver or newer, or name a torch for yours in DFLASH_TORCH" ;;
    *) fail "torch or Triton does not run: $problem" "rm -r .venv, and the same command again" ;;
  esac
  say "torch and Triton run on the GPU; kernels in $TRITON_CACHE_DIR"
}

prepare_caches() {
  # One folder for all workers of this host: the first compiles and tunes, the others, started later, find its results.
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${HOME:-.}/.triton/cache}
  export FLA_CACHE_RESULTS=1 TRITON_CACHE_AUTOTUNING=1
  mkdir -p "$TRITON_CACHE_DIR" 2>/dev/null && [ -w "$TRITON_CACHE_DIR" ] ||
    fail "$TRITON_CACHE_DIR cannot be written" "TRITON_CACHE_DIR=<a folder on a local disk>"
  say "weights in ${HF_HOME:-${XDG_CACHE_HOME:-${HOME:-.}/.cache}/huggingface}"
}

# ---------------------------------------------------------------- the extraction

extract() { # passes signals on and sets $code
  # A process group of its own: a terminal's Ctrl-C reaches us alone, and the extraction is told once.
  set -m
  "$bin/python" -m dflash_train.extract "$@" &
  child=$!
  set +m
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do # a trap has cut the wait short
    code=0
    wait "$child" || code=$?
  done
  child=
}

on_signal() {
  stopped=$1
  if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; else exit "$1"; fi
}

keep_extracting() {
  local failed=0 began wait_s
  child='' stopped='' code=0
  trap 'on_signal 143' TERM HUP
  trap 'on_signal 130' INT
  while true; do
    began=$SECONDS
    extract "$@"
    case $code in
      0 | 2 | 129 | 130 | 143) exit "$code" ;; # done, refused by a message that says why, or told to end
    esac
    [ -z "$stopped" ] || exit "$code"
    # A run that worked for an hour had another trouble than the one before it.
    if ((SECONDS - began > 3600)); then failed=0; fi
    failed=$((failed + 1))
    if ((failed >= tries)); then
      say "the extraction ended with exit code $code, $failed times in a row: given up"
      say "  fix:  see its messages above; what is done is in the store, and the same command goes on"
      exit "$code"
    fi
    wait_s=$((pause << (failed - 1)))
    say "the extraction ended with exit code $code; it goes on in $wait_s s (start $((failed + 1)) of $tries)"
    sleep "$wait_s" &
    wait $! || true
  done
}

# ---------------------------------------------------------------- the story

only_check=
if [ "${1:-}" = --check ]; then
  only_check=1
  shift
fi
read -r need_cuda need_driver <<<"$(bash launch/pick_torch.sh --needs)"
cuda='' driver=''
check_driver
prepare_caches
if [ ! -f .venv/.ready-run ]; then
  check_driver_is_new_enough
  if [ -n "$only_check" ]; then
    say "nothing is installed yet; without --check this command does it"
    exit 0
  fi
fi
if [ -n "$only_check" ]; then
  check_gpu
  exec "$bin/python" -m dflash_train.extract dry_run=true "$@"
fi
bash launch/setup.sh
check_gpu
case " $* " in
  *" verify=true "* | *" clean=true "* | *" dry_run=true "* | *" --help "*) exec "$bin/python" -m dflash_train.extract "$@" ;;
esac
keep_extracting "$@"
