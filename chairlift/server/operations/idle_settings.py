"""Settings of the server that have no effect together with settings of the engine, or for the loaded model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Final

from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.info import EngineInfo
from chairlift.errors import ConfigError
from chairlift.server.http.auth import ADMIN

__all__ = ["check_adapter_settings", "idle_server_settings"]

_OF_CHATS: Final = (
    *("chat_template", "tool_call_parser", "reasoning_parser"),
    *("max_stored_responses", "max_stored_response_bytes"),
)
_OF_IMAGES: Final = ("allowed_media_domains", "allowed_local_media_path")


def check_adapter_settings(config: ServerConfig, engine_config: EngineConfig, tenants: Collection[str]) -> None:
    """Raise ConfigError for settings of adapters that nobody could use. ``tenants`` are the names of the API keys."""
    for name in ("lora_modules", "lora_dir"):
        if getattr(config, name) and not engine_config.lora.enable_lora:
            raise ConfigError(f"{name} needs enable_lora, without which no adapters are served")
    if config.lora_dir is not None and ADMIN not in tenants:
        raise ConfigError(
            f"lora_dir needs an API key that is named {ADMIN}, because only it may load adapters: a line '{ADMIN} KEY'"
            " in the file of --api-key-file"
        )


def idle_server_settings(config: ServerConfig, engine_config: EngineConfig, info: EngineInfo) -> Iterator[str]:
    """One sentence for each setting that was changed from its default and has no effect for the loaded model."""
    given = {field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default}
    no_chats = ""
    if info.pooling is not None:
        no_chats = "this model generates no text"
    elif engine_config.model.skip_tokenizer_init:
        no_chats = "skip_tokenizer_init is set, and chats need the tokenizer"
    if no_chats:
        yield from (f"{name} has no effect: {no_chats}" for name in _OF_CHATS if name in given)
    if not info.takes_images:
        yield from (f"{name} has no effect: this model takes no images" for name in _OF_IMAGES if name in given)
