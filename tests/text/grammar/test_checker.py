"""Grammars tried in processes that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import OverloadedError, RequestError
from chairlift.text.grammar.checker import GrammarChecker
from tests.text.grammar.models import bundled


def run(test: Callable[[GrammarChecker], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        checker = GrammarChecker(bundled(), 3_072, **settings)
        try:
            await test(checker)
        finally:
            await checker.close()
        assert not checker.pids

    asyncio.run(main())


def grammar(**asked: Any) -> Any:
    return StructuredOutputsParams(**asked).value


def test_good_grammars_pass_and_bad_ones_are_named() -> None:
    async def test(checker: GrammarChecker) -> None:
        await asyncio.gather(*(checker.check(grammar(choice=[str(i)])) for i in range(8)))
        with pytest.raises(RequestError, match='"not"'):
            await checker.check(grammar(json={"not": {}}))
        await checker.check(grammar(grammar='start: <[2]> "a" <[3071]>'))  # ids are the model's
        with pytest.raises(RequestError, match="too large"):
            await checker.check(grammar(grammar='start: <[3072]> "a"'))

    run(test)


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    bomb = grammar(json={"type": "array", "prefixItems": [large] * 6})

    async def test(checker: GrammarChecker) -> None:
        with pytest.raises(RequestError, match=r"not compiled after 0.05 s|too big"):
            await checker.check(bomb)
        await checker.check(grammar(choice=["a"]))

    run(test, time_limit=0.05)


def test_a_grammar_whose_process_is_killed_is_tried_again() -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(grammar(choice=["a"]))
        for pid in checker.pids:
            os.kill(pid, signal.SIGKILL)
        await checker.check(grammar(choice=["b"]))

    run(test)


def test_a_grammar_that_passed_is_not_tried_again() -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(grammar(choice=["a"]))
        await checker.close()
        await checker.check(grammar(choice=["a"]))

    run(test)


def test_a_grammar_of_one_caller_is_tried_again_for_another() -> None:
    async def test(checker: GrammarChecker) -> None:
        await checker.check(grammar(choice=["a"]), "one")
        await checker.close()
        await checker.check(grammar(choice=["a"]), "one")
        for salt in ("two", ""):
            with pytest.raises(OverloadedError, match="stopping"):  # it would need a process
                await checker.check(grammar(choice=["a"]), salt)

    run(test)
