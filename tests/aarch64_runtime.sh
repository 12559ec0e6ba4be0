#!/bin/sh
# Download the aarch64 wheel of the runtime that this project pins and unpack it into DIR, for
# SCANWRIGHT_AARCH64_RUNTIME=DIR. Does nothing if it is there.
# usage: tests/aarch64_runtime.sh DIR      (PYTHON: the interpreter whose pip to use)
set -eu
dir=${1:?usage: tests/aarch64_runtime.sh DIR}
python=${PYTHON:-python3}
[ -x "$dir/iree/_runtime_libs/iree-run-module" ] && exit 0
here=$(cd "$(dirname "$0")" && pwd)
pin=$(sed -n 's/.*"\(iree-base-runtime==[0-9.]*\)".*/\1/p' "$here/../pyproject.toml" | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --abi abi3 --abi cp312 --platform manylinux_2_28_aarch64 --dest "$work" "$pin"
mkdir -p "$dir"
"$python" -m zipfile -e "$work"/iree_base_runtime-*.whl "$dir"
chmod +x "$dir"/iree/_runtime_libs/iree-run-module
