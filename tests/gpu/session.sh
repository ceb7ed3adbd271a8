#!/usr/bin/env bash
# tests/gpu/session.sh NUMBER [--smoke]: one of eight commands that tell what a GPU can do, of at
# most nine minutes each, the seventh of four (docs/benchmarks.md#on-a-gpu). Rows go to
# gpu-NUMBER.jsonl as they come.
#
# On a bare machine, packages that are missing may lie as wheels in the folder `wheels`, and the
# interpreter may be called python3 only.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v python3 || command -v python)
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
for wheel in wheels/*.whl; do
    [[ ! -e $wheel ]] || "$python" -m zipfile -e "$wheel" "$unpacked"
done
mkdir "$unpacked/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" > "$unpacked/bin/python"
chmod +x "$unpacked/bin/python"
export PATH="$PATH:$unpacked/bin"
export PYTHONPATH="$PWD:$unpacked${PYTHONPATH:+:$PYTHONPATH}"
"$python" -u -m tests.gpu.session "$@"
