"""The interface for policies beyond their order: the view, the budget, and the limit of the batch."""

from __future__ import annotations

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.forecast import foresee
from chairlift.core.scheduler.membership import Membership, membership_from_name
from chairlift.core.scheduler.policies import load_policy
from chairlift.core.scheduler.policy import FirstComeFirstServed, Policy
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift.core.scheduler.view import View
from chairlift.errors import ConfigError
from tests.core.scheduler.driver import BLOCK, Driver, request


class Seeing(FirstComeFirstServed):
    """Reads a view, gives a step ``tokens`` prompt tokens, and keeps the batch below ``rows`` rows."""

    name = "seeing"
    tokens = 1 << 20
    rows = 1 << 20

    def __init__(self, view: View | None = None) -> None:
        self.view = view or View()
        self.num_asked = 0

    def fork(self) -> Policy:
        return type(self)()

    def budget(self, view: View) -> int:
        self.num_asked += 1
        assert view is self.view
        return self.tokens

    def admits(self, request: Request, view: View) -> bool:
        return len(list(view.running)) < self.rows


class Narrow(Seeing):
    tokens = 3


class Stingy(Seeing):
    tokens = -5


class TwoRows(Seeing):
    rows = 2


class WithDefaults(FirstComeFirstServed):
    def __init__(self, gamma: float = 2.0) -> None:
        self.gamma = gamma


def test_only_a_constructor_with_a_parameter_view_gets_one() -> None:
    seeing = load_policy(f"{__name__}:Seeing")
    assert isinstance(seeing, Seeing) and isinstance(seeing.view, View)
    plain = load_policy(f"{__name__}:WithDefaults")
    assert isinstance(plain, WithDefaults) and plain.gamma == 2.0


def test_a_view_without_a_scheduler_is_empty() -> None:
    view = View()
    assert (view.now, view.step, view.num_decodes, view.num_rows, view.free_rows, view.num_waiting) == (
        0,
        0,
        0,
        0,
        0,
        0,
    )
    assert (list(view.running), list(view.prompts), view.token_budget, view.cached_blocks) == ([], [], 0, 0)
    assert view.free_blocks == view.capacity_tokens > 1 << 30
    one = request("a", 10, 7)
    assert (view.cached_tokens(one), view.uncached_tokens(one), view.cached_path(one)) == (0, 10, [])
    assert view.answer_tokens(one) == view.tokens_left(one) == 7
    assert view.step_seconds(tokens=10) > view.step_seconds() > 0
    assert view.service_seconds(one) > view.prefill_seconds(one) > 0
    assert view.tokens_in_blocks(5) == 5 and view.block_size == 1


def test_a_view_shows_the_batch() -> None:
    policy = Seeing()
    drive = Driver(policy=policy, caching=True, max_num_seqs=2, num_blocks=33, costs=Costs([64]))
    view = policy.view
    prompt = list(range(10))
    drive.add(request("a", prompt, 6), request("b", [*prompt, 77], 6), request("c", 5, 6))
    drive.now = 3.0
    drive.step()
    drive.step()
    assert (view.now, view.step, view.num_rows, view.free_rows, view.token_budget) == (3.0, 2, 2, 0, 64)
    assert [each.request_id for each in view.running] == ["a", "b"]
    assert (view.num_decodes, view.num_waiting, list(view.prompts)) == (2, 1, [])
    again = request("d", [*prompt[:8], 99], 6)
    assert view.cached_tokens(again) == 8 and len(view.cached_path(again)) == 2
    assert view.cached_path(again) == view.cached_path(request("e", [*prompt[:8], 98]))
    assert view.block_size == BLOCK and view.tokens_in_blocks(5) == 8 and view.capacity_tokens == 32 * BLOCK
    counts = drive.kv.counts()
    assert (view.free_blocks, view.cached_blocks) == (counts.free, counts.cached)
    running = sum(each.num_computed_tokens for each in view.running)
    assert view.step_seconds(rows=1, context=9) == Costs([64]).model.step_seconds(StepFeatures(3, running + 9))
    assert view.decode_seconds([again]) > view.decode_seconds()
    drive.run()


def test_predictions_come_from_the_request_or_from_recent_answers() -> None:
    lengths = AnswerLengths()
    policy = Seeing()
    Driver(policy=policy, answer_lengths=lengths)
    for count in range(30):
        ended = request(f"r{count}", 4, 100)
        ended.token_ids += [7] * 12
        ended.finish_reason = FinishReason.STOP
        lengths.add(ended)
    one = request("a", 4, 100)
    assert policy.view.answer_tokens(one) == 12 and policy.view.recent_answers(one) == [12] * 30
    told = request("b", 4, 100, service=Service(predicted_tokens=40))
    told.token_ids += [7] * 38
    assert (policy.view.answer_tokens(told), policy.view.tokens_left(told)) == (40, 2)
    told.token_ids += [7] * 38
    assert policy.view.tokens_left(told) == 1


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_a_policy_limits_the_prompt_tokens_of_a_step(share: float) -> None:
    drive = Driver(policy=Narrow(), policy_share=share)
    drive.add(request("a", 10), request("b", 8))
    outs = drive.run()
    assert max(sum(chunk.num_tokens for chunk in out.chunks) for out in outs) == 3
    assert drive.finished and len(drive.finished) == 2


def test_a_budget_below_one_still_makes_progress() -> None:
    drive = Driver(policy=Stingy())
    drive.add(request("a", 10))
    assert max(sum(chunk.num_tokens for chunk in out.chunks) for out in drive.run()) == 1


def test_steps_without_prompts_ask_for_no_budget() -> None:
    policy = Seeing()
    drive = Driver(policy=policy)
    drive.add(request("a", 4, 12))
    drive.step()
    asked = policy.num_asked
    drive.run()
    assert asked == policy.num_asked == 1


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_a_policy_limits_the_batch(share: float) -> None:
    drive = Driver(policy=TwoRows(), policy_share=share)
    drive.add(*(request(name, 4 + index, 5) for index, name in enumerate("abcde")))
    most = 0
    while drive.scheduler.has_unfinished:
        out = drive.step()
        most = max(most, len(drive.scheduler.running))
        assert out.held_up_by in ("", "policy")
    assert most == 2


def test_a_policy_that_admits_nobody_stops_nothing() -> None:
    class Nobody(TwoRows):
        rows = 0

    drive = Driver(policy=Nobody())
    drive.add(*(request(name, 4, 3) for name in "abc"))
    assert max(out.num_decodes + len(out.chunks) for out in drive.run()) == 1


def test_a_forecast_asks_a_fork_with_a_view_of_its_own() -> None:
    policy = TwoRows()
    drive = Driver(policy=policy, costs=Costs([64]))
    drive.add(*(request(name, 4, 5) for name in "abcd"))
    drive.step()
    before = [each.request_id for each in policy.view.running]
    *_, forecast = foresee(drive.scheduler, lambda features: 1.0, AnswerLengths(), drive.now, {"default": 0})
    assert forecast is not None
    assert [each.request_id for each in policy.view.running] == before == ["a", "b"]
    # The two that run end after five steps in all, one of which is over; the other two start then.
    assert forecast.starts == {"c": 4.0, "d": 4.0}


class Pair:
    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        self.batch_wait = batch_wait


class Closed(Membership):
    def __init__(self, batch_wait: float, preferred_sizes: tuple[int, ...]) -> None:
        super().__init__("closed", closed=True, held=False)


@pytest.mark.parametrize(
    ("load", "path", "message"),
    [
        (membership_from_name, "collections:Counter", "cannot be made"),
        (membership_from_name, f"{__name__}:Pair", r"has no .*closed.*start from .*Membership"),
        (membership_from_name, f"{__name__}:Closed", "only static and dynamic are"),
        (membership_from_name, "nowhere:Class", "cannot be imported"),
        (prefill_mode_from_name, "collections:Counter", "has no name, turn"),
    ],
)
def test_a_class_of_another_kind_is_refused(load: object, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path)  # type: ignore[operator]
