"""Settings of ``chairlift serve`` in environment variables: ``CHAIRLIFT_`` and the name of the setting in capitals."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from chairlift.base.quantities import reader_of
from chairlift.config import Flag
from chairlift.errors import ConfigError

__all__ = ["CONFIG_VARIABLE", "read_environment", "unknown_variables", "variable_of"]

_PREFIX: Final = "CHAIRLIFT_"
_OTHER_NAMES: Final = {"kernels": "CHAIRLIFT_RUN_KERNELS"}
"""Setting -> its variable, if the usual name is taken: CHAIRLIFT_KERNELS selects the kernels that are compiled."""
CONFIG_VARIABLE: Final = "CHAIRLIFT_CONFIG"
"""Variable that names the config file."""
_NOT_SETTINGS: Final = frozenset(
    f"{_PREFIX}{name}"
    for name in ("CONFIG", "KERNELS", "WITHOUT_KERNELS", "VENV", "TEMPLATES", "LAUNCHER", "MEMORY", "MODELS")
)
"""Variables that other programs read: the installation, tools/start.py, the tests, training and deploy/compose.yaml."""
_OF_KUBERNETES: Final = re.compile(r"CHAIRLIFT_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes sets in the containers beside a service named chairlift."""
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://.*")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def variable_of(name: str) -> str:
    """Environment variable of a setting."""
    return _OTHER_NAMES.get(name, f"{_PREFIX}{name.upper()}")


def read_environment(flags: Iterable[Flag], environment: Mapping[str, str]) -> dict[str, Any]:
    """Setting -> value, of the settings whose variable is set and not empty. Raises ConfigError that names the
    variable.

    A list is a JSON list, or texts between commas. Ranges and choices are checked by the settings themselves.
    """
    found = {}
    for flag in flags:
        variable = variable_of(flag.name)
        text = environment.get(variable, "")
        if text and not (flag.name == "port" and _ADDRESS.fullmatch(text)):  # Kubernetes sets such a CHAIRLIFT_PORT
            found[flag.name] = _value(variable, flag, text)
    return found


def unknown_variables(flags: Iterable[Flag], environment: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable that begins with ``CHAIRLIFT_`` and is neither a setting nor known otherwise."""
    known = {variable_of(flag.name) for flag in flags} | _NOT_SETTINGS
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in known or _OF_KUBERNETES.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "chairlift serve --help-all lists the variables"
        yield f"the environment variable {name} is no setting and has no effect; {hint}"


def _value(variable: str, flag: Flag, text: str) -> Any:
    if flag.kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{variable} must be true or false, got {text!r:.100}")
        return text.lower() in _TRUE
    if flag.kind is list:
        return _texts(variable, text)
    if (read := reader_of(flag.name, flag.kind)) is not None:
        try:
            return read(text)
        except ConfigError as error:
            raise ConfigError(str(error).replace(flag.name, variable, 1)) from None
    if flag.kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{variable} must be a number, got {text!r:.100}") from None
    return text


def _texts(variable: str, text: str) -> list[str]:
    """The texts of a list. A JSON object is one text, such as an adapter of ``lora_modules``."""
    if text.startswith("{"):
        return [text]
    if not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{variable} is not a JSON list ({error}); write one, or texts between commas") from None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]
