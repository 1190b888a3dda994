"""The rows that each prefill mode puts into a step, and that no request starves."""

from __future__ import annotations

import pytest

from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.prefill_mode import PrefillMode, Turn, prefill_mode_from_name
from chairlift.errors import ConfigError
from tests.core.scheduler.driver import Driver, request

MODES = ["mixed", "prefill_first", "decode_first", "separate"]


def mode_named(name: str) -> PrefillMode:
    return prefill_mode_from_name(name)


def kinds(out: SchedulerOutput) -> tuple[bool, bool]:
    return bool(out.num_decodes), bool(out.chunks)


def crowd(mode: str, **settings: int) -> Driver:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    driver = Driver(prefill_mode=mode_named(mode), **{**defaults, **settings})  # type: ignore[arg-type]
    driver.add(*[request(f"r{number}", 11, max_tokens=6) for number in range(7)])
    return driver


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="mixed, prefill_first, decode_first, separate, auto or module:Class; got 'best'"
    ):
        mode_named("best")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_mode_gives_all_requests_all_tokens(mode: str, depth: int) -> None:
    driver = crowd(mode, depth=depth, num_blocks=14)
    driver.run()
    assert len(driver.finished) == 7
    assert {one for result in driver.results for one in result.finished if one.num_output_tokens != 6} == set()


def test_mixed_steps_have_prompts_and_decodes() -> None:
    assert (True, True) in [kinds(out) for out in crowd("mixed").run()]


@pytest.mark.parametrize("mode", ["prefill_first", "separate"])
def test_steps_of_one_kind_do_not_mix(mode: str) -> None:
    outs = [kinds(out) for out in crowd(mode).run()]
    assert (True, True) not in outs
    assert (True, False) in outs
    assert (False, True) in outs


def test_separate_takes_turns_while_there_is_work_of_both() -> None:
    driver = crowd("separate", max_num_batched_tokens=4)
    outs = [kinds(driver.step()) for _ in range(12)]
    begun = outs.index((True, False))
    assert outs[begun : begun + 4] == [(True, False), (False, True)] * 2


def test_prefill_first_fills_the_rows_before_anybody_decodes() -> None:
    driver = crowd("prefill_first")
    outs = []
    while not outs or not outs[-1].num_decodes:
        outs.append(driver.step())
    assert sum(len(out.joined) for out in outs[:-1]) == 4


def test_prefill_first_decodes_when_nobody_fits() -> None:
    driver = Driver(prefill_mode=mode_named("prefill_first"), num_blocks=5)
    driver.add(request("a", 12, max_tokens=4), request("b", 12, max_tokens=4))
    driver.run(60)
    assert driver.finished == ["a", "b"]


def test_decode_first_waits_until_rows_are_free_and_not_for_ever() -> None:
    driver = Driver(prefill_mode=mode_named("decode_first"), max_num_seqs=4, num_blocks=600, max_model_len=900)
    driver.add(*[request(name, 2, max_tokens=800) for name in "ab"])
    driver.step()
    driver.add(request("c", 2, max_tokens=1))
    joined = None
    for tick in range(400):
        out = driver.step()
        if any(row.request_id == "c" for row in out.joined):
            joined = tick
            break
    assert joined is not None
    assert 200 < joined <= 257


def test_modes_without_state_say_the_same_each_time() -> None:
    driver = crowd("mixed")
    mode = mode_named("mixed")
    assert [mode.turn(driver.scheduler) for _ in range(3)] == [Turn.MIXED] * 3
