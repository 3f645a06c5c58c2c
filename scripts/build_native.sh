#!/usr/bin/env bash
# Builds the extension in place (src/octavo/_native*.so) for work on the kernels. usage: build_native.sh [cmake options]
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=${BUILD_DIR:-build/native}
cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" "$@" >/dev/null
ninja -C "$build"
# Replaced by name: a process that has the old file mapped keeps it.
for built in "$build"/_native*.so; do
  cp "$built" "src/octavo/.${built##*/}" && mv -f "src/octavo/.${built##*/}" "src/octavo/${built##*/}"
done
