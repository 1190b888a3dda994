"""Settings of the server that nothing would read are refused, or told when the model is loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.info import PoolingInfo
from chairlift.errors import ConfigError
from chairlift.server.operations.idle_settings import check_adapter_settings, idle_server_settings
from tests.server.harness import INFO

EMBEDS = dataclasses.replace(INFO, pooling=PoolingInfo(task="embed", pooling_type="MEAN", normalize=True, width=8))
CHATS = {"chat_template": "/t", "tool_call_parser": "hermes", "reasoning_parser": "think", "max_stored_responses": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": "rr"}, "routing rr needs replicas or max_replicas or ray_address: with one engine"),
        ({"routing": "p2c", "replicas": 1}, "routing p2c needs"),
        ({"routing": "rr", "replicas": 2}, ""),
        ({"routing": "rr", "max_replicas": 2}, ""),
        ({"routing": "rr", "ray_address": "local"}, ""),
        ({"routing": "forecast"}, ""),  # the default
        ({"batch_max_in_flight": 4}, "batch_max_in_flight 4 needs batch_dir, without which"),
        ({"max_batch_file_bytes": 4096}, "max_batch_file_bytes 4096 needs batch_dir"),
        ({"batch_max_in_flight": 4, "max_batch_file_bytes": 4096, "batch_dir": "/b"}, ""),
        ({"max_stored_response_bytes": 9, "max_stored_responses": 0}, "max_stored_response_bytes has no effect"),
        ({"max_stored_response_bytes": 9}, ""),
        ({"max_stored_responses": 0}, ""),
    ],
)
def test_settings_that_need_another_are_refused_without_it(settings: dict[str, Any], message: str) -> None:
    if not message:
        ServerConfig(**settings)
        return
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "enabled", "names", "message"),
    [
        ({"lora_dir": "/a"}, False, ["admin"], "lora_dir needs enable_lora"),
        ({"lora_modules": ("a=b",)}, False, ["admin"], "lora_modules needs enable_lora"),
        ({"lora_dir": "/a"}, True, [], "lora_dir needs an API key that is named admin"),
        ({"lora_dir": "/a"}, True, ["alice"], "lora_dir needs an API key that is named admin"),
        ({"lora_dir": "/a"}, True, ["alice", "admin"], ""),
        ({"lora_modules": ("a=b",)}, True, [], ""),
    ],
)
def test_adapters_that_no_request_could_name_are_refused(
    settings: dict[str, Any], enabled: bool, names: list[str], message: str
) -> None:
    engine = EngineConfig.from_flat({"enable_lora": enabled})
    if not message:
        check_adapter_settings(ServerConfig(**settings), engine, names)
        return
    with pytest.raises(ConfigError, match=message):
        check_adapter_settings(ServerConfig(**settings), engine, names)


@pytest.mark.parametrize(
    ("settings", "info", "engine", "told"),
    [
        ({"allowed_media_domains": ("a.org",)}, INFO, {}, ["allowed_media_domains has no effect: this model takes no"]),
        ({"allowed_local_media_path": "/"}, INFO, {}, ["allowed_local_media_path has no effect"]),
        ({"allowed_local_media_path": "/"}, dataclasses.replace(INFO, takes_images=True), {}, []),
        (CHATS, INFO, {}, []),
        (CHATS, INFO, {"skip_tokenizer_init": True}, [f"{name} has no effect: skip_tokenizer" for name in CHATS]),
        (CHATS, EMBEDS, {}, [f"{name} has no effect: this model generates no text" for name in CHATS]),
        ({}, EMBEDS, {"skip_tokenizer_init": True}, []),
    ],
)
def test_settings_that_the_loaded_model_ignores_are_reported(
    settings: dict[str, Any], info: Any, engine: dict[str, Any], told: list[str]
) -> None:
    lines = list(idle_server_settings(ServerConfig(**settings), EngineConfig.from_flat(engine), info))
    assert len(lines) == len(told)
    assert all(line.startswith(begin) for line, begin in zip(lines, told, strict=True)), lines
