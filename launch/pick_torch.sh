#!/usr/bin/env bash
# Print pip's arguments for torch: $DFLASH_TORCH, else the CPU build where no NVIDIA driver answers, else the ordinary one.
#   --constraint   print the constraint that keeps the CPU build while the rest is installed; nothing for a CUDA build
#   --needs        print the CUDA version and the driver that the ordinary build needs at least
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --needs ]; then
  echo "13 580" # torch 2.11 to 2.14 are built for CUDA 13.0, whose first driver branch is 580
elif [ -n "${DFLASH_TORCH:-}" ]; then
  [ "${1:-}" = --constraint ] || echo "$DFLASH_TORCH"
elif nvidia-smi -L >/dev/null 2>&1; then
  [ "${1:-}" = --constraint ] || echo "torch>=2.11,<2.15"
elif [ "${1:-}" = --constraint ]; then
  echo "-c cpu-constraints.txt"
else
  grep '^torch' cpu-constraints.txt
fi
