"""``chairlift completion``: prints a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Final, NamedTuple

from chairlift.config import known_values

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "print a script that completes commands and flags in your shell"
DESCRIPTION: Final = """Print a script that completes commands, flags and their values in your shell.

  bash  chairlift completion bash > ~/.local/share/bash-completion/completions/chairlift
  zsh   add to ~/.zshrc, after compinit: source <(chairlift completion zsh)
  fish  chairlift completion fish > ~/.config/fish/completions/chairlift.fish

Where no word fits, file names are completed. Print the script again after an update."""

_BASH: Final = """# completion of chairlift for bash, made by: chairlift completion bash
_chairlift() {
    local word path="" current="${COMP_WORDS[COMP_CWORD]}" previous="" words="" values=""
    ((COMP_CWORD > 1)) && previous="${COMP_WORDS[COMP_CWORD - 1]}"
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do
        case "$path $word" in
%(commands)s
        esac
    done
    case "$path $previous" in
%(values)s
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
        return
    fi
    case "$path" in
%(words)s
    esac
    if [[ $current == -* || -z $path || $words != -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}
complete -o filenames -F _chairlift chairlift
"""
_ZSH: Final = """# completion of chairlift for zsh, made by: chairlift completion zsh
autoload -U +X bashcompinit && bashcompinit
"""


class _Command(NamedTuple):
    """A command with its completions."""

    path: tuple[str, ...]
    """Words after ``chairlift``."""
    commands: dict[str, str]
    """Name of each command below -> its summary."""
    flags: dict[str, str]
    """Long flag -> its help text."""
    values: dict[str, list[str]]
    """Flag or short flag -> its possible values, if they are known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift completion``."""
    parser.add_argument("shell", metavar="SHELL", choices=["bash", "zsh", "fish"], help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script. Returns 0."""
    from chairlift.cli.main import make_parser

    commands = list(_commands(make_parser(), ()))
    if args.shell == "fish":
        print(_fish(commands), end="")
    else:
        print((_ZSH if args.shell == "zsh" else "") + _bash(commands), end="")
    return 0


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[_Command]:
    """The command and all commands below it."""
    below: dict[str, argparse.ArgumentParser] = {}
    command = _Command(path, {}, {}, {})
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            command.commands.update({name: summaries.get(name, "") for name in below})
        elif action.help != argparse.SUPPRESS or path in (("serve",), ("run",)):
            if action.option_strings and not _is_foreign(action):
                long = [flag for flag in action.option_strings if flag.startswith("--")]
                command.flags.update(dict.fromkeys(long, _first(action.help or "")))
            values = list(map(str, action.choices or known_values(action.dest.removeprefix("engine_"))))
            if values:
                command.values.update(dict.fromkeys(action.option_strings or [""], values))
    yield command
    for name, each in below.items():
        yield from _commands(each, (*path, name))


def _is_foreign(action: argparse.Action) -> bool:
    """Whether a hidden flag is another engine's, or an older name."""
    from chairlift.base.vllm_names import NAMES, SERVER_NAMES

    name = action.dest.removeprefix("engine_")
    return (name in NAMES or name in SERVER_NAMES) or "--base-url" in action.option_strings


def _first(text: str) -> str:
    """First sentence of a help text."""
    return "" if text == argparse.SUPPRESS else " ".join(text.replace("%%", "%").partition(". ")[0].split())


def _bash(commands: list[_Command]) -> str:
    known, values, words = [], [], []
    for each in commands:
        path = " ".join(each.path)
        if each.path:
            above = " ".join(each.path[:-1])
            known.append(f"            {shlex.quote(f'{above} {each.path[-1]}')}) path={shlex.quote(path)} ;;")
        for flag, choices in each.values.items():
            if flag:
                values.append(f"        {shlex.quote(f'{path} {flag}')}) values={shlex.quote(' '.join(choices))} ;;")
        listed = [*each.commands, *each.values.get("", ()), *each.flags]
        words.append(f"        {shlex.quote(path)}) words={shlex.quote(' '.join(listed))} ;;")
    return _BASH % {"commands": "\n".join(known), "values": "\n".join(values), "words": "\n".join(words)}


def _fish(commands: list[_Command]) -> str:
    lines = ["# completion of chairlift for fish, made by: chairlift completion fish"]
    for each in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in each.path]
        if len(each.path) == 1:  # serve, but not bench serve
            above = [other.path[0] for other in commands if other.path[1:] == each.path]
            seen += [f"not __fish_seen_subcommand_from {name}" for name in above]
        used = " ; and ".join(seen) or "__fish_use_subcommand"
        inner = " ".join(each.commands)
        below = f"{used} ; and not __fish_seen_subcommand_from {inner}" if each.path and inner else used
        start = f"complete -c chairlift -n {shlex.quote(used)}"
        for name, summary in each.commands.items():
            lines.append(f"complete -c chairlift -f -n {shlex.quote(below)} -a {name} -d {shlex.quote(summary)}")
        if each.values.get(""):
            lines.append(f"{start} -f -a {shlex.quote(' '.join(each.values['']))}")
        for flag, text in each.flags.items():
            choices = f" -x -a {shlex.quote(' '.join(each.values[flag]))}" if flag in each.values else ""
            lines.append(f"{start} -l {flag[2:]}{choices} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"
