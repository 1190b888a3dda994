"""Far too long texts are refused before they are tokenized. Long texts take turns, also if a client has left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from chairlift.errors import PromptTooLongError, QueueFullError, TemplateError, TemplateFailedError
from chairlift.text.tokenizer.encoder import PromptEncoder
from tests.server.fake_engine import byte_tokenizer


class SlowTokenizer:
    """Encodes when it is allowed to, and knows how many texts it had at once."""

    chat_template = "{{ 1 }}"
    named_tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.allowed, self.lock = threading.Event(), threading.Lock()
        self.num_now = self.most = 0
        self.texts: list[tuple[str, bool]] = []
        """The texts that were tokenized, and whether another thread did it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self.lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            self.texts.append((text, threading.current_thread() is not threading.main_thread()))
        self.allowed.wait()
        with self.lock:
            self.num_now -= 1
        return [len(text)]


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_laid_out() -> None:
    async def main() -> None:
        encoder = PromptEncoder(byte_tokenizer(), 1000, 8)
        for content in ("x" * 32_001, [{"type": "text", "text": "x" * 32_001}]):
            limit = r"64,0\d\d characters, but at most 64,000 are taken .*; send fewer or shorter messages"
            with pytest.raises(PromptTooLongError, match=limit):
                await encoder.encode_chat([{"role": "user", "content": content}] * 2, True, False, {})
        assert encoder._templates is not None and encoder._templates.pids == []  # nothing was even begun
        fits = [{"role": "user", "content": "x" * 31_000}] * 2
        assert len(await encoder.encode_chat(fits, True, False, {})) > 62_000
        await encoder.close()

    asyncio.run(main())


def test_two_long_texts_at_a_time_also_when_their_callers_leave() -> None:
    async def main() -> None:
        tokenizer: Any = SlowTokenizer()
        encoder = PromptEncoder(tokenizer, 100_000, 3)
        leaving = [asyncio.create_task(encoder.encode("x" * 20_000)) for _ in range(2)]
        staying = []
        try:
            while tokenizer.num_now < 2:
                await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            staying = [asyncio.create_task(encoder.encode("x" * 20_000)) for _ in range(2)]
            staying.append(asyncio.create_task(encoder.beside(lambda: tokenizer.encode("detokenized"))))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="3 long texts wait already"):
                await encoder.encode("x" * 20_000)
        finally:
            tokenizer.allowed.set()
        assert await asyncio.gather(*staying) == [[20_000], [20_000], [11]]
        assert tokenizer.most == 2

    asyncio.run(main())


def test_the_total_length_of_texts_counts() -> None:
    async def main() -> None:
        tokenizer: Any = SlowTokenizer()
        tokenizer.allowed.set()
        encoder = PromptEncoder(tokenizer, 512, 8)
        with pytest.raises(PromptTooLongError, match="the text has 32,769 characters"):
            await encoder.encode_all(["x", "x" * 32_769])
        with pytest.raises(PromptTooLongError, match="262,208 characters together, but one call may have 262,144"):
            await encoder.encode_all(["x" * 4097] * 64)
        assert tokenizer.texts == []
        assert await encoder.encode_all(["x" * 4096] * 64) == [[4096]] * 64
        assert await PromptEncoder(tokenizer, 16_384, 8).encode_all(["x" * 16_384] * 64) == [[16_384]] * 64

    asyncio.run(main())


@pytest.mark.parametrize(
    ("texts", "on_thread"),
    [(["x" * 512], False), (["x" * 513], True), (["x" * 8] * 64, False), (["x" * 9] * 64, True), (["", ""], False)],
)
def test_more_than_a_few_hundred_characters_are_tokenized_on_a_thread(texts: list[str], on_thread: bool) -> None:
    async def main() -> None:
        tokenizer: Any = SlowTokenizer()
        tokenizer.allowed.set()
        assert await PromptEncoder(tokenizer, 512, 8).encode_all(texts) == [[len(text)] for text in texts]
        assert tokenizer.texts == [(text, on_thread) for text in texts]

    asyncio.run(main())


def test_short_texts_do_not_wait_for_long_ones_and_many_are_a_long_one() -> None:
    class Held(SlowTokenizer):
        """Holds only long ones."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text) if text[0] == "l" else [len(text)]

    async def main() -> None:
        tokenizer: Any = Held()
        encoder = PromptEncoder(tokenizer, 512, 2)
        many = [asyncio.create_task(encoder.encode_all(["l" * 9000, "m" * 9000] * 3)) for _ in range(2)]
        try:
            while tokenizer.num_now < 2:
                await asyncio.sleep(0)
            assert await encoder.encode("s" * 16_384) == [16_384]
            others = [asyncio.create_task(encoder.encode_all(["m" * 9000] * 2)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="2 long texts wait already"):
                await encoder.encode_all(["m" * 600] * 28)
        finally:
            tokenizer.allowed.set()
        # The others have their turn between two texts of the first ones, and not behind all of them.
        done, _ = await asyncio.wait([*many, *others], return_when=asyncio.FIRST_COMPLETED)
        assert done <= set(others)
        assert await asyncio.gather(*many, *others) == [[[9000]] * 6] * 2 + [[[9000]] * 2] * 2

    asyncio.run(main())


def test_bad_words_are_tokenized_like_texts() -> None:
    async def main() -> None:
        tokenizer: Any = SlowTokenizer()
        tokenizer.allowed.set()
        encoder = PromptEncoder(tokenizer, 512, 8)
        assert await encoder.encode_words([" ab", "ab"]) == ((2,), (3,))
        assert await encoder.encode_words(()) == ()
        assert {on_thread for _, on_thread in tokenizer.texts} == {False}
        await encoder.encode_words(["x" * 256, "y"])
        assert tokenizer.texts[-1] == ("( y", True)

    asyncio.run(main())


class Templated:
    """A tokenizer, as far as a worker for its template asks."""

    named_tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(text)]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages[0].content }}", None),
        (None, None),
        ("x\n{% for %}", "invalid at line 2"),
        ("{{ messages | shout }}", "No filter named 'shout'"),
        ("{{ raise_exception('no tools') }}", "refused the messages: no tools"),
        ("{{ tools.items() }}", "'None' has no attribute 'items'"),
    ],
)
def test_a_models_own_broken_template_is_told_once_at_the_start(
    caplog: pytest.LogCaptureFixture, template: str | None, told: str | None
) -> None:
    async def main() -> None:
        tokenizer: Any = Templated(template)
        encoder = PromptEncoder(tokenizer, 1000, 8)
        await encoder.start()
        assert encoder._templates is not None and len(encoder._templates.pids) == (template is not None)
        assert await encoder.encode("text") == [4]
        if template is None or told:
            for _ in range(2):
                with pytest.raises(TemplateError, match=told or "no chat template"):
                    await encoder.encode_chat([{"role": "user", "content": "Hi"}], True, False, {})
        else:
            assert await encoder.encode_chat([{"role": "user", "content": "Hi"}], True, False, {}) == [2]
        await encoder.close()

    with caplog.at_level("WARNING", "chairlift"):
        asyncio.run(main())
    assert len(caplog.records) == (told is not None)
    assert told is None or (told in caplog.text and "completions work" in caplog.text)


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("hello {{ nothing.x.y }}", True),
        ("{{ 1 + messages[0].content }}", True),
        ("{{ raise_exception('no') }}", False),
        ("{% if messages[0].role != 'system' %}{{ nothing.x }}{% endif %}{{ messages[0].content }}", False),
        ("{% if messages[0].role == 'system' %}{{ nothing.x }}{% endif %}{{ raise_exception('no') }}", False),
    ],
)
def test_a_given_template_that_fails_for_every_chat_is_refused_at_the_start(template: str, refused: bool) -> None:
    async def main() -> None:
        tokenizer: Any = Templated("{{ messages[0].content }}")
        encoder = PromptEncoder(tokenizer, 1000, 8, template)
        complaint = pytest.raises(TemplateFailedError, match=r"Error: .*--chat-template")
        with complaint if refused else contextlib.nullcontext():
            await encoder.start()
        await encoder.close()

    asyncio.run(main())
