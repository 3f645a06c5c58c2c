#!/bin/sh
# All figures of growth and of the server's share, and the 1B models: tables.md, JSON files and pictures in FOLDER. Ten to fifteen minutes on two cores.
#   benchmarks/growth.sh FOLDER [SCRATCH]     SCRATCH takes the 1B models, 3 GB, and is emptied again; PYTHON names the interpreter
set -eu
out=$1 scratch=${2:-${TMPDIR:-/tmp}/octavo-models} here=$(dirname "$0") python=${PYTHON:-python3}
mkdir -p "$out"
{
    "$python" "$here/growth.py" --out "$out"
    "$python" "$here/make_random.py" tiny "$scratch/tiny" >&2
    printf '### server share, default model\n\n'
    "$python" "$here/server_share.py" --json "$out/server_share.json"
    printf '\n### server share, a model of almost no work\n\n'
    "$python" "$here/server_share.py" "$scratch/tiny" --streams 1 8 32 --tokens 400 --kv-cache-memory 64M --json "$out/server_share_tiny.json"
    printf '\n'
    "$python" "$here/big_models.py" "$scratch" --models llama-3.2-1b:bf16 llama-3.2-1b:gptq --json "$out/models_1b.json"
} | tee "$out/tables.md"
rm -r "$scratch/tiny"
