"""Reads which models a server has: a directory of models, or a YAML or JSON file that names them.

::

    models:
      chat:                      # the name for clients
        model: /models/chat      # a directory, a GGUF file, a Hub id, or 'bundled'
        aliases: [gpt-4o-mini]
        pinned: true             # loaded at the start, and never unloaded
        weight: 2                # its share of the processors, beside models of weight 1
        adapters: {formal: /adapters/formal}
        max_model_len: 8192      # any setting of the engine
      small: /models/small       # only a path
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.base.quantities import reader_of
from chairlift.config import EngineConfig, flat_fields
from chairlift.errors import ConfigError

__all__ = ["CatalogEntry", "read_catalog"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_OWN: Final = ("model", "path", "aliases", "pinned", "adapters", "chat_template", "keep_alive", "weight")
_WEIGHTS: Final = (0.01, 100.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model of the server."""

    name: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of an adapter -> its directory or Hub id."""
    pinned: bool = False
    chat_template: str | None = None
    keep_alive: float | None = None
    """Seconds without requests after which the model is unloaded; None: as the server's setting says."""
    weight: float = 1.0
    """Share of the time of the processors, relative to other models that compute at the same time."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)


def read_catalog(source: str, settings: Mapping[str, Any], kv_bytes: int) -> list[CatalogEntry]:
    """The models of a directory or a file, in order. ``settings`` are the engine's settings of all models, which a
    model's own replace; ``kv_bytes`` is the memory for KV of a model without a setting. Raises ConfigError."""
    path = Path(source).expanduser()
    if path.is_dir():
        found: dict[str, Any] = {_name_of(each): {"model": str(each)} for each in _models_in(path)}
        if not found:
            raise ConfigError(f"models: {path} has no directory with a config.json, and no GGUF file")
    else:
        found = _read_file(path)
    entries = [_entry(path, name, given, settings, kv_bytes) for name, given in found.items()]
    seen: dict[str, str] = {}
    for entry in entries:
        for name in (*entry.names, *entry.adapters):
            if name in seen:
                raise ConfigError(f"{path}: the name {name!r} is given to {seen[name]!r} and to {entry.name!r}")
            seen[name] = entry.name
    return entries


def _models_in(path: Path) -> Iterator[Path]:
    """Directories with a model, and GGUF files without image encoders."""
    for each in sorted(path.iterdir()):
        if each.name.startswith("."):
            continue
        is_model = each.is_dir() and ((each / "config.json").exists() or any(each.glob("*.gguf")))
        if is_model or (each.suffix == ".gguf" and "mmproj" not in each.name):
            yield each


def _name_of(path: Path) -> str:
    """Name of a model for clients: that of its directory or file, with - for characters that names cannot have."""
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", path.name.removesuffix(".gguf")).lstrip("-._:")[:128] or "model"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"models must be a directory, or a YAML or JSON file; cannot read {path}: {reason}") from None
    import yaml

    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"models: {path} cannot be read: {error}") from None
    found = content.get("models") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"models: {path} must have 'models:', with a name and a path for each model")
    if unknown := [str(key) for key in content if key != "models"]:
        raise ConfigError(f"models: {path} has {', '.join(unknown)} beside 'models:'; only models are read")
    return {str(name): given for name, given in found.items()}


def _entry(path: Path, name: str, given: Any, settings: Mapping[str, Any], kv_bytes: int) -> CatalogEntry:
    where = f"{path}: {name}"
    given = {"model": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a path, or names and values; got {type(given).__name__}")
    own = {str(key).replace("-", "_"): value for key, value in given.items()}
    if "model" not in own and "path" not in own:
        raise ConfigError(f"{where} needs 'model:', a directory, a GGUF file, a Hub id or 'bundled'")
    engine = dict(settings) | {key: _setting(where, key, own[key]) for key in own if key not in _OWN}
    engine["model"] = _location(path, str(own.get("model", own.get("path"))))
    adapters = _mapping(where, own.get("adapters"))
    if adapters:
        engine["enable_lora"] = True
    keeps_kv = not engine["model"].startswith("hashlm")
    if keeps_kv and engine.get("kv_cache_memory_bytes") is None and engine.get("num_kv_blocks") is None:
        engine["kv_cache_memory_bytes"] = kv_bytes
    aliases = own.get("aliases") or ()
    aliases = (aliases,) if isinstance(aliases, str) else tuple(str(each) for each in aliases)
    for each in (name, *aliases):
        if not _NAME.fullmatch(each):
            raise ConfigError(f"{where}: names must be of letters, digits and ._/:-, got {each!r:.100}")
    pinned = own.get("pinned", False)
    keep = own.get("keep_alive")
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}: pinned must be true or false, got {pinned!r:.40}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, (int, float)) or keep < 0):
        raise ConfigError(f"{where}: keep_alive must be a number of seconds, got {keep!r:.40}")
    weight = own.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not _WEIGHTS[0] <= weight <= _WEIGHTS[1]:
        raise ConfigError(f"{where}: weight must be a number from {_WEIGHTS[0]} to {_WEIGHTS[1]:g}, got {weight!r:.40}")
    try:
        config = EngineConfig.from_flat(engine)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if config.model.device != "cpu":
        raise ConfigError(
            f"{where}: device is {config.model.device!r}, and several models share the processors of this machine;"
            " start a server for each model on a GPU"
        )
    template = own.get("chat_template")
    return CatalogEntry(
        name=name,
        config=config,
        aliases=aliases,
        adapters={key: _location(path, value) for key, value in adapters.items()},
        pinned=pinned,
        chat_template=None if template is None else _location(path, str(template)),
        keep_alive=keep,
        weight=float(weight),
    )


def _setting(where: str, name: str, value: Any) -> Any:
    """Value of a setting of the engine. Amounts may be texts such as 4GB. Raises ConfigError for an unknown name."""
    kinds = {flag.name: flag.kind for flag in flat_fields()}
    if name not in kinds:
        near = difflib.get_close_matches(name, [*kinds, *_OWN], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_OWN)}, and the engine's settings"
        raise ConfigError(f"{where}: unknown setting {name!r:.100}; {hint}")
    if isinstance(value, str) and (read := reader_of(name, kinds[name])) is not None:
        return read(value)
    return json.dumps(value) if isinstance(value, dict) else value


def _mapping(where: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ConfigError(f"{where}: adapters must be names and paths, got {value!r:.100}")
    return {str(key): each for key, each in value.items()}


def _location(source: Path, text: str) -> str:
    """A path relative to the file that names it, if it exists there; otherwise the text itself."""
    local = Path(text).expanduser()
    beside = source.parent / local if source.is_file() else local
    return str(beside.absolute()) if beside.exists() else text
