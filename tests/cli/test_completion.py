"""``chairlift completion``: the scripts complete what the parser knows."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from chairlift.cli.commands import COMMANDS
from tests.cli.conftest import Run

TRY = """
source /dev/stdin <<< "$SCRIPT"
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _chairlift
    echo "${COMPREPLY[*]}"
done <<< "$LINES_TO_TRY"
"""
CASES = {
    "chairlift ": {*COMMANDS, "--help", "--version"},
    "chairlift se": {"serve"},
    "chairlift serve --max-num-s": {"--max-num-seqs"},
    "chairlift serve --dtype fl": {"float16", "float32"},
    "chairlift serve m --prefill-mode m": {"mixed"},
    "chairlift bench ser": {"serve"},
    "chairlift bench serve --ur": {"--url"},
    "chairlift chat --base-u": set(),
    "chairlift serve --tensor": {"--tensor-parallel-size", "--tensor-parallel-timeout"},
    "chairlift serve --pipeline": set(),
    "chairlift completion f": {"fish"},
    "chairlift run READ": {"README.md"},
}


def test_bash_completes_commands_flags_values_and_files(chairlift: Run) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    code, out, _ = chairlift("completion", "bash")
    assert code == 0
    variables = {"SCRIPT": "\n".join(out), "LINES_TO_TRY": "\n".join(CASES)}
    done = subprocess.run([bash, "--norc", "-c", TRY], capture_output=True, text=True, env=variables)
    assert done.stderr == ""
    for (line, wanted), found in zip(CASES.items(), done.stdout.splitlines(), strict=True):
        assert set(found.split()) == wanted, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_its_script(chairlift: Run, shell: str) -> None:
    code, out, err = chairlift("completion", shell)
    assert (code, err) == (0, []) and any("max-num-seqs" in line for line in out)
    if (program := shutil.which(shell)) is not None:
        done = subprocess.run([program, "-n"], input="\n".join(out), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(chairlift: Run) -> None:
    code, _, err = chairlift("completion", "tcsh")
    assert code == 2 and "'bash', 'zsh', 'fish'" in err[0]
