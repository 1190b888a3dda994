from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift_lab.laboratory.drawn import drawn_figures
from chairlift_lab.laboratory.fit_knots import fit_knots, inferred_sessions, spread_ticks
from chairlift_lab.laboratory.knots import TraceKnots, bundled_knots, read_knots
from chairlift_lab.laboratory.quantiles import Quantiles, rank_correlation, related_shares
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.trace import read_trace

SOURCES = {"name": "t", "title": "a trace", "source": "here", "licence": "CC0"}


def test_quantiles_are_met_at_their_shares_and_geometric_between_them() -> None:
    quantiles = Quantiles(((0.0, 0.0), (0.5, 99.0), (1.0, 9999.0)))
    # log(1 + value) is linear: half way between 1 + 99 and 1 + 9,999 is 1 + 999.
    assert quantiles.at([0.0, 0.5, 0.75, 1.0]) == pytest.approx([0, 99, 999, 9999])
    assert quantiles.scaled(0.5).at([0.5]) == pytest.approx([49.5])
    assert Quantiles(((0.0, 5.0), (1.0, 5.0))).mean == pytest.approx(5)


@pytest.mark.parametrize("points", [((0.0, 1.0),), ((0.0, 2.0), (1.0, 1.0)), ((0.1, 1.0), (1.0, 2.0))])
def test_quantiles_rise_from_zero_to_one(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="shares that rise from 0 to 1"):
        Quantiles(points)


def test_rank_correlation_by_hand() -> None:
    # Ranks 1 2 3 4 and 2 1 4 3: the squared differences sum to 4, so 1 - 6 * 4 / (4 * 15) = 0.6.
    assert rank_correlation([1, 2, 3, 4], [20, 10, 400, 300]) == pytest.approx(0.6)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0.0


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.8])
def test_drawn_pairs_have_the_correlation_and_stay_uniform(correlation: float) -> None:
    one, other = related_shares(np.random.default_rng(1), 4000, correlation)
    assert rank_correlation(one, other) == pytest.approx(correlation, abs=0.05)
    for shares in (one, other):
        assert np.quantile(shares, [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.03)


@pytest.mark.parametrize("name", sorted(bundled_knots()))
def test_what_is_drawn_is_near_its_target(name: str) -> None:
    knots = bundled_knots()[name]
    assert knots.source and knots.licence and knots.basis
    for figure in drawn_figures(knots):
        if figure.name.endswith(("p50", "p90")) and "turn" not in figure.name and "gap" not in figure.name:
            assert figure.drawn == pytest.approx(figure.target, rel=0.4, abs=2), figure
        if figure.name == "correlation":
            assert figure.drawn == pytest.approx(figure.target, abs=0.12), figure
        if figure.name == "requests/s":
            assert figure.drawn == pytest.approx(figure.target, rel=0.5), figure


def test_equal_seeds_draw_equal_requests_and_a_rate_changes_only_times() -> None:
    knots = next(each for each in bundled_knots().values() if each.sessions is None)
    one, again, other = (knots.draw(200, rate, 3) for rate in (2.0, 2.0, 4.0))
    assert one == again != knots.draw(200, 2.0, 4)
    assert [each.prompt_tokens for each in one] == [each.prompt_tokens for each in other]
    assert other[-1].arrival == pytest.approx(one[-1].arrival / 2)


def test_a_turn_repeats_the_prompt_before_it_in_blocks_of_its_session() -> None:
    knots = bundled_knots()["tracelab-agent"]
    by_session: dict[str, list[TracedRequest]] = {}
    for request in knots.draw(400, seed=1):
        by_session.setdefault(request.session, []).append(request)
    chains = [chain for chain in by_session.values() if len(chain) > 1]
    assert chains
    shared = knots.shared_tokens // knots.block
    heads = {request.prefix_ids[:shared] for chain in by_session.values() for request in chain}
    assert len(heads) == 1
    for chain in chains:
        for before, after in itertools.pairwise(chain):
            assert after.turn == before.turn + 1
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.prefix_ids[: len(before.prefix_ids)] == before.prefix_ids
    own = [request.prefix_ids[shared] for chain in by_session.values() for request in chain[:1]]
    assert len(set(own)) == len(own)


def test_knots_survive_a_file(tmp_path: Path) -> None:
    for knots in bundled_knots().values():
        path = tmp_path / f"{knots.name}.json"
        path.write_text(json.dumps(knots.to_dict()))
        assert read_knots(path) == knots


@pytest.mark.parametrize("change", [{"rate": 0}, {"block": 8}, {"prompt": [[0, 1]]}, {"colour": 1}, {"tenants": 0}])
def test_a_damaged_file_of_knots_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    fields = next(iter(bundled_knots().values())).to_dict() | change
    path = tmp_path / "k.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError):
        read_knots(path)


def traced(arrival: float, prompt: int = 600, output: int = 10, ids: tuple[int, ...] = ()) -> TracedRequest:
    return TracedRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=output, prefix_ids=ids)


def test_arrivals_within_a_tick_are_spread() -> None:
    spread = spread_ticks([traced(0), traced(0), traced(0), traced(0), traced(3), traced(3)])
    assert [request.arrival for request in spread] == [0, 0.75, 1.5, 2.25, 3, 4.5]
    smooth = [traced(time) for time in (0, 1, 2, 2, 3)]
    assert spread_ticks(smooth) == smooth


def test_sessions_follow_from_prefix_ids() -> None:
    # The second request repeats both complete blocks of the first, the third only the block that all have.
    trace = [
        traced(0, 1100, ids=(0, 1, 2)),
        traced(5, 1700, ids=(0, 1, 7, 8)),
        traced(6, 1700, ids=(0, 4, 5, 6)),
        traced(9, 2300, ids=(0, 1, 7, 8, 9)),
    ]
    assert [(each.session, each.turn) for each in inferred_sessions(trace)] == [("0", 0), ("0", 1), ("2", 0), ("0", 2)]


def test_knots_of_a_trace_by_hand() -> None:
    trace = [traced(float(index), 100 + index, 2 * index + 1) for index in range(21)]
    knots = fit_knots(trace, **SOURCES)
    assert (knots.rate, knots.burstiness, knots.correlation) == (1.0, 0.001, 1.0)
    assert knots.prompt.at([0, 0.5, 1]) == pytest.approx([100, 110, 120])
    assert knots.output.at([0, 0.5, 1]) == pytest.approx([1, 21, 41])
    assert knots.sessions is None
    assert knots.computed
    with pytest.raises(ConfigError, match="at least 20 requests"):
        fit_knots(trace[:5], **SOURCES)


LAYOUTS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:17:{second:02}.9799600,4808,10\n" for second in range(30)),
    "azure 2024": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2024-05-10 00:00:{second:02}.009930+00:00,2162,5\n" for second in range(30)),
    "azure 2025": "TIMESTAMP,ContextTokens,GeneratedTokens,NumImages\n"
    + "".join(f"2025-05-10 00:00:{second:02}.009930+00:00,2162,5,1\n" for second in range(30)),
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{5 + second},ChatGPT,472,18,490,Conversation log\n" for second in range(30)),
    "burstgpt 2": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{5 + second},s{second % 9},1.5,ChatGPT,{472 + 60 * second},18,490,API log\n" for second in range(30)),
    "mooncake": "".join(
        f'{{"timestamp": {1000 * second}, "input_length": 1100, "output_length": 5, "hash_ids": [0, {second}, 9]}}\n'
        for second in range(30)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_every_trace_is_read(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "trace"
    path.write_text(LAYOUTS[layout])
    knots = fit_knots(read_trace(path), **SOURCES)
    assert knots.rate == pytest.approx(1.0)
    assert (knots.sessions is not None) == (layout == "burstgpt 2")
    assert TraceKnots.from_dict(json.loads(json.dumps(knots.to_dict()))) == knots
