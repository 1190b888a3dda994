"""The live view in a browser: what it shows is what the engine did, and neither page nor server grows without end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chairlift.base.presets import PRESETS
from chairlift.engine.step_export import read_recording
from chairlift.engine.step_recorder import FORMAT
from chairlift.server.pages.live_feed import LiveFeed
from tests.e2e.server_process import ServerProcess
from tests.engine.test_step_export import watched
from tests.server.chromium import Chromium, find_chromium, open_chromium
from tests.server.watched import ServedView, Truth, make_truth, serve_watched

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no chromium on the PATH to show the page in")

DESKTOP, PHONE = (1280, 900), (360, 780)
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "host": 60, "windows": (None, 8), "num_blocks": 44},
    "ahead": {"num_lookahead_steps": 1},
    "static": {"batching": "static", "num_blocks": 200},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    program = find_chromium()
    assert program is not None
    with open_chromium(program) as browser:
        yield browser


def look(view: ServedView, browser: Chromium, query: str = "", **size: Any) -> None:
    """Open the page, and wait until the server wants to be told."""
    browser.problems.clear()
    browser.resize(*(size.pop("size", DESKTOP)), **size)
    browser.open(f"{view.url}/live{query}")
    end = time.monotonic() + 60
    while not view.engine.events.wants("steps"):
        assert time.monotonic() < end, "the page does not ask for the events"
        browser.value("new Promise(requestAnimationFrame)")


def run_watched(view: ServedView, truth: Truth, bursts: int) -> None:
    """A load under the eyes of the page."""
    truth.core.watch(True)
    recorder = truth.core.recorder
    assert recorder is not None
    step = truth.step

    def step_and_tell() -> None:
        step()
        if truth.core.scheduler.step % 9 == 0:
            view.tell(recorder.take())

    truth.step = step_and_tell  # type: ignore[method-assign]
    truth.run(bursts)
    for _ in range(2):
        view.tell(recorder.take())
    truth.step = step  # type: ignore[method-assign]


def caught_up(browser: Chromium, truth: Truth) -> None:
    last = truth.core.step_log[-1].step
    browser.wait_for(f"chairlift.model.numbers.at(-1) === {last} && chairlift.requests().every((r) => r.slot < 0)")


def shown(browser: Chromium) -> dict[str, Any]:
    page: dict[str, Any] = browser.value(
        "({requests: chairlift.requests().map(({tables, ...r}) => r), numbers: chairlift.model.numbers,"
        " first: chairlift.model.first, memory: []})"
    )
    for at in range(0, len(page["numbers"]), 1000):  # in pieces, none of which takes long
        steps = f"chairlift.model.numbers.slice({at}, {at + 1000})"
        page["memory"] += browser.value(
            f"{steps}.map((_, at) => chairlift.memory(at + {at} + chairlift.model.first)?.tables)"
        )
    return page


def rows_of(request: dict[str, Any], numbers: list[int], first: int) -> list[tuple[int, int, str]]:
    """(step, slot, phase) in the order of the steps."""
    found = []
    for run in request["runs"]:
        phase = "decode" if run["phase"] == "held" else run["phase"]
        found += [(numbers[i - first], run["slot"], phase) for i in range(run["a"], run["b"] + 1)]
    return sorted(found)


@pytest.mark.parametrize("mode", MODES)
def test_the_page_shows_the_true_steps_and_requests(chromium: Chromium, mode: str) -> None:
    truth = make_truth(seed=4, **MODES[mode])
    with serve_watched() as view:
        truth.burst(6)
        for _ in range(15):  # before anybody looks
            truth.step()
        look(view, chromium)
        run_watched(view, truth, bursts=4)
        truth.churn(5)
        run_watched(view, truth, bursts=1)
        caught_up(chromium, truth)
        page = shown(chromium)
    numbers, first = page["numbers"], page["first"]
    assert numbers == sorted(truth.tables)
    by_id = {request["id"]: request for request in page["requests"]}
    assert set(truth.rows) <= set(by_id)
    for name, rows in truth.rows.items():
        assert rows_of(by_id[name], numbers, first) == sorted((step, slot, why) for step, slot, _, why in rows), name
        assert by_id[name]["chunks"] == sum(row[3] != "decode" for row in rows)
    ids = {str(request["n"]): request["id"] for request in page["requests"]}
    known = [step for step, tables in zip(numbers, page["memory"], strict=True) if tables is not None]
    assert len(known) > 60
    exact = known[2 * truth.core.num_lookahead_steps :]  # what was in flight at the beginning is told twice
    for step, tables in zip(numbers, page["memory"], strict=True):
        if step in exact:
            assert {ids[n]: own for n, own in tables.items() if any(map(any, own))} == owned(truth, step), step
    for name, tokens in truth.answers.items():
        if name.split("#")[0] not in truth.aborted and by_id[name]["arrival"] is not None:
            assert (by_id[name]["tokens"], by_id[name]["reason"]) == (tokens, "length")
    gone = {name for name, request in by_id.items() if request["reason"] == "abort"}
    assert gone and {name.split("#")[0] for name in gone} <= truth.aborted
    assert chromium.problems == []


def owned(truth: Truth, step: int) -> dict[str, list[list[int]]]:
    return {name: own for name, own in truth.tables[step].items() if any(map(any, own))}


def sizes(browser: Chromium) -> dict[str, int]:
    found: dict[str, int] = browser.value(
        "(({model: m}) => ({steps: m.numbers.length, requests: m.requests.size, marks: m.marks.length,"
        " runs: m.runs.flat().length, changes: m.changes.length, checkpoints: m.checkpoints.length,"
        " names: m.names.size, away: m.away.length, finished: m.finished.length}))(chairlift)"
    )
    return found


def run_bounded(browser: Chromium, most: int, rounds: int, bursts: int) -> list[tuple[dict[str, int], int, float]]:
    """A page that keeps ``most`` steps; what page and server hold after each round of load."""
    truth = make_truth(seed=6, preemption_mode="recompute", num_blocks=50)
    held = []
    with serve_watched(lambda engine: LiveFeed(engine, max_bytes=400_000)) as view:  # type: ignore[arg-type]
        look(view, browser)
        browser.value(f"chairlift.model.most = {most}")
        for _ in range(rounds):
            run_watched(view, truth, bursts)
            caught_up(browser, truth)
            truth.tables = {step: truth.tables[step] for step in sorted(truth.tables)[-most:]}
            assert view.state.live is not None
            heap = browser.call("Runtime.getHeapUsage")["usedSize"]
            held.append((sizes(browser), view.state.live.num_bytes, heap))
            assert view.state.live.num_bytes < 800_000
        page = shown(browser)
    ids = {str(request["n"]): request["id"] for request in page["requests"]}
    assert page["numbers"] == sorted(truth.tables)[-len(page["numbers"]) :]
    for step, tables in zip(page["numbers"], page["memory"], strict=True):  # what is left is still the truth
        assert {ids[n]: own for n, own in tables.items() if any(map(any, own))} == owned(truth, step), step
    assert browser.problems == []
    return held


def test_page_and_server_keep_a_bounded_past(chromium: Chromium) -> None:
    held = run_bounded(chromium, most=300, rounds=6, bursts=8)
    first, last = held[1][0], held[-1][0]
    assert last["steps"] <= 300
    for name, size in last.items():
        assert size <= (5300 if name == "finished" else 2 * first[name] + 40), (name, held)


@pytest.mark.nightly
def test_page_and_server_stay_as_large_as_they_are_over_100_000_steps(chromium: Chromium) -> None:
    held = run_bounded(chromium, most=24_000, rounds=12, bursts=280)
    third, last = held[4], held[-1]
    assert last[0]["steps"] <= 24_000
    for name, size in last[0].items():
        assert size <= (9000 if name == "finished" else 1.5 * third[0][name] + 100), (name, held)
    assert last[2] < 1.5 * third[2] + 20e6, [heap for _, _, heap in held]


# --- what a person does ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording() -> bytes:
    return watched(make_truth(seed=8, preemption_mode="recompute"), bursts=6)


def text(browser: Chromium, selector: str) -> str:
    found: str = browser.value(f"document.querySelector({json.dumps(selector)}).innerText")
    return found


def point(browser: Chromium, selector: str, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
    """The mouse at a place in an element."""
    box = browser.value(
        f"(({{left, top}}) => [left, top])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type=kind, x=box[0] + x, y=box[1] + y, **more)


def key(browser: Chromium, name: str) -> None:
    event = f"new KeyboardEvent('keydown', {{key: {json.dumps(name)}}})"
    browser.value(f"document.querySelector('#timeline').dispatchEvent({event})")


def settled(browser: Chromium) -> None:
    """All is drawn: the picture in the next frame, texts in one that comes 200 ms after the one before them."""
    browser.value(
        "new Promise((done) => requestAnimationFrame(() => setTimeout("
        "() => requestAnimationFrame(() => requestAnimationFrame(done)), 250)))"
    )


def test_pointing_choosing_and_following_show_the_request(chromium: Chromium, recording: bytes) -> None:
    known = read_recording(recording)
    with serve_watched(lambda engine: LiveFeed(None, recording=recording)) as view:
        chromium.problems.clear()
        chromium.resize(*DESKTOP)
        chromium.open(f"{view.url}/live")
        chromium.wait_for("document.querySelector('#corner').innerText === 'a recording'")
        settled(chromium)
        # a decode run in the first row, in the middle of the picture
        place = chromium.value(
            "(() => { const v = chairlift.view(), run = chairlift.model.runs[0].filter((r) => r.phase === 'decode')"
            ".sort((a, b) => (b.b - b.a) - (a.b - a.a))[0], w = document.querySelector('#timeline').clientWidth - 44;"
            " return [44 + ((run.a + run.b) / 2 - v.left) / (v.right - v.left) * w, run.n]; })()"
        )
        point(chromium, "#timeline", place[0], 52)
        chromium.wait_for("document.querySelector('#tip').innerText !== ''")
        tip = text(chromium, "#tip")
        request = known.requests[place[1]]
        assert request.request_id in tip
        assert f"{request.prompt_tokens} tokens, {request.cached_tokens} from the cache" in tip
        assert "between tokens" in tip and "in the queue" in tip and "computed in" in tip
        for kind in ("mousePressed", "mouseReleased"):
            point(chromium, "#timeline", place[0], 52, kind, button="left", clickCount=1)
        settled(chromium)
        assert "Where its time went" in text(chromium, "#detail")
        assert chromium.value("document.querySelector('#follow').value") == request.request_id
        causes = text(chromium, "#detail")
        assert "generating its tokens" in causes
        chosen = next(each for each in known.requests.values() if each.reason == "abort").request_id
        chromium.value("document.querySelector('#follow').select(); document.querySelector('#follow').focus()")
        chromium.write(chosen)
        settled(chromium)
        assert chosen in text(chromium, "#detail") and "abort" in text(chromium, "#detail")
        chromium.value("document.querySelector('#follow').select()")
        chromium.write("nobody")
        settled(chromium)
        assert "No request nobody so far" in text(chromium, "#note")
        assert chromium.problems == []


def test_keys_zoom_scrub_and_pause_change_the_view(chromium: Chromium) -> None:
    truth = make_truth(seed=9)
    with serve_watched() as view:
        look(view, chromium)
        run_watched(view, truth, bursts=5)
        caught_up(chromium, truth)
        settled(chromium)
        assert chromium.value("chairlift.view().held") is None
        span = chromium.value("chairlift.view().span")
        key(chromium, "+")
        assert chromium.value("chairlift.view().span") < span
        key(chromium, "-")
        key(chromium, " ")
        settled(chromium)
        assert text(chromium, "#pause") == "Resume" and text(chromium, "#corner") == "paused"
        before = chromium.value("chairlift.view().right")
        for _ in range(3):
            key(chromium, "ArrowLeft")
        settled(chromium)
        assert chromium.value("chairlift.view().right") < before
        assert re.search(r"KV memory at step \d+", text(chromium, "#blocktitle"))
        key(chromium, "ArrowDown")
        settled(chromium)
        assert text(chromium, "#detail")
        key(chromium, "Escape")
        settled(chromium)
        assert not text(chromium, "#detail")
        chromium.value("(({right}) => { chairlift.before = right; })(chairlift.view())")
        point(chromium, "#timeline", 300, 100, "mouseWheel", deltaX=0, deltaY=-240)
        settled(chromium)
        assert chromium.value("chairlift.view().span") < span
        key(chromium, "End")
        settled(chromium)
        assert chromium.value("chairlift.view().held") is None and text(chromium, "#pause") == "Pause"
        chromium.value(
            "(() => { const a = document.querySelector('#across'); a.value = 'time';"
            " a.dispatchEvent(new Event('change')); })()"
        )
        settled(chromium)
        assert chromium.value("chairlift.view().mode") == "time"
        assert chromium.problems == []


def test_a_wait_outlives_the_page_it_began_on(chromium: Chromium) -> None:
    with serve_watched() as view:
        look(view, chromium)
        chromium.wait_for("location.search === '?demo' || new Promise(() => location.assign('?demo'))")


def test_an_empty_server_has_an_example_to_show(chromium: Chromium, tmp_path: Path) -> None:
    with serve_watched() as view:
        look(view, chromium)
        view.tell(b"\n".join(json.dumps({"key": empty_key()}).encode() for _ in range(2)))
        chromium.wait_for("document.querySelector('#empty').checkVisibility()")
        chromium.click("#example")
        chromium.wait_for("location.search === '?demo' && chairlift.model.count > 300")
        settled(chromium)
        assert text(chromium, "#corner") == "a simulated example"
        assert int(text(chromium, "#waiting")) >= 0 and "%" in text(chromium, "#kv")
        chromium.click("#compare")
        chromium.wait_for("document.querySelector('#verdict').checkVisibility()")
        settled(chromium)
        words = text(chromium, "#words")
        assert "static in" in words and "times as much" in words
        assert text(chromium, "#title") == "The example"
        assert text(chromium, "#title2").startswith("static: Request-level batches")
        for name, size in (("light", DESKTOP), ("dark", DESKTOP), ("phone", PHONE)):
            chromium.resize(*size, phone=name == "phone", dark=name == "dark")
            settled(chromium)
            assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
            shot = tmp_path / f"{name}.png"
            chromium.screenshot(shot)
            assert shot.stat().st_size > 20_000
        choose = (
            "(() => { const a = document.querySelector('#upper'); a.value = '%s';"
            " a.dispatchEvent(new Event('change')); })()"
        )
        chromium.value(choose % "tgi")
        chromium.wait_for("document.querySelector('#title').innerText.startsWith('tgi: Text Generation')")
        assert "tgi against static" in text(chromium, "#verdict") and PRESETS["tgi"].does in text(chromium, "#words")
        chromium.value(choose % "static")
        chromium.wait_for("document.querySelector('#note').innerText.includes('choose two')")
        chromium.value(choose % "recorded")
        chromium.click("#compare")
        chromium.wait_for("document.querySelector('#title').innerText === 'The example'")
        chromium.click("#compare")
        chromium.resize(*DESKTOP)
        settled(chromium)
        assert not chromium.value("document.querySelector('#timeline2').checkVisibility()")
        assert chromium.problems == []


def gauge_texts(browser: Chromium) -> list[str]:
    names = ("running", "waiting", "kv", "speed", "perstep", "preempted")
    return [text(browser, f"#{name}") for name in names]


def test_values_that_have_passed_are_not_shown_as_present(chromium: Chromium) -> None:
    truth = make_truth(seed=9)
    with serve_watched() as view:
        look(view, chromium)
        run_watched(view, truth, bursts=5)
        caught_up(chromium, truth)
        chromium.wait_for("/^[0-9]/.test(document.querySelector('#speed').innerText)")
        chromium.value(
            "(() => { const now = performance.now.bind(performance); performance.now = () => now() + 1e5; })()"
        )
        chromium.wait_for("document.querySelector('#perstep').innerText === 'idle'")
        assert text(chromium, "#corner") == "live · idle"
        running, waiting, _, speed, _, preempted = gauge_texts(chromium)
        assert (running.split(" / ")[0], waiting, speed, preempted) == ("0", "0", "–", "–")
        assert "colour" not in text(chromium, "#blocknote") and "Hatched" not in text(chromium, "#blocknote")
    chromium.wait_for("document.querySelector('#corner').innerText === 'no connection'")
    chromium.wait_for("document.querySelector('#blocktitle').innerText === 'KV memory before the connection was lost'")
    assert gauge_texts(chromium) == ["–", "–", "–", "–", "", "–"]
    chromium.wait_for("document.querySelector('#note').innerText === 'No connection to the server. Trying again …'")
    assert chromium.problems == []


def test_a_phone_shows_the_chart_first_and_the_legend_of_what_is_in_it(chromium: Chromium, recording: bytes) -> None:
    with serve_watched(lambda engine: LiveFeed(None, recording=recording)) as view:
        chromium.problems.clear()
        chromium.resize(390, 844, phone=True)
        chromium.open(f"{view.url}/live")
        chromium.wait_for("document.querySelector('#corner').innerText === 'a recording'")
        settled(chromium)
        top, bottom = chromium.value(
            "(({top, bottom}) => [top, bottom])(document.querySelector('#timeline').getBoundingClientRect())"
        )
        assert top < 844 / 3 and bottom < 844
        assert chromium.value("document.querySelector('#tools').getBoundingClientRect().top") > bottom
        assert chromium.value("document.documentElement.scrollWidth <= innerWidth")
        legend = text(chromium, "#legend")
        assert "prefill" in legend and "decode" in legend
        assert "swapped out" not in legend and "static batch" not in legend and "drafts" not in legend
        assert chromium.problems == []


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("compare=orca,vllm", "orca against vllm"),
        ("compare=tgi", "the example against tgi"),
        ("static", "the example against static"),
    ],
)
def test_the_address_names_the_sides_of_a_comparison(chromium: Chromium, query: str, shown: str) -> None:
    with serve_watched() as view:
        chromium.problems.clear()
        chromium.open(f"{view.url}/live?demo&{query}")
        chromium.wait_for("document.querySelector('#verdict').checkVisibility()")
        assert shown in text(chromium, "#verdict")
        assert chromium.problems == []


def test_an_unknown_side_in_the_address_is_refused_with_the_list(chromium: Chromium) -> None:
    with serve_watched() as view:
        chromium.open(f"{view.url}/live?demo&compare=orka")
        chromium.wait_for("document.querySelector('#note').innerText.includes('No comparison with orka')")
        assert "tensorrt-llm-max-utilization" in text(chromium, "#note")
        assert not chromium.value("document.querySelector('#verdict').checkVisibility()")


def empty_key() -> dict[str, Any]:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4, "block_bytes": 64}
    state = {"requests": [], "on": [], "state": [0, "", 9, 0, 0], "cached": [[]]}
    return {"format": FORMAT, "run": "1", "unix": 0, **sizes, "pools": [10], "settings": {}, "after": 0, **state}


def test_a_key_is_asked_for_and_kept_for_the_tab(chromium: Chromium) -> None:
    with serve_watched(api_key=("sk-right",)) as view:
        chromium.problems.clear()
        chromium.open(f"{view.url}/live")
        chromium.wait_for("document.querySelector('#door').checkVisibility()")
        for typed in ("sk-wrong", "sk-right"):
            chromium.value("document.querySelector('#key').focus()")
            chromium.write(typed)
            chromium.press("Enter")
            if typed == "sk-wrong":
                chromium.wait_for("document.querySelector('#refused').innerText.includes('not one of')")
        chromium.wait_for("!document.querySelector('#door').checkVisibility()")
        end = time.monotonic() + 60
        while not view.engine.events.wants("steps"):
            assert time.monotonic() < end
            chromium.value("new Promise(requestAnimationFrame)")
        assert chromium.value("sessionStorage.getItem('key')") == "sk-right"
        assert chromium.value("localStorage.length") == 0 and chromium.value("document.cookie") == ""
        assert chromium.problems == []
        chromium.value("sessionStorage.clear()")


# --- a real server ---------------------------------------------------------------------------------------------------


def ask(port: int, number: int, tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "model": "hashlm",
        "prompt": f"a secret {number} " * 9,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": f"caller-{number}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if number % 5 == 4:
        response.read(200)  # it leaves in the middle
    else:
        response.read()
    connection.close()


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_page_follows_a_real_server_under_load(chromium: Chromium, dies: bool) -> None:
    flags = ("--max-num-seqs", "3", "--num-kv-blocks", "24", "--block-size", "16", "--served-model-name", "hashlm")
    with ServerProcess("hashlm:2ms", *flags) as server, ThreadPoolExecutor(8) as threads:
        chromium.problems.clear()
        chromium.resize(*DESKTOP)
        chromium.open(f"http://127.0.0.1:{server.port}/live")
        chromium.wait_for("chairlift.model.about")
        for job in [threads.submit(ask, server.port, number, 120) for number in range(15)]:
            job.result()
        chromium.wait_for("chairlift.requests().filter((r) => r.ended !== null).length === 15")
        page = shown(chromium)
        by_name = {request["name"]: request for request in page["requests"]}
        assert set(by_name) == {f"caller-{number}" for number in range(15)}
        for number in range(15):
            request = by_name[f"caller-{number}"]
            if number % 5 == 4:
                assert request["reason"] in ("abort", "length")
                continue
            assert (request["reason"], request["tokens"]) == ("length", 120)
            spent = request["ended"] - request["arrival"]
            assert sum(request["causes"].values()) == pytest.approx(spent, rel=0.01, abs=2e-3)
        assert any(request["preemptions"] for request in page["requests"])
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            connection.request("GET", "/live/export?format=jsonl")
            lines = connection.getresponse().read()
        assert b"secret" not in lines and b"caller-3" in lines
        recorded = {each.request_id: each for each in read_recording(lines).requests.values()}
        assert all(recorded[request["id"]].output_tokens == request["tokens"] for request in page["requests"])
        if dies:
            run = chromium.value("chairlift.model.about.run")
            os.kill(server.engine(), signal.SIGKILL)
            chromium.wait_for(f"chairlift.model.about.run !== {json.dumps(run)}")
            ask(server.port, 21, 10)
            chromium.wait_for("chairlift.requests().some((r) => r.name === 'caller-21' && r.tokens === 10)")
        server.terminate()
        assert server.process.wait(60) == 0  # a viewer does not keep it from ending
        assert chromium.problems == []
