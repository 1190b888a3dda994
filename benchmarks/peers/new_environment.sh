# Reads the arguments DIR [PYTHON] of a setup script that sources this file: sets $environment and $python, and ends the
# script if DIR is missing or exists already.
if [ $# -lt 1 ]; then
    echo "usage: sh $(basename "$0") DIR [PYTHON]" >&2
    exit 2
fi
environment=$1
python=${2:-python3.11}

if [ -e "$environment" ]; then
    echo "$environment exists already; name a directory that does not, or remove it" >&2
    exit 1
fi
