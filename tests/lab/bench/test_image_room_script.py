"""``benchmarks/image_room.py``: with the engine's rule every request ends, where others would wait for each other."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from chairlift.engine import images
from chairlift_lab.replay.machines import deploy, shape_from_name

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "image_room.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("image_room_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [0, 2])
def test_requests_with_several_images_end_only_if_needed_rows_may_be_given_up(script: Any, seed: int) -> None:
    world = dataclasses.replace(script.WORLDS["several images"], answer=(200, 500), rate=2.0, room=4)
    deployment, found = deploy("genoa-9654", shape_from_name("llama-3.2-1b")), {}
    for name, rule in script.RULES.items():
        with patch.object(images, "rows_to_give_up", rule):
            found[name] = script.run(world, deployment, 25, seed)
    assert found["by cost"]["unfinished"] == found["drop"]["unfinished"] == 0
    assert found["keep"]["unfinished"] > 10
    with patch.object(images, "rows_to_give_up", script.RULES["by cost"]):
        assert script.run(world, deployment, 25, seed) == found["by cost"], "equal worlds have equal results"
