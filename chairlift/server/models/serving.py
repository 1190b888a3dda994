"""Runs a server with many models."""

from __future__ import annotations

from typing import Any

from chairlift.config import EngineConfig, ServerConfig
from chairlift.fleet.models.catalog import CatalogEntry
from chairlift.server.http import lifecycle
from chairlift.server.models.desk import make_models_app
from chairlift.server.models.engine import StartModel, check_combines, entries_of, starter

__all__ = ["check_models", "serve_models"]


def check_models(config: ServerConfig, settings: dict[str, Any]) -> list[CatalogEntry]:
    """The models that the settings name. ``settings`` are the engine's settings of all models. Raises ConfigError for
    settings that do not combine with ``models``, and for a model that is not described correctly."""
    check_combines(config, settings.get("model"))
    return entries_of(config, settings)


async def serve_models(
    config: ServerConfig,
    settings: dict[str, Any],
    *,
    stop: lifecycle.Stop | None = None,
    start_engine: StartModel = lifecycle.start_engine,
    comparison: str | None = None,
) -> int:
    """Serve many models until stopped; see :func:`chairlift.server.http.lifecycle.serve`."""
    entries = check_models(config, settings)

    def announce(text: str) -> None:
        pinned = sum(entry.pinned for entry in entries)
        names = ", ".join(entry.name for entry in entries[:8]) + ", ..." * (len(entries) > 8)
        print(
            f"{text}\n  models    {len(entries)} ({pinned} pinned): {names}\n  state     {text.split()[-1]}/v1/models"
        )

    return await lifecycle.serve(
        config,
        EngineConfig(),
        stop=stop,
        start_engine=starter(entries, start_engine),
        make_app=make_models_app,
        announce=announce,
        comparison=comparison,
    )
