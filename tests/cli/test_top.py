"""``chairlift top``: the numbers are the server's, the screen is left as it was found."""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import socket
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from chairlift.cli.top_view import Line, Metrics, Snapshot, quantile, span, text_of, view
from chairlift.metrics import prometheus
from chairlift.metrics.stats import EngineStats, RequestStats, TrainingStats
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tests.server.openai_fake import FakeServer, serve_fake


def live(name: str, **fields: Any) -> dict[str, Any]:
    known = {"id": name, "status": "decode", "service_tier": "default", "priority": 0, "tenant": "", "n": 1}
    known |= {"prompt_tokens": 100, "cached_tokens": 0, "computed_tokens": 109, "output_tokens": 11, "max_tokens": 50}
    known |= {"age_seconds": 3.0, "queue_seconds": 0.5, "first_token_seconds": 1.0}
    return known | {"expected_start_seconds": None, "expected_token_seconds": None} | fields


REQUESTS = [
    live("first", output_tokens=41, computed_tokens=139),
    live("second", status="prefill", computed_tokens=50, output_tokens=0, expected_token_seconds=2.5),
    live("third", status="preempted", computed_tokens=0, service_tier="flex", tenant="al"),
    live("fourth", status="waiting", computed_tokens=0, output_tokens=0, expected_start_seconds=0.75, prompt_tokens=7),
]
REQUESTS[1]["first_token_seconds"] = REQUESTS[3]["first_token_seconds"] = None


def measured(rounds: int, rate: float = 0.031, disk: int = 0) -> str:
    """What a server measures that has answered so many rounds of the same requests."""
    stats = RequestStats()
    stats.step(EngineStats(num_running=3, running_limit=8, used_blocks=25, free_blocks=75, preemption_rate=rate))
    for _ in range(rounds):
        stats.prompt_computed(1000, disk, 0, disk)
        for seconds in (0.05, 0.5, 0.5, 6.0):
            stats.first_token(seconds, 0.0)
        stats.next_tokens(0.03 * 96, 96, 0.0)
    known = {"model_name": "tiny", "prefix": "vllm", "up": True, "num_waiting": 5, "now": 1.0}
    return prometheus.render(stats, None, **known).decode()  # type: ignore[arg-type]


def shown(lines: list[Line]) -> str:
    return "\n".join(map(text_of, lines))


def at(when: float, rounds: int, requests: Any = REQUESTS, **fields: Any) -> Snapshot:
    return Snapshot(when, "http://here", metrics=Metrics(measured(rounds)), requests=requests, **fields)


def test_the_view_says_what_the_server_says() -> None:
    now = at(12.0, 3, model="tiny", version="1.2", uptime=7300.0)
    text = shown(view(now, at(10.0, 1), width=102, height=30)).splitlines()
    assert text == [
        "chairlift top  tiny at http://here  version 1.2  up 2h01m",
        "serving",
        "running   [||||||||            ] 3 of 8       tokens/s  prompt 1,000  output 100",
        "KV cache  [|||||               ] 25%          TTFT  p50 375ms  p99 7.4s  of 8",
        "waiting   5                                   ITL   p50 32ms  p99 40ms",
        "preempted 3.1% of the last minute's, only 0 requests have ended",
        "",
        "ID                  STATUS       AGE PROMPT                    ETA      OUTPUT  TOK/S QUEUED CLASS",
        "first               decode      3.0s [||||||||] 100              -       41/50   20.0  500ms default",
        "second              prefill     3.0s [||||    ] 50/100        2.5s        0/50      -  500ms default",
        "third               preempted   3.0s [        ] 0/100            -       11/50    5.0  500ms flex (al)",
        "fourth              waiting     3.0s [        ] 0/7          750ms        0/50      -  500ms default",
    ]


def test_the_share_of_the_machines_floor_is_shown_where_it_is_known() -> None:
    known = Metrics(measured(1) + 'chairlift:floor_share{model_name="tiny",engine="0"} 0.784\n')
    text = shown(view(Snapshot(0.0, "http://here", metrics=known), None, width=100, height=24))
    assert "machine   78% of its floor" in text
    assert "floor" not in shown(view(at(0.0, 1), None, width=100, height=24))
    waits = Metrics(measured(1) + 'chairlift:collective_share{model_name="tiny",engine="0"} 0.123\n')
    text = shown(view(Snapshot(0.0, "http://here", metrics=waits), None, width=100, height=24))
    assert "machine   12% waiting" in text


def test_the_sources_of_prompts_are_shown_if_a_disk_had_some() -> None:
    known = Metrics(measured(1, disk=250))
    text = shown(view(Snapshot(0.0, "http://here", metrics=known), None, width=100, height=24))
    assert "prompts   computed 75%, disk 25%" in text
    assert "prompts " not in shown(view(at(0.0, 1), None, width=100, height=24))


def test_training_is_shown_if_the_server_trains() -> None:
    snapshots = []
    for when, tokens in ((1.0, 100), (3.0, 900)):
        stats = RequestStats()
        stats.training = TrainingStats(num_adapters=8, num_waiting=3)
        stats.training.tokens.update(forward=tokens, backward=tokens)
        stats.training.calls["optim_step"] = 12
        known = {"model_name": "tiny", "prefix": "chairlift", "up": True, "num_waiting": 0, "now": 1.0}
        text = prometheus.render(stats, None, **known).decode()  # type: ignore[arg-type]
        snapshots.append(Snapshot(when, "http://here", metrics=Metrics(text)))
    for before, rate in ((None, "-"), (snapshots[0], "800")):
        lines = shown(view(snapshots[1], before, width=100, height=30)).splitlines()
        assert f"training  {rate} tokens/s  8 adapters  12 steps  3 calls wait" in lines
    assert "training" not in shown(view(at(1.0, 1), None, width=100, height=30))


@pytest.mark.parametrize("width", [80, 102])
def test_pauses_and_leases_are_shown_if_answers_call_tools(width: int) -> None:
    stats = RequestStats()
    assert "pauses" not in shown(view(at(1.0, 1), None, width=width, height=30))
    stats.last_token_time = 0.0
    stats.step(
        EngineStats(
            num_pauses=9,
            num_leases=8,
            pauses_by_tool={"a_tool_with_a_long_name": 1, "search": 3, "x": 1, "run_tests": 2},
            turns_by_cache={"kept": 3, "expired": 1},
            leased_blocks={"1": 0, "2": 10, "3": 110},
            lease_budget_blocks=400,
            block_reuse_gaps=[0, 0, 0, 4] + [0] * 10,
            block_idle_times=[0, 0, 0, 0, 0, 2] + [0] * 8,
        )
    )
    known = {"model_name": "tiny", "prefix": "vllm", "up": True, "num_waiting": 0, "now": 1.0}
    now = Snapshot(1.0, "http://here", metrics=Metrics(prometheus.render(stats, None, **known).decode()))  # type: ignore[arg-type]
    lines = shown(view(now, None, width=width, height=30)).splitlines()
    assert "pauses    7 now: search 3, run_tests 2, a_tool_with_a_l~ 1" in lines
    found = "          cache kept for 75% of 4, leases 120 of 400 blocks, reused after 2.0s, evicted after 15.0s"
    assert (found if len(found) <= width else f"{found[:79]}~") in lines
    assert all(len(line) <= width for line in lines)


def test_the_busiest_expert_of_all_layers_is_shown_for_models_with_experts() -> None:
    layers = "".join(f'chairlift:expert_imbalance{{layer="{n}"}} {load}\n' for n, load in enumerate((1.2, 2.75, 1.9)))
    known = Metrics(measured(1) + 'chairlift:floor_share{model_name="tiny",engine="0"} 0.784\n' + layers)
    text = shown(view(Snapshot(0.0, "http://here", metrics=known), None, width=110, height=24))
    assert "machine   78% of its floor, busiest expert 2.8x the mean" in text
    assert "expert" not in shown(view(at(0.0, 1), None, width=100, height=24))


def test_a_narrow_window_shows_the_whole_error() -> None:
    wrong = "no server answers at http://here (Connection refused); start one with: chairlift serve"
    lines = view(Snapshot(0.0, "http://here", state=wrong), None, width=40, height=24)
    said = [piece for line in lines[1:4] for piece in line]
    assert " ".join(text for text, _ in said) == wrong
    assert all(len(text) <= 40 and style == "bad" for text, style in said)


LONG = live(
    "chatcmpl-0123456789abcdef0123456789abcdef",
    **{"prompt_tokens": 131_072, "computed_tokens": 98_765, "output_tokens": 123_456, "max_tokens": 200_000, "n": 8},
    **{
        "service_tier": "priority",
        "tenant": "a tenant with a long name",
        "age_seconds": 86_000.0,
        "status": "preempted",
    },
    **{"queue_seconds": 86_000.0, "expected_token_seconds": 86_000.0, "first_token_seconds": 2.0},
)


def test_the_kv_cache_of_several_engines_is_their_mean() -> None:
    usage = "".join(f'vllm:kv_cache_usage_perc{{engine="{index}"}} {share}\n' for index, share in enumerate((0.9, 0.7)))
    lines = view(Snapshot(1.0, "here", metrics=Metrics(usage)), None, width=100, height=30)
    assert any("] 80%" in text_of(line) for line in lines)


def test_a_request_has_no_speed_before_half_a_second() -> None:
    for age, speed in ((1.01, "-"), (1.49, "-"), (1.5, "20.0"), (3.0, "5.0")):
        row = text_of(view(at(1.0, 1, [live("one", age_seconds=age)]), None, width=102, height=30)[-1])
        assert row.split()[-3] == speed, row


@pytest.mark.parametrize("width", [80, 89, 90, 96, 99, 100, 120, 200])
def test_no_line_is_longer_than_the_window(width: int) -> None:
    layers = 'chairlift:expert_imbalance{layer="1"} 12.75\nchairlift:floor_share{engine="0"} 0.784\n'
    metrics = Metrics(measured(3_000, 0.5) + layers)
    where = {"model": "a-company/a-long-name-of-a-model-70B-Instruct", "version": "0.1.0.dev1", "uptime": 8_640_000.0}
    now = Snapshot(12.0, "http://a-host.example.org:8000", metrics=metrics, requests=[LONG, *REQUESTS], **where)
    lines = shown(view(now, at(10.0, 1), width=width, height=40, keys="sorted by age: s changes it, q quits")).split(
        "\n"
    )
    assert [line for line in lines if len(line) > width] == []
    text = "\n".join(lines)
    for part in (
        "a-company/a-long-name-of-a-model-70B-Instruct",
        " at http",
        "version 0.1",
        "up 100d",
        "busiest expert 12.8x",
    ):
        assert part in text
    (head,) = [line for line in lines if line.startswith("ID ")]
    assert ("CLASS" in head) == (width >= 90) and ("priority" in text) == (width >= 90)
    for name in ("STATUS", "ETA", "TOK/S", "QUEUED"):
        end = head.index(name) + len(name)
        assert all(len(line) >= end for line in lines[lines.index(head) + 1 :])


def test_an_idle_server_has_nothing_to_list() -> None:
    assert shown(view(at(0.0, 1, []), None, width=80, height=24)).endswith("\nnothing runs or waits")
    assert "nothing runs" not in shown(view(at(0.0, 1, [], state="it is loading"), None, width=80, height=24))


def test_before_its_first_step_a_server_knows_no_limit() -> None:
    idle = Metrics("vllm:num_requests_running 0\nchairlift:running_limit 0\n")
    lines = shown(view(Snapshot(0.0, "http://here", metrics=idle), None, width=110, height=24))
    assert "] 0 " in lines and " of 0" not in lines


def test_without_a_moment_before_there_are_no_rates() -> None:
    text = shown(view(at(12.0, 3), None, width=110, height=30))
    assert "prompt -  output -" in text and "TTFT  p50 -  p99 -" in text
    idle = shown(view(at(12.0, 3), at(10.0, 3), width=110, height=30))
    assert "prompt 0  output 0" in idle and "TTFT  p50 -  p99 -" in idle
    restarted = shown(view(at(12.0, 1), at(10.0, 3), width=110, height=30))
    assert "prompt -  output -" in restarted and "ITL   p50 -  p99 -" in restarted


@pytest.mark.parametrize(
    ("rate", "style", "word"),
    [(0.0, "good", "healthy"), (0.0199, "good", "healthy"), (0.02, "watch", "keep"), (0.051, "bad", "too many")],
)
def test_preemption_is_judged(rate: float, style: str, word: str) -> None:
    ended = 'vllm:request_success_total{finished_reason="stop"} '
    few = view(
        Snapshot(0.0, "http://here", metrics=Metrics(measured(1, rate) + ended + "3\n")), None, width=80, height=9
    )
    assert any("only 3 requests have ended" in text_of(line) for line in few)
    metrics = Metrics(measured(1, rate) + ended + "20\n")
    lines = view(Snapshot(0.0, "http://here", metrics=metrics), None, width=80, height=9)
    (found,) = [piece for line in lines for piece in line if "last minute" in piece[0]]
    assert found[1] == style and word in found[0]


def test_the_list_is_cut_to_the_height_and_sorted() -> None:
    many = [live(f"r{i}", output_tokens=i, prompt_tokens=100 - i) for i in range(40)]
    lines = view(at(0.0, 1, many), None, width=100, height=20)
    assert len(lines) == 20 and text_of(lines[-1]) == "... and 29 more"
    assert [text_of(line).split()[0] for line in lines[8:-1]] == [f"r{i}" for i in range(11)]
    for sort, first in (("output", "r39"), ("prompt", "r0"), ("speed", "r39"), ("age", "r0")):
        assert text_of(view(at(0.0, 1, many), None, width=100, height=20, sort=sort)[8]).split()[0] == first
    exact = view(at(0.0, 1, many), None, width=100, height=48)
    assert len(exact) == 48 and text_of(exact[-1]).startswith("r39")
    for height in range(12):
        assert len(view(at(0.0, 1, many), None, width=10, height=height)) <= height


def test_long_names_are_shortened_and_nothing_can_move_the_cursor() -> None:
    nasty = live("x" * 90, service_tier="\x1b[2Jred", tenant="\u202eback", status="\x07")
    text = shown(view(at(0.0, 1, [nasty], state="\x1b[31m", model="\x9b"), None, width=100, height=20))
    assert "x" * 16 + "~ " in text
    assert not any(not char.isprintable() for char in text.replace("\n", ""))


def test_a_server_that_lists_no_requests_is_watched_all_the_same() -> None:
    text = shown(view(at(0.0, 1, None), None, width=100, height=20))
    assert "does not list its requests" in text and "3 of 8" in text


def test_odd_answers_do_no_harm() -> None:
    rows = [{}, {"id": 5, "prompt_tokens": "many", "age_seconds": None, "n": -1}, live("a", prompt_tokens=10**9)]
    assert len(view(at(0.0, 1, rows), None, width=100, height=20)) == 11
    metrics = Metrics('garbage\nx:a{le="1" 5\nx:b NaN\nx:c one\n\nx:d_bucket{le="x"} 4\nx:e 1 1700000000\n')
    assert metrics.value("a") is metrics.value("b") is metrics.value("c") is None and metrics.value("e") == 1
    endless = measured(1).replace(" 1", " 1e400").replace(" 2", " NaN")
    rows = [live("a", age_seconds=float("inf")), live("b", age_seconds=float("nan"))]
    now = Snapshot(1.0, "http://here", metrics=Metrics(endless), requests=rows)
    assert view(now, at(0.0, 1, rows), width=100, height=20)
    assert metrics.buckets("d") == {}


def test_samples_of_other_models_are_left_out() -> None:
    text = 'chairlift:num_requests_running{model_name="a"} 2\nchairlift:num_requests_running{model_name="b"} 3\nup 1'
    assert [Metrics(text, each).value("num_requests_running") for each in ("a", "b", None)] == [2, 3, 5]
    assert Metrics(text, "a").value("up") == 1


def test_labels_are_told_apart() -> None:
    metrics = Metrics('p:rate{window="60s",m="a \\" b"} 1\np:rate{window="total",m="x"} 5\n')
    assert (metrics.value("rate"), metrics.value("rate", window="60s")) == (6, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *(
            (None, "-"),
            (math.inf, "-"),
            (math.nan, "-"),
            (0.0, "0ms"),
            (0.0004, "0ms"),
            (0.9994, "999ms"),
            (0.9996, "1.0s"),
            (59.94, "59.9s"),
        ),
        *((59.99, "1m00s"), (61.0, "1m01s"), (3599.0, "59m59s"), (3600.0, "1h00m"), (90_000.0, "1d01h")),
    ],
)
def test_spans_are_printed_in_the_largest_fitting_unit(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


@given(st.floats(0, 99 * 86_400))
def test_printed_times_are_short(seconds: float) -> None:
    assert len(span(seconds)) <= 6
    assert re.fullmatch(r"\d+ms|[1-5]?\d\.\ds|[1-5]?\dm[0-5]\ds|[12]?\dh[0-5]\dm|\d+d[012]\dh", span(seconds))


@example([3], [0, 1, 0, 0, 0, 0])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_quantiles_lie_where_the_observations_are(old: list[int], new: list[int]) -> None:
    bounds = [0.1, 0.2, 0.5, 1.0, 2.0, float("inf")]
    old = (old + [0] * 6)[:6]
    before = {bound: float(sum(old[: i + 1])) for i, bound in enumerate(bounds)}
    after = {bound: before[bound] + sum(new[: i + 1]) for i, bound in enumerate(bounds)}
    found = [quantile(before, after, share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)]
    if not any(new):
        assert found == [None] * 5
        return
    assert found == pytest.approx(sorted(found, key=lambda value: value or 0.0))
    lows = [0.0, *bounds[:-1]]
    filled = [i for i, count in enumerate(new) if count]
    assert lows[filled[0]] <= (found[0] or 0.0) + 1e-9
    assert found[-1] == pytest.approx(2.0 if filled[-1] == 5 else bounds[filled[-1]])


# --- against a server -------------------------------------------------------------------------------------------------


class FakeWatched(FakeServer):
    """A server whose state the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()
        paths = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics, "/version": self._version}
        paths |= {"/v1/requests": self._requests, "/v1/models": self._models}
        self.app = Starlette(routes=[Route(path, answer) for path, answer in paths.items()])

    def reset(self) -> None:
        self.trouble = self.drain = self.key = ""
        self.rounds = 0

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "reason": self.trouble}, 503 if self.trouble else 200)

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "reason": self.drain}, 503 if self.drain else 200)

    async def _metrics(self, request: Request) -> Response:
        self.rounds += 1
        return self._refusal(request) or PlainTextResponse(measured(self.rounds))

    async def _requests(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "requests", "requests": REQUESTS})

    async def _version(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"version": "9.9"})


@pytest.fixture(scope="module")
def served() -> Iterator[FakeWatched]:
    fake = FakeWatched()
    with serve_fake(fake):
        yield fake


@pytest.fixture
def fake(served: FakeWatched) -> FakeWatched:
    served.reset()
    return served


@pytest.fixture
def terminal(fake: FakeWatched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal("top", "--url", fake.url, "--interval", "0.1")
    try:
        screen.wait_for("tiny at")
        yield screen
    finally:
        screen.close()


def test_a_terminal_that_does_not_know_its_size_is_taken_for_a_usual_one(fake: FakeWatched) -> None:
    screen = Terminal("top", "--url", fake.url, "--interval", "0.1", size=(0, 0))
    try:
        screen.wait_for("tiny at", seconds=60)
    finally:
        screen.close()


def test_once_prints_plain_text(chairlift: Run, fake: FakeWatched) -> None:
    code, out, err = chairlift("top", "--url", fake.url, "--once", "--interval", "0.1")
    assert (code, err) == (0, []) and "\x1b" not in "".join(out)
    assert out[0].startswith(f"chairlift top  tiny at {fake.url}  version 9.9  up ")
    assert [line.split()[0] for line in out[8:]] == ["first", "second", "third", "fourth"]
    assert int(re.findall(r"output ([\d,]+)", out[2])[0].replace(",", "")) > 0


@pytest.mark.parametrize(
    ("health", "metrics", "shown"),
    [
        (PlainTextResponse(""), "vllm:num_requests_running 2\nvllm:kv_cache_usage_perc 0.5", ["serving", "2", "50%"]),
        (PlainTextResponse(""), "llamacpp:requests_processing 1\n", ["serving", "0", "-"]),
        (PlainTextResponse("hm", 503), "sglang:num_running_reqs 1\n", ["it says that it is not healthy", "0", "-"]),
    ],
)
def test_another_kind_of_server_is_watched_too(
    chairlift: Run, health: Response, metrics: str, shown: list[str]
) -> None:
    """It may have nothing but these two."""
    fake = FakeServer()
    fake.app = Starlette(routes=[Route("/health", lambda _: health)])
    fake.app.add_route("/metrics", lambda _: PlainTextResponse(metrics))
    with serve_fake(fake):
        code, out, err = chairlift("top", "--url", fake.url, "--once", "--interval", "0.1")
    assert (code, err, out[0], out[1]) == (0, [], f"chairlift top  {fake.url}", shown[0])
    assert [line.partition("]")[2].split()[0] for line in out[2:4]] == shown[1:]
    assert out[-1] == "this server does not list its requests"


def test_a_server_with_keys_asks_for_a_key_file(chairlift: Run, fake: FakeWatched, tmp_path: Path) -> None:
    fake.key = "secret"
    code, _, err = chairlift("top", "--url", fake.url, "--once")
    assert code == 2 and "wants an API key: give one with --api-key-file" in err[0]
    (tmp_path / "key").write_text("secret\n")
    code, out, _ = chairlift(
        "top", "--url", fake.url, "--once", "--interval", "0.1", "--api-key-file", tmp_path / "key"
    )
    assert code == 0 and len(out) == 12


@pytest.mark.parametrize(("field", "why"), [("trouble", "the engine is loading"), ("drain", "it is shutting down")])
def test_an_unhealthy_server_is_shown_with_the_reason(chairlift: Run, fake: FakeWatched, field: str, why: str) -> None:
    setattr(fake, field, why)
    code, out, _ = chairlift("top", "--url", fake.url, "--once", "--interval", "0.1")
    assert (code, out[1]) == (0, why)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--url", "http://127.0.0.1:1", "--once"], "no server answers at http://127.0.0.1:1"),
        (["--url", "ftp://here"], "--url must be like"),
        (["http://127.0.0.1:1"], "write --url http://127.0.0.1:1"),
        (["--interval", "0.01"], "--interval must be from 0.1"),
        (["--interval", "nan"], "--interval must be from 0.1"),
    ],
)
def test_an_unwatchable_address_is_refused_in_one_line(chairlift: Run, argv: list[str], told: str) -> None:
    code, out, err = chairlift("top", *argv)
    assert (code, out, len(err)) == (2, [], 1) and told in err[0]


def is_restored(rest: str) -> bool:
    """Line wrap, cursor and screen are back, and nothing comes after."""
    return rest.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")


def test_a_terminal_is_given_back_after_q(terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.master)
    assert not before[3] & termios.ICANON
    terminal.wait_for("\x1b[32mdecode")
    terminal.wait_for("sorted by age")
    terminal.type("s")
    terminal.wait_for("sorted by output")
    terminal.type("\x1b[B")  # an arrow means nothing
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.wait_for("... and 3 more")
    screen = terminal.wait_for("\x1b[J")
    terminal.wait_for("\x1b[H")
    screen = terminal.wait_for("\x1b[J")
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "").split("\n")
    assert len(rows) <= 10 and all(len(row) <= 40 for row in rows)
    terminal.type("q")
    assert is_restored(terminal.read_to_the_end()) and terminal.process.wait(120) == 0
    assert termios.tcgetattr(terminal.master)[3] & termios.ICANON


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminal_is_given_back_after_a_signal(terminal: Terminal, number: int, code: int) -> None:
    terminal.process.send_signal(number)
    assert is_restored(terminal.read_to_the_end()) and terminal.process.wait(120) == code
    assert termios.tcgetattr(terminal.master)[3] & termios.ICANON


def test_an_error_is_shown_while_it_lasts(terminal: Terminal, fake: FakeWatched) -> None:
    terminal.wait_for("serving")
    fake.trouble = "the engine has not finished a step for 31 s, and 4 requests wait"
    terminal.wait_for("\x1b[1;31mthe engine has not finished a step for 31 s")
    fake.trouble = ""
    terminal.wait_for("\x1b[32mserving")


def test_a_server_that_is_gone_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    mute = socket.socket()
    mute.bind(("127.0.0.1", 0))  # nobody else gets this port meanwhile
    screen = Terminal("top", "--url", f"127.0.0.1:{mute.getsockname()[1]}", "--interval", "0.1")
    try:
        screen.wait_for("no server answers at")
        with mute:
            mute.listen()  # it accepts, and says nothing of its own
            connection, _ = mute.accept()
            connection.sendall(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()
            screen.wait_for("the server answered 500")
        screen.type("q")
        rest = screen.read_to_the_end()
        assert is_restored(rest) and screen.process.wait(120) == 0
        assert not re.search(r"\x1b\[[0-9;]*m", rest)
    finally:
        screen.close()
