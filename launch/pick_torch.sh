#!/usr/bin/env bash
# Print pip's arguments for torch: the CPU build where no NVIDIA driver answers, else the ordinary one.
#   --constraint   print the constraint that keeps that choice while the rest is installed
set -euo pipefail
cd "$(dirname "$0")/.."
if nvidia-smi -L >/dev/null 2>&1; then
  [ "${1:-}" = --constraint ] || echo "torch>=2.11,<2.15"
else
  [ "${1:-}" = --constraint ] && echo "-c cpu-constraints.txt" || grep '^torch' cpu-constraints.txt
fi
