"""``bench serve`` against servers that are slow, foreign, broken or gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.bench.serve import Plan, measure
from chairlift_lab.bench.serve_result import figures_of
from chairlift_lab.bench.serve_run import Load, LoadOutcome, Progress, PromptDialect, ServeRun
from chairlift_lab.replay.traced_request import TracedRequest
from tests.lab.bench.scripted_server import PATIENCE, Exchange, Script, ScriptedServer, answer, event, serving

SHORT = TracedRequest(arrival=0.0, prompt_tokens=20, output_tokens=3)


def at(*times: float, **fields: Any) -> list[TracedRequest]:
    return [dataclasses.replace(SHORT, arrival=time, **fields) for time in times]


@contextlib.contextmanager
def unwatched(url: str, total: int) -> Iterator[Progress]:
    yield lambda running, outcome: None


def measured(plan: Plan) -> list[ServeRun]:
    async def runs() -> list[ServeRun]:
        return [run async for _, _, run in measure(plan, unwatched)]

    return asyncio.run(asyncio.wait_for(runs(), PATIENCE))


def one_run(server: ScriptedServer, requests: list[TracedRequest], **settings: Any) -> ServeRun:
    """One load on one server, with as much time per request as it takes where others keep the machine busy."""
    load = Load(requests=requests, max_concurrency=settings.pop("max_concurrency", None))
    (run,) = measured(Plan(urls=[server.url], loads=[load], **{"timeout": PATIENCE, **settings}))
    return run


def after(count: int, then: Script) -> Script:
    """The first requests, by which the client learns what the server takes, are answered."""

    async def script(exchange: Exchange) -> None:
        await (answer if exchange.number < count else then)(exchange)

    return script


# --- when requests leave ---------------------------------------------------------------------------------------------


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """No request is answered before the last one has arrived, and all of them arrived at their times."""
    requests = at(*(index * 0.02 for index in range(40)))

    async def wait_for_all(exchange: Exchange) -> None:
        if len(server.exchanges) == 1 + len(requests):
            all_there.set()
        await all_there.wait()
        await answer(exchange)

    all_there = asyncio.Event()
    with serving(ScriptedServer(after(1, wait_for_all))) as server:
        run = one_run(server, requests)
    assert {each.status for each in run.outcomes} == {"completed"}
    late = [
        seen.seen - run.begin - request.arrival for seen, request in zip(server.exchanges[1:], requests, strict=True)
    ]
    assert min(late) >= 0
    assert min(late[20:]) < 0.03  # where others keep the machine busy, some are late; but none makes the next ones late
    figures = figures_of(run, {})
    assert figures.max_concurrent_requests == len(requests)
    assert figures.lateness is not None
    assert figures.lateness.p99 / 1000 <= max(late)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    most = 0

    async def count(exchange: Exchange) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await answer(exchange)
        running -= 1

    running, full = 0, asyncio.Event()
    with serving(ScriptedServer(after(1, count))) as server:
        run = one_run(server, at(*[0.0] * 12), max_concurrency=3)
    assert (len(run.outcomes), most, figures_of(run, {}).completed) == (12, 3, 12)
    assert sum(outcome.held for outcome in run.outcomes) == 9
    assert figures_of(run, {}).max_concurrent_requests <= 3


def test_a_turn_waits_for_the_turn_before_it() -> None:
    """The first turn is not answered before a later request of somebody else is there."""
    log: list[int] = []

    async def note(exchange: Exchange) -> None:
        tokens = exchange.body["max_tokens"]
        log.append(tokens)
        if tokens == 5:
            other_is_there.set()
        if tokens == 3:
            await other_is_there.wait()
        await answer(exchange)
        log.append(-tokens)

    other_is_there = asyncio.Event()
    first, second = (dataclasses.replace(SHORT, session="a", turn=turn, output_tokens=3 + turn) for turn in (0, 1))
    other = dataclasses.replace(SHORT, arrival=0.1, output_tokens=5)
    with serving(ScriptedServer(after(1, note))) as server:
        run = one_run(server, [first, second, other])
    assert log.index(-3) < log.index(4)
    assert log.index(5) < log.index(4)
    assert [outcome.held for outcome in run.outcomes] == [False, True, False]
    assert run.outcomes[1].scheduled >= run.outcomes[0].end
    lateness = figures_of(run, {}).lateness
    assert lateness is not None
    free = (run.outcomes[0], run.outcomes[2])  # the two that nobody held back
    assert lateness.p99 <= 1000 * max(outcome.start - outcome.scheduled for outcome in free) + 1e-6


def test_a_turn_with_a_gap_is_sent_so_long_after_the_answer_before_it() -> None:
    """Its arrival says when it was sent in the recorded system, which was slower."""
    first = dataclasses.replace(SHORT, session="a", output_tokens=3)
    second = dataclasses.replace(SHORT, arrival=60.0, session="a", turn=1, gap_ms=150.0, output_tokens=4)
    with serving(ScriptedServer(after(1, answer))) as server:
        run = one_run(server, [first, second])
    before, after_it = sorted(run.outcomes, key=lambda outcome: outcome.index)
    assert after_it.held
    assert 0.15 <= after_it.start - before.end < 30


def test_a_cancelled_request_closes_its_connection() -> None:
    async def never_end(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk(event({"choices": [{"text": "x"}]}))
        await exchange.until_left()
        seen.release()

    seen = threading.Semaphore(0)
    with serving(ScriptedServer(after(1, never_end))) as server:
        run = one_run(server, at(0.0, 0.0, cancel_ms=60.0))
        figures = figures_of(run, {"e2el": 1.0})
        assert seen.acquire(timeout=PATIENCE) and seen.acquire(timeout=PATIENCE)
    assert [exchange.left for exchange in server.exchanges[1:]] == [True, True]
    assert (figures.completed, figures.failed, figures.cancelled, figures.output_tokens) == (0, 0, 2, 0)
    assert all(0.05 < outcome.e2el < PATIENCE / 2 for outcome in run.outcomes)


def test_a_request_that_ends_before_its_cancel_time_is_complete() -> None:
    with serving(ScriptedServer()) as server:
        assert figures_of(one_run(server, at(0.0, cancel_ms=500 * PATIENCE)), {}).completed == 1


# --- what goes wrong -------------------------------------------------------------------------------------------------


async def server_error(exchange: Exchange) -> None:
    exchange.refuse("500 Internal Server Error", "it broke")


async def too_many(exchange: Exchange) -> None:
    exchange.refuse("429 Too Many Requests", "the queue is full")


async def cut(exchange: Exchange) -> None:
    exchange.head()
    exchange.chunk(event({"choices": [{"text": "x"}]}))  # and no end of the chunks


async def cut_politely(exchange: Exchange) -> None:
    exchange.head()
    exchange.chunk(event({"choices": [{"text": "x"}]}))
    exchange.end()


async def garbage(exchange: Exchange) -> None:
    exchange.head()
    exchange.chunk(b"data: <html>\n\n")
    exchange.end()


async def hang_up(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def silent(exchange: Exchange) -> None:
    await exchange.until_left()


async def endless(exchange: Exchange) -> None:
    exchange.head()
    exchange.chunk(event({"choices": [{"text": "x"}]}))
    await exchange.until_left()


async def no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"hello\r\n\r\n")


BROKEN: list[tuple[Script, str, str]] = [
    (server_error, "HTTP 500", "it broke"),
    (too_many, "HTTP 429", "the queue is full"),
    (cut, "cut stream", ""),
    (cut_politely, "cut stream", "after 1 tokens"),
    (garbage, "not OpenAI's format", "<html>"),
    (hang_up, "connection closed", "without an answer"),
    (silent, "timeout", "within 2 s; 0 tokens"),
    (endless, "timeout", "within 2 s; 1 tokens"),
    (no_http, "not HTTP", ""),
]


@pytest.mark.parametrize(("script", "kind", "message"), BROKEN, ids=[script.__name__ for script, *_ in BROKEN])
def test_failures_have_a_kind_and_an_example(script: Script, kind: str, message: str) -> None:
    """One of three requests fails, and no figure but the number of failures knows of it."""
    turn = {2: script}
    with serving(ScriptedServer(lambda exchange: turn.get(exchange.number, answer)(exchange))) as server:
        run = one_run(server, at(0.0, 0.05, 0.1), timeout=2.0 if kind == "timeout" else PATIENCE)
        figures = figures_of(run, {"e2el": 10_000.0})
    assert (figures.completed, figures.failed, figures.good) == (2, 1, 2)
    ((seen, count, example),) = figures.errors
    assert (seen, count) == (kind, 1)
    assert message in example
    assert example
    e2el = figures.times["e2el"]
    assert e2el is not None
    assert e2el.p99 <= 1000 * max(outcome.e2el for outcome in run.outcomes if outcome.status == "completed") + 1e-6


def test_a_server_that_goes_away_refuses() -> None:
    async def last_one(exchange: Exchange) -> None:
        server.stop_listening()
        await answer(exchange)

    with serving(ScriptedServer(after(1, last_one))) as server:
        run = one_run(server, at(0.0, 0.0, 0.0), max_concurrency=1)
    assert Counter(outcome.kind for outcome in run.outcomes) == {"": 1, "connection refused": 2}


@pytest.mark.parametrize(
    ("make", "plan", "complaint"),
    [
        (lambda: ScriptedServer(key="sk-1"), {}, "needs an API key"),
        (lambda: ScriptedServer(key="sk-1"), {"api_key": "sk-2"}, "needs an API key"),
        (lambda: ScriptedServer(), {"model": "other"}, "has no model 'other'; it has scripted"),
        (lambda: ScriptedServer(too_many), {}, "takes no requests now"),
        (lambda: ScriptedServer(server_error), {}, "refuses even the simplest request: HTTP 500: it broke"),
        (lambda: ScriptedServer(garbage), {}, "does not answer: not OpenAI's format"),
        (lambda: ScriptedServer(silent), {"timeout": 0.2}, "does not answer: timeout"),
        (
            lambda: ScriptedServer(after(1, too_many)),
            {"num_warmups": 2},
            "answers none of the warm-up requests: HTTP 429",
        ),
    ],
)
def test_an_impossible_measurement_is_one_error(
    make: Callable[[], ScriptedServer], plan: dict[str, Any], complaint: str
) -> None:
    with serving(make()) as server, pytest.raises(ConfigError) as caught:
        one_run(server, at(0.0), **plan)
    assert complaint in str(caught.value)


def test_an_unreachable_server_is_told_with_the_command_that_starts_one() -> None:
    with serving(ScriptedServer()) as gone:
        pass
    with pytest.raises(ConfigError, match=r"no server answers at .* start one with: chairlift serve"):
        one_run(gone, at(0.0))


def test_a_key_is_sent() -> None:
    with serving(ScriptedServer(key="sk-1")) as server:
        assert figures_of(one_run(server, at(0.0), api_key="sk-1"), {}).completed == 1


# --- what servers take -----------------------------------------------------------------------------------------------


def refusing(*fields: str, most_id: int = 100_000) -> Script:
    async def script(exchange: Exchange) -> None:
        body = exchange.body
        told = {*body, *body.get("stream_options", {})}
        ids = body.get("prompt") if isinstance(body.get("prompt"), list) else []
        if "ids" in fields and ids:
            exchange.refuse("400 Bad Request", "prompt must be text")
        elif told & {*fields} or max(ids or [0]) > most_id:
            exchange.refuse("422 Unprocessable", f"what is {told & {*fields}}?")
        else:
            await answer(exchange)

    return script


FULL = PromptDialect(chat=False, vocab_size=8000, ignore_eos=True)


@pytest.mark.parametrize(
    ("script", "dialect", "note"),
    [
        (answer, FULL, ""),
        (refusing(most_id=255), dataclasses.replace(FULL, vocab_size=250), ""),
        (refusing("continuous_usage_stats"), dataclasses.replace(FULL, continuous_usage=False), ""),
        (refusing("ignore_eos"), dataclasses.replace(FULL, ignore_eos=False), "it refuses ignore_eos"),
        (
            refusing("stream_options"),
            dataclasses.replace(FULL, usage=False, continuous_usage=False),
            "it refuses stream_options",
        ),
        (
            refusing("ids", "ignore_eos", "stream_options"),
            PromptDialect(chat=False, usage=False, continuous_usage=False),
            "it takes no token ids",
        ),
    ],
)
def test_fields_that_a_server_refuses_are_left_out(script: Script, dialect: PromptDialect, note: str) -> None:
    with serving(ScriptedServer(script)) as server:
        run = one_run(server, at(0.0), ignore_eos=True)
    assert run.server.dialect == dialect
    assert figures_of(run, {}).completed == 1
    assert [line for line in run.server.notes if note in line] if note else not run.server.notes


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_of_text_have_the_length_that_was_wanted(chat: bool) -> None:
    """Tokens per word, and those of the template, are learned from the server's own counts."""

    async def template(exchange: Exchange) -> None:
        if isinstance(exchange.body.get("prompt"), list):
            exchange.refuse("400 Bad Request", "prompt must be text")
            return
        read = 11 + round(2.6 * exchange.words)
        exchange.head()
        chunk = {"choices": [{"text": "x", "delta": {"content": "x"}, "finish_reason": "length"}]}
        exchange.chunk(event(chunk | {"usage": {"prompt_tokens": read, "completion_tokens": 1}}) + event(b"[DONE]"))
        exchange.end()

    requests = [dataclasses.replace(SHORT, prompt_tokens=tokens, output_tokens=1) for tokens in (30, 100, 777)]
    with serving(ScriptedServer(template)) as server:
        run = one_run(server, requests, chat=chat)
    for outcome, request in zip(run.outcomes, requests, strict=True):
        assert abs(outcome.prompt_tokens - request.prompt_tokens) <= 2


@pytest.mark.parametrize("vocab_size", [8000, 250, 0])
def test_prompts_share_what_their_prefixes_share(vocab_size: int) -> None:
    dialect = PromptDialect(chat=False, vocab_size=vocab_size, words=(4.0, 1.0 if vocab_size else 2.5))

    def prompt(index: int, *ids: int) -> list[Any]:
        request = TracedRequest(arrival=0.0, prompt_tokens=260, output_tokens=1, prefix_ids=ids, prefix_block=64)
        found = dialect.prompt(request, index)
        return found.split() if isinstance(found, str) else found

    def shared(one: list[Any], other: list[Any]) -> float:
        same = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        return same / len(one)

    big = 2**61 + 3
    assert shared(prompt(1), prompt(2)) == 0
    assert shared(prompt(1, big, 7), prompt(2, big, 7)) == pytest.approx(128 / 260, abs=0.02)
    assert shared(prompt(1, big, 7), prompt(2, big, 8)) == pytest.approx(64 / 260, abs=0.02)
    assert prompt(5, big) == prompt(5, big)


def test_runs_have_fresh_prompts_of_the_same_lengths() -> None:
    load = Load(requests=[dataclasses.replace(SHORT, prefix_ids=(1,), prefix_block=16)] * 3)
    loads = [dataclasses.replace(load, salt=salt) for salt in (5, 2**40)]
    with serving(ScriptedServer()) as server:
        measured(Plan(urls=[server.url], loads=loads, num_warmups=3))
    prompts = [exchange.body["prompt"] for exchange in server.exchanges[1:]]
    assert {len(prompt) for prompt in prompts} == {20}
    firsts = [tuple(prompt[:16]) for prompt in prompts]
    assert Counter(firsts) == dict.fromkeys(firsts, 3)  # warm-up, first and second: shared within, fresh between
    assert len({*firsts}) == 3
    assert len({tuple(prompt) for prompt in prompts}) == 9


def test_two_servers_get_the_same_in_turns() -> None:
    """A takes no ignore_eos, so B is not asked for it either."""
    order: list[str] = []

    def noted(name: str, script: Script) -> Script:
        async def note(exchange: Exchange) -> None:
            if exchange.body["max_tokens"] == 3:
                order.append(name)
            await script(exchange)

        return note

    loads = [Load(requests=at(0.0, 0.0), salt=salt) for salt in (1000, 2000, 3000)]
    with (
        serving(ScriptedServer(noted("A", refusing("ignore_eos")), room=22)) as a,
        serving(ScriptedServer(noted("B", answer))) as b,
    ):
        runs = measured(Plan(urls=[a.url, b.url], loads=loads, ignore_eos=True))
    assert order == list("AABBBBAAAABB")
    assert [run.load.shortened for run in runs] == [2] * 6  # to A's room, for both
    bodies = [[each.body for each in server.exchanges[-6:]] for server in (a, b)]
    assert not [body for body in bodies[1] if "ignore_eos" in body]
    alike = [[body | {"prompt": len(body["prompt"])} for body in those] for those in bodies]
    assert alike[0] == alike[1]


@pytest.mark.parametrize("spelled", ["", "/"])
def test_a_server_is_compared_with_itself_on_prompts_it_does_not_know(spelled: str) -> None:
    with serving(ScriptedServer()) as server:
        measured(Plan(urls=[server.url, server.url + spelled], loads=[Load(requests=at(0.0, 0.0), salt=7)]))
    assert len({tuple(exchange.body["prompt"]) for exchange in server.exchanges[2:]}) == 4


def test_promises_are_sent_when_asked_for() -> None:
    request = dataclasses.replace(SHORT, tenant="alice", priority=-3, ttft_ms=500.0)
    plan = Plan(urls=[""], loads=[Load(requests=[request], promises=True), Load(requests=[request], salt=9)])
    with serving(ScriptedServer()) as server:
        measured(dataclasses.replace(plan, urls=[server.url]))
    with_them, without = (exchange.body for exchange in server.exchanges[1:])
    assert (with_them["user"], with_them["priority"], with_them["ttft_ms"]) == ("alice", -3, 500.0)
    assert not {"user", "priority", "ttft_ms", "service_tier"} & {*without}
    assert "service_tier" not in with_them


def test_progress_is_told_of_every_end() -> None:
    seen: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def watch(url: str, total: int) -> Iterator[Progress]:
        def ended(running: int, outcome: LoadOutcome) -> None:
            seen.append((running, outcome.status))

        yield ended

    async def run(server: ScriptedServer) -> None:
        plan = Plan(urls=[server.url], loads=[Load(requests=at(*[0.0] * 5))])
        async for _ in measure(plan, watch):
            pass

    with serving(ScriptedServer(after(3, too_many))) as server:
        asyncio.run(run(server))
    assert Counter(status for _, status in seen) == {"completed": 2, "failed": 3}
    assert seen[-1][0] == 0


def test_cancelling_returns_what_there_is() -> None:
    async def stop_early(server: ScriptedServer) -> list[ServeRun]:
        async def runs() -> list[ServeRun]:
            plan = Plan(urls=[server.url], loads=[Load(requests=at(0.0, 0.0, 99.0)), Load(requests=at(0.0))])
            return [run async for _, _, run in measure(plan, unwatched)]

        task = asyncio.create_task(runs())
        await asyncio.to_thread(second_is_there.wait, PATIENCE)
        await asyncio.to_thread(first_is_done.wait, PATIENCE)
        task.cancel()
        return await asyncio.wait_for(task, PATIENCE)

    import threading

    second_is_there, first_is_done = threading.Event(), threading.Event()

    async def script(exchange: Exchange) -> None:
        if exchange.number == 2:
            second_is_there.set()
            await exchange.until_left()
            return
        await answer(exchange)
        await exchange.writer.drain()
        if exchange.number == 1:
            await exchange.until_left()  # the client has read it all
            first_is_done.set()

    with serving(ScriptedServer(script)) as server:
        (run,) = asyncio.run(stop_early(server))
    assert run.interrupted
    figures = figures_of(run, {})
    assert (figures.completed, figures.unfinished, figures.failed, len(run.outcomes)) == (1, 1, 0, 2)
    assert any("stopped early: 1 requests" in doubt for doubt in figures.doubts(run))
