#!/bin/sh
# Make an environment with ik_llama.cpp, a fork of llama.cpp:  sh setup_ik_llama_cpp.sh DIR [PYTHON]
#
# PyPI has it as a compiled package only, for processors with AVX2. The environment of llama.cpp, which converts the
# models for both, must be DIR/../llama_cpp.
set -eu

. "$(dirname "$0")/new_environment.sh"

"$python" -m venv "$environment"
"$environment/bin/pip" install ik-llama-cpp-python==0.1.5
"$environment/bin/python" -c "import ik_llama_cpp; print('ik_llama.cpp', ik_llama_cpp.__version__)"
