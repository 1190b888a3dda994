"""``chairlift serve``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

from chairlift.cli.commands import LIVE_COMPARISON, TRAINING_SERVER
from chairlift.cli.flags import (
    add_engine_flags,
    add_server_flags,
    naming_variables,
    read_server_settings,
    shorten_help,
)
from chairlift.config import EngineConfig, ServerConfig, flat_fields, server_fields
from chairlift.errors import ConfigError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "serve a model over HTTP with OpenAI's API"
DESCRIPTION: Final = """Serve a model over HTTP with OpenAI's API. All clients share one continuous batch.

  chairlift serve                          the bundled model, at http://127.0.0.1:8000
  chairlift serve DIRECTORY --port 9000    your own model
  chairlift serve --models DIRECTORY       many models, each loaded when a request needs it
  chairlift serve --host 0.0.0.0 --api-key-file keys.txt

Every flag is also an environment variable: CHAIRLIFT_MAX_NUM_SEQS=8 for --max-num-seqs 8. The command
line wins over the environment, and the environment over --config. --dry-run shows each value's source.

SIGTERM, Ctrl-C and the end of the terminal start a drain: new requests get 503, and running answers have
--shutdown-timeout to finish. A second SIGTERM or Ctrl-C stops the server at once.

exit codes:
  0  stopped as requested; every accepted request was answered
  1  stopped as requested; some requests were cut off by the timeout, a second signal or the end of the engine
  2  the settings, the model or the port cannot be used
  3  the engine died, and --no-restart was set or restarting did not help"""

_SECRET: Final = ("api_key",)
_EVERYDAY: Final = (
    *("--dry-run", "--host", "--port", "--served-model-name", "--api-key-file", "--insecure", "--chat-template"),
    *("--models", "--models-memory-bytes"),
    *("--lora-modules", "--log-requests", "--batch-dir", "--config", "--dtype", "--quantization", "--device"),
    *("--threads", "--max-model-len", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-num-seqs"),
    *("--max-num-batched-tokens", "--preset", "--scheduling-policy", "--speculative-config", "--enable-lora"),
)
"""Flags that ``--help`` lists. ``--help-all`` lists every flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift serve``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory or Hub id (default: the bundled model)")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="MODEL as a flag")
    parser.add_argument("--dry-run", action="store_true", help="print the settings that would be used, and exit")
    add_server_flags(parser)
    add_engine_flags(parser, leave_out={"model"})
    shorten_help(parser, _EVERYDAY)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Returns an exit code, which ``DESCRIPTION`` lists."""
    engine, server, sources = read_server_settings(args)
    _check_names(args, engine)
    if None not in (args.model, args.model_flag) and args.model != args.model_flag:
        raise ConfigError(f"two models are given, {args.model!r} and {args.model_flag!r}; give one")
    if (model := args.model_flag if args.model is None else args.model) is not None:
        engine["model"] = model
        sources["model"] = "command line"
    with naming_variables(sources):
        config = EngineConfig.from_flat(engine)
    if server.models is not None:
        return _run_models(args, engine, server)
    if args.dry_run:
        print(_settings(config, server, sources))
        return 0
    try:
        import uvloop

        from chairlift.server.http.lifecycle import serve
        from chairlift.server.http.logs import configure_logging
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("chairlift"):
            raise
        raise ConfigError(f"the server needs {error.name}; install it with pip install {error.name}") from None
    configure_logging(server.log_format, verbose=args.verbose)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if server.enable_training:
            code: int = runner.run(_training_server().serve_training(server, config, comparison=LIVE_COMPARISON))
            return code
        return runner.run(serve(server, config, comparison=LIVE_COMPARISON))


def _training_server() -> ModuleType:
    """The module of the server that also trains. Raises ConfigError if a package that it needs is missing."""
    try:
        return importlib.import_module(TRAINING_SERVER)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("chairlift"):
            raise
        raise ConfigError(
            f"enable_training needs {error.name}; install it with pip install 'chairlift[train]'"
        ) from None


def _run_models(args: argparse.Namespace, engine: dict[str, Any], server: ServerConfig) -> int:
    """Serve many models until stopped. Returns an exit code."""
    from chairlift.server.models.serving import check_models, serve_models

    entries = check_models(server, engine)
    if args.dry_run:
        for entry in entries:
            pinned = ", pinned" if entry.pinned else ""
            print(f"{', '.join(entry.names)}: {entry.config.model.model}{pinned}")
        return 0
    import uvloop

    from chairlift.server.http.logs import configure_logging

    configure_logging(server.log_format, verbose=args.verbose)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_models(server, engine, comparison=LIVE_COMPARISON))


def _check_names(args: argparse.Namespace, engine: Mapping[str, Any]) -> None:
    """Raise ConfigError if no model is given and --served-model-name has several words, because one of them may be
    meant as the model."""
    names = next((each for each in getattr(args, "server_served_model_name", []) if len(each) > 1), None)
    if names is not None and args.model is None and args.model_flag is None and "model" not in engine:
        raise ConfigError(
            f"--served-model-name takes every word after it for a name ({', '.join(names)}), and no model is given;"
            " write the model first: chairlift serve MODEL --served-model-name NAME NAME"
        )


def _settings(config: EngineConfig, server: ServerConfig, sources: Mapping[str, str]) -> str:
    """All settings as ``name: value`` lines, which ``--config`` can read. Secrets are left out. A comment names the
    source of each value that is not a default."""
    defaults = {flag.name: flag.default for flag in (*flat_fields(), *server_fields())}
    values: dict[str, Any] = {}
    for part in (config.model, config.cache, config.scheduler, config.lora, server):
        values |= dataclasses.asdict(part)
    lines = []
    for name, value in values.items():
        if name in _SECRET:
            lines.append(f"# {name}: {len(value)} given, not shown")
            continue
        source = sources.get(name)
        if source is None and value != defaults[name]:
            source = f"preset {config.scheduler.preset}" if config.scheduler.preset else "follows from other settings"
        lines.append(f"{name}: {json.dumps(value)}" + (f"  # {' '.join(source.split())}" if source else ""))
    return "\n".join(lines)
