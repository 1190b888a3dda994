#!/bin/sh
# Make an environment with transformers, its continuous batching and its server:  sh setup_transformers.sh DIR [PYTHON]
#
# Needs a CPU build of torch where pip can find it (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL).
set -eu

. "$(dirname "$0")/new_environment.sh"

"$python" -m venv "$environment"
"$environment/bin/pip" install "transformers[serving]==5.23.0" accelerate==1.15.0 torch==2.13.0+cpu
"$environment/bin/python" -c "import transformers; print('transformers', transformers.__version__)"
"$environment/bin/transformers" serve --help >/dev/null
