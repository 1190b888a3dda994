"""Rules that left the core keep their names: as settings, in the command line's help and in errors."""

from __future__ import annotations

import pytest

from chairlift.base.plugin_names import PLUGIN_NAMES, plugin_path
from chairlift.base.plugins import load_named
from chairlift.config import EngineConfig, flat_fields, known_values
from chairlift.core.kv_cache.eviction.rules import eviction_from_name
from chairlift.core.plugins.prefill_modes import ByStepTime
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.prefill_mode import Turn, prefill_mode_from_name
from chairlift.errors import ConfigError
from tests.core.plugins.toys import LinearModel
from tests.core.scheduler.driver import Driver, request

NAMES = [(setting, name) for setting, names in PLUGIN_NAMES.items() for name in names]


@pytest.mark.parametrize(("setting", "name"), NAMES)
def test_a_named_plugin_is_a_value_of_its_setting(setting: str, name: str) -> None:
    config = EngineConfig.from_flat({setting: name})
    assert getattr(config.cache if setting == "cache_eviction" else config.scheduler, setting) == name
    assert name in known_values(setting)
    path = plugin_path(setting, name)
    assert path.startswith("chairlift.core.plugins.") and load_named(setting, path)
    made = {
        "batching": membership_from_name,
        "cache_eviction": eviction_from_name,
        "prefill_mode": prefill_mode_from_name,
    }[setting](name)
    assert made.name == name  # type: ignore[attr-defined]


def test_other_values_are_no_names() -> None:
    assert plugin_path("prefill_mode", "mixed") == "mixed"
    assert plugin_path("scheduling_policy", "static") == "static"
    assert plugin_path("batching", "mine:Own") == "mine:Own"
    assert {flag.name for flag in flat_fields()} >= set(PLUGIN_NAMES)


def test_a_closed_batch_has_no_path() -> None:
    """The settings that depend on closed batches know them by name."""
    with pytest.raises(ConfigError, match="only static and dynamic are"):
        membership_from_name(plugin_path("batching", "static"))


class Dear(LinearModel):
    """A machine on which rows and prompts cost three times as much in one step."""

    def step_seconds(self, step: StepFeatures) -> float:
        seconds = super().step_seconds(step)
        return seconds * 3 if step.num_decodes and step.prefill_tokens else seconds


class Seen:
    """A mode outside the core, as the scheduler asks it: with the view of a batch."""

    name = "seen"

    def __init__(self, mode: ByStepTime) -> None:
        self._mode = mode

    def turn(self, batch: Batch) -> Turn:
        return self._mode.turn(batch.view)


@pytest.mark.parametrize(
    ("machine", "prompt", "expected"),
    [(LinearModel, 60, "mixed"), (Dear, 60, "separate"), (Dear, 400, "prefill_first")],
)
def test_auto_chooses_by_the_predicted_times(machine: type[LinearModel], prompt: int, expected: str) -> None:
    mode = ByStepTime()
    driver = Driver(
        prefill_mode=Seen(mode),
        costs=Costs([64], machine(5.0, 0.1, 0.1)),
        max_num_batched_tokens=512,
        max_num_seqs=4,
        num_blocks=600,
        max_model_len=512,
    )
    driver.add(*(request(f"r{number}", prompt, 20 + 3 * number) for number in range(16)))
    driver.run()
    assert mode.current == expected
