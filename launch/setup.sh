#!/usr/bin/env bash
# Make .venv with this package in it: launch/setup.sh [EXTRA]. Done once, and again when versions or the GPU changed.
#   PYTHON         the interpreter, 3.11 or 3.12; otherwise the first that is found, or one that uv brings
#   DFLASH_TORCH   pip's arguments for torch, for a driver that the ordinary build does not run on
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-}
bin=.venv/bin
ready=.venv/.ready # of the Makefile, with extra "dev"
[ "$extra" = dev ] || ready=.venv/.ready-run

say() { echo "setup: $1" >&2; }

fail() { # what, fix
  printf 'setup: %s\n  fix:  %s\n' "$1" "$2" >&2
  exit 2
}

is_usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1; }

make_venv() {
  local name
  for name in ${PYTHON:-python3 python3.12 python3.11}; do
    is_usable "$name" || continue
    "$name" -m venv --clear .venv || fail "$name -m venv failed" "apt-get install python3-venv, and the same command again"
    return
  done
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not Python 3.11 or 3.12" "PYTHON=python3.12, or leave it unset"
  command -v uv >/dev/null ||
    fail "Python 3.11 or 3.12 is needed and not on PATH" "apt-get install python3.12-venv, or install uv, which brings its own"
  uv venv -q --clear --seed --python 3.12 .venv || fail "uv could not make .venv" "see its message above"
}

pip() { "$bin/python" -m pip -qq "$@" || fail "pip $1 failed" "see its message above: network, index or disk (du -sh .venv)"; }

# Hosts that share a file system share this folder: one of them installs, the others find it done.
mkdir -p runs
exec 9>runs/.setup.lock
if command -v flock >/dev/null; then flock 9; fi

read -ra torch <<<"$(bash launch/pick_torch.sh)"
read -ra constraint <<<"$(bash launch/pick_torch.sh --constraint)"
key="${torch[*]} / ${extra:-no extra} / $(cat pyproject.toml cpu-constraints.txt | cksum)"
if [ -f "$ready" ] && [ "$(cat "$ready")" = "$key" ] && [ -x "$bin/python" ]; then
  touch "$ready"
  exit 0
fi

say "setting up .venv: about 2 GB on disk without a GPU (two to three minutes), 6 GB with one"
if ! is_usable "$bin/python" || ! "$bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
pip install --upgrade pip
if [ ${#constraint[@]} -eq 0 ] && [ "$("$bin/python" -c 'import torch; print(torch.version.cuda)' 2>/dev/null)" = None ]; then
  say "the torch in .venv is a CPU build, and here is a GPU: replacing it"
  pip uninstall -y torch # pip would take it for good enough
fi
# torch first: what follows must find it, or pip fetches several GB of CUDA onto a machine without a GPU.
pip install "${torch[@]}"
pip install "${constraint[@]}" -e ".${extra:+[$extra]}"
echo "$key" >"$ready"
