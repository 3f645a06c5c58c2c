#!/bin/sh
# All figures of growth and of the server's share, and the 1B models: tables.md, JSON files and pictures in FOLDER. Six minutes on two quiet cores.
#   benchmarks/growth.sh FOLDER [SCRATCH]     SCRATCH takes the 1B models, 3 GB, one at a time, and is emptied again; PYTHON names the interpreter
# A part that fails says so in tables.md, and the others go on.
set -u
out=$1 scratch=${2:-${TMPDIR:-/tmp}/octavo-models} here=$(dirname "$0") python=${PYTHON:-python3}
mkdir -p "$out"

part() {
    "$python" "$here/$@" || printf '**failed: %s**\n' "$*"
    printf '\n'
}

{
    for name in concurrency context scheduling pool prefix; do
        part growth.py "$name" --out "$out"
    done
    printf '### server share\n\n'
    part server_share.py --json "$out/server_share.json"
    part make_random.py tiny "$scratch/tiny" >&2
    printf '### server share, a model of almost no work\n\n'
    part server_share.py "$scratch/tiny" --streams 1 8 32 --tokens 400 --kv-cache-memory 64M --json "$out/server_share_tiny.json"
    part big_models.py "$scratch" --models llama-3.2-1b:bf16 llama-3.2-1b:gptq --json "$out/models_1b.json"
} | tee "$out/tables.md"
rm -r "$scratch/tiny"
! grep -q '^\*\*failed' "$out/tables.md"
