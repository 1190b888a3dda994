"""Command-line flags generated from the engine's settings and the sampling parameters, and a model loaded from these
flags."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from chairlift.base.field_docs import field_docs, first_sentence
from chairlift.base.foreign_names import answer_to
from chairlift.base.presets import PRESETS
from chairlift.base.quantities import read_count, reader_of
from chairlift.base.sampling_params import PARAMETERS, SamplingParams
from chairlift.base.vllm_names import NAMES, SERVER_NAMES, Name, explain_value, notes, translate
from chairlift.cli.environment import CONFIG_VARIABLE, read_environment, unknown_variables, variable_of
from chairlift.cli.setting_names import with_names
from chairlift.config import Flag, ServerConfig, flat_fields, server_fields
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.llm import LLM

__all__ = [
    "GivenSettings",
    "add_engine_flags",
    "add_sampling_flags",
    "add_server_flags",
    "load_llm",
    "naming_variables",
    "read_server_settings",
    "read_settings",
    "shorten_help",
    "show_progress",
    "whole",
    "whole_number",
]

_TITLES: Final = {"model": "model", "cache": "KV cache", "scheduler": "scheduler", "lora": "adapters"}
_ENGINE: Final = "engine_"
_SAMPLING: Final = "sampling_"
_SERVER: Final = "server_"

_SHORT: Final = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
"""Engine setting -> short form of its flag, as in vLLM."""
_FURTHER_SENTENCES: Final = re.compile(r"(?<=\.) (?!\(default).*?(?= \(default: [^)]*\)$|$)")
"""Matches all sentences of a help text after the first, up to its default value."""
_JSON: Final = {
    "service_classes": '{"chat": {"priority": -5, "min_seqs": 8, "ttft_ms": 500}}',
    "tenant_weights": '{"alice": 2}',
}
"""Setting whose value is a JSON object -> example. In a config file the value is a mapping; as a flag it is JSON text
or @FILE."""


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add ``--config``, and one flag per engine setting, grouped as in :class:`~chairlift.config.EngineConfig`.

    Flags that the user does not give are missing in the namespace. ``leave_out`` names settings without a flag.
    """
    groups = {part: parser.add_argument_group(title) for part, title in _TITLES.items()}
    groups["model"].add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML or JSON file with flags as keys; flags on the command line take precedence",
    )
    for flag in flat_fields():
        if flag.name in leave_out:
            continue
        _add_flag(groups[flag.part], flag, _ENGINE)
    _add_vllm_flags(parser, NAMES)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server's settings (:class:`~chairlift.config.ServerConfig`)."""
    group = parser.add_argument_group("server")
    for flag in server_fields():
        _add_flag(group, flag, _SERVER)
    _add_vllm_flags(parser, SERVER_NAMES)


def _add_vllm_flags(parser: argparse.ArgumentParser, names: Mapping[str, Name]) -> None:
    """Add flags that only vLLM has. :mod:`chairlift.base.vllm_names` translates, ignores or refuses them. Help does not
    list them."""
    for name, known in names.items():
        options: dict[str, Any] = {"dest": _ENGINE + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        read = _object if known.kind is dict else known.kind
        options |= {"action": argparse.BooleanOptionalAction} if known.kind is bool else {"type": read}
        parser.add_argument(*([_SHORT[name]] if name in _SHORT else []), _spelled(name), **options)


def _object(text: str) -> Any:
    """argparse parser for a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:60]!r}")
    return value


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, prefix: str) -> None:
    options: dict[str, Any] = {"dest": prefix + flag.name, "default": argparse.SUPPRESS}
    note = "" if flag.default in (None, (), "") else f" (default: {flag.default})"
    if flag.name in _JSON:
        note = f" As text, or @FILE.json. Example: '{_JSON[flag.name]}'"
    options["help"] = (flag.help + note).replace("%", "%%")
    if flag.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif flag.choices:
        options["choices"] = flag.choices
        options["type"] = functools.partial(_explained, flag.name)
    elif flag.name == "served_model_name":  # several in one flag, as vLLM's
        options |= {"action": "append", "metavar": "NAME", "nargs": "+"}
    elif flag.kind is list:
        options |= {"action": "append", "metavar": "TEXT"}
    else:
        options["type"] = _amount(flag.name, flag.kind) or flag.kind
        options["metavar"] = "JSON" if flag.name in _JSON else {int: "N", float: "X"}.get(flag.kind, "TEXT")
    group.add_argument(*([_SHORT[flag.name]] if flag.name in _SHORT else []), _spelled(flag.name), **options)


def _explained(name: str, text: str) -> str:
    """A setting's value, unless it is one of vLLM's, for which the error says what to write."""
    if (problem := explain_value(name, text)) is not None:
        raise argparse.ArgumentTypeError(problem)
    return text


def _amount(name: str, kind: type) -> Callable[[str], int] | None:
    """argparse parser for a setting that is an amount (such as ``4GB`` or ``32k``). None for other settings."""
    read = reader_of(name, kind)
    if read is None:
        return None

    def parse(text: str) -> int:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name} ")) from None

    return parse


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add a flag for each sampling parameter. Flags that the user does not give are missing in the namespace."""
    group = parser.add_argument_group("sampling")
    docs = field_docs(SamplingParams)
    notes = {"max_tokens": f" (default: {max_tokens}, or what fits)", "temperature": " (default: 0)"}
    for name, declared in PARAMETERS.items():
        if not declared.flag:
            continue
        more = "; may be repeated" if declared.kind is list else notes.get(name, "")
        options: dict[str, Any] = {"dest": _SAMPLING + name, "default": argparse.SUPPRESS}
        options["help"] = first_sentence(docs[name]) + more
        if declared.kind is bool:
            options["action"] = "store_true"
        elif declared.kind is list:
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options["type"] = _amount(name, declared.kind) or declared.kind
            options["metavar"] = "N" if declared.kind is int else "X"
        group.add_argument(_spelled(name), **options)


def shorten_help(
    parser: argparse.ArgumentParser,
    everyday: Collection[str],
    *,
    usage: str = "[MODEL] [FLAG ...]",
    variables: bool = True,
) -> None:
    """Make ``--help`` list only the ``everyday`` flags, with one sentence each. ``--help-all`` then lists all flags
    with their full texts, and with ``variables`` the environment variables of :func:`read_server_settings`.

    Call this after all flags are added. Raises KeyError for a flag that the parser does not have.
    """
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    shown = {flags[flag] for flag in everyday} | {flags["--help"]}
    full = {action: _with_variable(action) if variables else action.help for action in flags.values()}

    class HelpAll(argparse.Action):
        """argparse action that prints the help with all flags and exits."""

        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            parser.usage = None
            for action, text in full.items():
                action.help = text
            parser.print_help()
            parser.exit()

    for action in full:
        action.help = _FURTHER_SENTENCES.sub("", action.help or "") if action in shown else argparse.SUPPRESS
    parser.usage = f"{parser.prog} {usage}"
    hidden = sum(text != argparse.SUPPRESS for action, text in full.items() if action not in shown)
    parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help=f"list the other {hidden} flags, with full descriptions"
    )


def _with_variable(action: argparse.Action) -> str:
    """Help text of a flag, with its environment variable if it is a setting."""
    text = action.help or ""
    if text == argparse.SUPPRESS:
        return text
    if action.dest == "config":
        return f"{text} [{CONFIG_VARIABLE}]"
    found = re.fullmatch(f"(?:{_ENGINE}|{_SERVER})(.+)|model_flag", action.dest)
    return text if found is None else f"{text} [{variable_of(found[1] or 'model')}]"


def read_settings(
    args: argparse.Namespace, *, sampling: bool, greedy: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine settings for :class:`~chairlift.LLM`, sampling parameters), from the config file and the flags. Flags
    take precedence over the file. Of the environment only ``CHAIRLIFT_PRESET`` is read, so that what a shell exports
    for a server does not change a measurement.

    If no temperature is given, sampling is greedy, except with ``greedy`` false. With ``sampling`` false the command
    has no sampling parameters, and refuses them in the file. Raises ConfigError.
    """
    names = {name for name, declared in PARAMETERS.items() if declared.flag} if sampling else set()
    file = _read_file(args.config, {name: (PARAMETERS[name].kind, True) for name in names})
    engine = {name: value for name, value in file.items() if name not in names}
    engine |= _preset_of_environment() | _values_of_flags(args, _ENGINE)
    given = {name: value for name, value in file.items() if name in names} | _values_of_flags(args, _SAMPLING)
    return _translated(engine), ({"temperature": 0.0} if greedy else {}) | given if sampling else {}


class GivenSettings(NamedTuple):
    """Settings of ``chairlift serve``."""

    engine: dict[str, Any]
    """Settings of the engine by name, those of a preset not included."""
    server: ServerConfig
    sources: dict[str, str]
    """Name of each given setting -> its source: ``command line``, the environment variable, or the config file."""


def read_server_settings(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> GivenSettings:
    """All settings of ``chairlift serve``. A flag takes precedence over the environment variable, and the variable over
    the config file.

    Variables that are no settings are named on standard error. ``environment`` is that of the process by default.
    Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    flags = (*flat_fields(), *server_fields())
    for line in unknown_variables(flags, environment):
        print(f"chairlift: warning: {line}", file=sys.stderr)
    server = {flag.name: (flag.kind, flag.default is None) for flag in server_fields()}
    path = args.config
    if path is None and (named := environment.get(CONFIG_VARIABLE)):
        path = Path(named)
    variables = {
        name: _json_text(name, value) if name in _JSON else value
        for name, value in read_environment(flags, environment).items()
    }
    file = _read_file(path, server)
    on_line = _values_of_flags(args, _ENGINE) | _values_of_flags(args, _SERVER)
    sources = dict.fromkeys(file, str(path)) | {name: variable_of(name) for name in variables}
    sources |= dict.fromkeys(on_line, "command line")
    given = file | variables | on_line
    engine = {name: value for name, value in given.items() if name not in server}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in server
    }
    with naming_variables(sources):
        return GivenSettings(_translated(engine), ServerConfig(**values), sources)


@contextlib.contextmanager
def naming_variables(sources: Mapping[str, str]) -> Iterator[None]:
    """Context manager: a ConfigError about a setting from the environment names its variable. ``sources`` are those of
    :class:`GivenSettings`."""
    try:
        yield
    except ConfigError as error:
        names = {name: source for name, source in sources.items() if source == variable_of(name)}
        raise type(error)(with_names(str(error), names)) from None


def _translated(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Translate or remove settings that have vLLM's names. Prints a line to standard error for each translated
    setting."""
    for line in notes(engine):
        print(f"chairlift: {line}", file=sys.stderr)
    return translate(engine)


def _preset_of_environment() -> dict[str, Any]:
    """The setting ``preset`` if the environment names one. Raises ConfigError for an unknown one."""
    variable = variable_of("preset")
    preset = os.environ.get(variable)
    if preset and preset not in PRESETS:
        raise ConfigError(f"{variable} must be one of {', '.join(PRESETS)}; got {preset!r:.100}")
    return {"preset": preset} if preset else {}


def _read_file(path: Path | None, more: Mapping[str, tuple[type, bool]]) -> dict[str, Any]:
    """Setting -> value, from a YAML or JSON file. Dashes in names become underscores, and types are checked.

    Allowed are the engine's settings and ``more``: setting -> (type, whether null is allowed).
    """
    if path is None:
        return {}
    content = _parse(path, _read_text("the config file", path))
    if not isinstance(content, dict):
        raise ConfigError(f"the config file {path} must hold names and values, got {type(content).__name__}")
    kinds: dict[str, tuple[type, bool]] = {flag.name: (flag.kind, flag.default is None) for flag in flat_fields()}
    kinds |= {name: (known.kind, True) for name, known in (NAMES | SERVER_NAMES).items()}
    kinds |= more
    settings = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            if (answer := answer_to(name, python=True)) is not None:
                raise ConfigError(f"{path}: {answer}")
            near = difflib.get_close_matches(name, list(kinds), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(kinds)}"
            raise ConfigError(f"unknown setting {str(key)!r} in {path}; {hint}")
        settings[name] = _checked(path, name, value, *kinds[name])
    return settings


def load_llm(settings: Mapping[str, Any], quiet: bool) -> LLM:
    """Load the model. Shows progress on a terminal, except with ``quiet``."""
    from chairlift import LLM  # takes torch along, which --help and usage errors need not wait for

    show = show_progress if not quiet and sys.stderr.isatty() else None
    llm = LLM(progress=show, **settings)
    if show is not None:
        limits = llm.config.scheduler
        per_step = f"{limits.max_num_seqs} requests and {limits.max_num_batched_tokens:,} tokens"
        print(f"{llm.config.model.model}: a step takes up to {per_step}; {llm.memory_plan}", file=sys.stderr)
    return llm


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values_of_flags(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    given = {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}
    if given.get("served_model_name"):
        given["served_model_name"] = [name for names in given["served_model_name"] for name in names]
    return {name: _json_text(name, value) if name in _JSON else value for name, value in given.items()}


def _json_text(name: str, value: str) -> str:
    """Text of a setting in JSON. For the value ``@FILE``, the text is read from the file. Raises ConfigError."""
    if not value.startswith("@"):
        return value
    return _read_text(f"the file of {_spelled(name)}", Path(value[1:]))


def _read_text(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read {what} {path}: {reason}") from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the config file {path} is not valid JSON: {error}") from None
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"the config file {path} is not valid YAML: {error}") from None


def _checked(path: Path, name: str, value: Any, kind: type, optional: bool) -> Any:
    """Convert ``value`` from a config file to ``kind``, the type of the setting; 4.0 is allowed for an integer. Raises
    ConfigError for another type."""
    if value is None and optional:
        return value
    if name in _JSON and isinstance(value, dict):
        return json.dumps(value, default=str)
    if name in _JSON and isinstance(value, str):
        return _json_text(name, value)
    if name in _JSON:
        raise ConfigError(f"{name} in {path} must be a mapping, JSON text or @FILE, got {str(value)[:40]!r}")
    if kind is list and isinstance(value, str):
        return [value]
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and (read := reader_of(name, kind)) is not None:
        try:
            return read(value)
        except ConfigError as error:
            raise ConfigError(str(error).replace(name, f"{name} in {path}", 1)) from None
    if type(value) is not kind:
        raise ConfigError(f"{name} in {path} must be of type {kind.__name__}, got {str(value)[:40]!r}")
    return value


def show_progress(label: str, share: float) -> None:
    """Overwrite the current line of a terminal with the progress of a phase, and remove the line at its end."""
    end = "\r\x1b[K" if share >= 1 else ""
    print(f"\r\x1b[K{label} {share:4.0%}", end=end, file=sys.stderr, flush=True)


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """Parser for a whole number from ``minimum`` to ``maximum``, for argparse."""

    def parse(text: str) -> int:
        try:
            value = read_count("", text)
        except ConfigError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number from {minimum:,} to {maximum:,}, got {text!r}")
        return value

    return parse


def whole(text: str) -> int:
    """argparse parser of a whole number, which may be written as ``4k``, ``32K``, ``1_000`` or ``1e6``."""
    try:
        return read_count("", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
