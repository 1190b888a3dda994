#!/bin/sh
# Make an environment with OpenVINO GenAI and the tool that exports models to it:  sh setup_openvino.sh DIR [PYTHON]
#
# torch is needed for the export only; its CPU build must be where pip can find it (PIP_FIND_LINKS or
# PIP_EXTRA_INDEX_URL).
set -eu

. "$(dirname "$0")/new_environment.sh"

"$python" -m venv "$environment"
"$environment/bin/pip" install openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino==2026.4.1 \
    "optimum-intel[openvino]==2.2.0" optimum==2.3.0 nncf==3.4.0 torch==2.13.0+cpu transformers==5.5.4
# A build for CUDA comes as a dependency; it cannot load beside a CPU build of torch, and an import that finds it fails.
"$environment/bin/pip" uninstall -y torchvision
"$environment/bin/python" -c "import openvino_genai; print('OpenVINO GenAI', openvino_genai.__version__)"
"$environment/bin/optimum-cli" export openvino --help >/dev/null
