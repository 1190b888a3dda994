"""Renders chat templates in worker processes, so that no template can stop the server.

A sandbox limits what a template can access, not how much it computes: a few nested loops run for years, and a few
joins take all memory. So a worker process (:mod:`chairlift.base.workers`) renders the template.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.base.workers.child import Answer, serve
from chairlift.base.workers.pool import WorkerPool
from chairlift.errors import RequestError, TemplateError, TemplateFailedError
from chairlift.text.tokenizer.chat_template import MAX_TEXT, ChatTemplate, check_variables
from chairlift.text.tokenizer.messages import normalize_messages, plain_tools
from chairlift.text.tokenizer.shield import ControlTexts, Shielded, shielded_from

__all__ = ["TemplateWorker"]

_MAX_ERROR: Final = 1000
_BYTES_PER_CHAR: Final = 6
"""Maximum number of bytes of one character as JSON in UTF-8."""


class TemplateWorker(WorkerPool):
    """Renders chats like :class:`~chairlift.text.tokenizer.chat_template.ChatTemplate`, but in worker processes.

    ``num_workers`` chats are rendered at a time. One further worker is kept ready, so that after a kill no chat waits
    for the start of an interpreter. ``time_limit`` is processor time per chat in seconds, ``memory_bytes`` the memory
    that a worker may take after its start, ``max_chars`` the maximum length of a rendered text, and ``max_waiting``
    the maximum number of waiting chats. With ``controls`` the results say which
    of them the template wrote. All methods run on one event loop.
    """

    def __init__(
        self,
        template: str | None,
        named_tokens: Mapping[str, str] | None = None,
        *,
        controls: ControlTexts | None = None,
        max_chars: int = MAX_TEXT,
        time_limit: float = 1.0,
        memory_bytes: int = 100 << 20,
        num_workers: int = 2,
        max_waiting: int = 256,
    ) -> None:
        setup = {
            "template": template,
            "named_tokens": dict(named_tokens or {}),
            "controls": None if controls is None else dataclasses.asdict(controls),
            "max_chars": max_chars,
            "memory_bytes": memory_bytes,
        }
        num_texts = 1 if controls is None else 3
        max_reply = num_texts * _BYTES_PER_CHAR * max(max_chars, _MAX_ERROR) + 4096
        super().__init__(__name__, setup, "chats", max_reply, num_workers, max_waiting)
        self._has_template = template is not None
        self._time_limit = time_limit

    async def start(self) -> None:
        """Start a worker before the first chat. Raises OverloadedError if no worker can be started."""
        if self._has_template:
            await super().start()

    async def check(self) -> None:
        """Raise the error that every chat would raise.

        It is TemplateError for a template that is invalid or fails for small chats, and RequestError for a template
        that takes too long. Without a template, nothing is raised.
        """
        if self._has_template:
            self._starting = True  # no spare worker for it
            try:
                await self._result_of(self._exchange({"check": True}, self._time_limit))
            finally:
                self._starting = False

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat; see :meth:`ChatTemplate.render <chairlift.text.tokenizer.ChatTemplate.render>`. Raises
        the errors of :meth:`render_shielded`."""
        how: dict[str, Any] = {"continue_final_message": continue_final_message, "tools": tools}
        return (await self.render_shielded(messages, add_generation_prompt, variables, **how)).text

    async def render_shielded(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Shielded:
        """The text of a chat, and with ``controls`` the control tokens in it that the template wrote; see
        :meth:`ChatTemplate.render_shielded <chairlift.text.tokenizer.ChatTemplate.render_shielded>`.

        Raises :class:`~chairlift.errors.RequestError` for invalid messages or variables, and if rendering takes too
        long. Raises :class:`~chairlift.errors.TemplateError` if there is no template, or the template fails or kills
        its process. Raises :class:`~chairlift.errors.OverloadedError` if no process can be started or it gets no
        processor time, QueueFullError if too many chats wait, and WorkerLostError if two processes in a row were
        killed from outside.
        """
        variables = dict(variables or {})
        check_variables(variables)
        plain = normalize_messages(messages, images=True)
        if not self._has_template:
            return Shielded(ChatTemplate(None).render(plain))  # raises an error with the remedy
        fields = {
            "messages": plain,
            "add_generation_prompt": bool(add_generation_prompt),
            "continue_final_message": bool(continue_final_message),
            "variables": variables,
            "tools": plain_tools(tools),
        }
        return await self._result_of(self.ask(fields, self._time_limit))

    async def _result_of(self, replies: Awaitable[dict[str, Any]]) -> Shielded:
        """The result in a worker's reply. Raises the errors of :meth:`render`."""
        try:
            reply = await replies
            if "text" in reply:
                return shielded_from(reply)
        except TimeoutError:
            raise RequestError(
                f"the chat template was not done with the messages after {self._time_limit:g} s of processor time; "
                "send fewer or shorter messages"
            ) from None
        except EOFError:
            raise TemplateError(
                "the chat template's process died on the messages; send fewer or shorter ones"
            ) from None
        except ValueError as error:
            raise TemplateError(f"the chat template's process sent nonsense: {error}") from None
        message = str(reply.get("error", "the chat template failed"))[:_MAX_ERROR]
        kinds = {"request": RequestError, "failed": TemplateFailedError}
        raise kinds.get(str(reply.get("kind")), TemplateError)(message)


def _prepare(setup: dict[str, Any]) -> tuple[Answer, Callable[[], object]]:
    template = ChatTemplate(setup["template"], setup["named_tokens"], max_chars=setup["max_chars"])

    def begin() -> None:
        with contextlib.suppress(TemplateError):  # it is raised again for each chat
            template.compile()

    controls = None if setup["controls"] is None else ControlTexts(**setup["controls"])
    return lambda chat: _reply(template, controls, chat), begin


def _reply(template: ChatTemplate, controls: ControlTexts | None, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        if "check" in chat:
            template.check()
            return {"text": ""}
        how = chat["add_generation_prompt"], chat["continue_final_message"], chat.get("tools")
        if controls is not None:
            shielded = template.render_shielded(chat["messages"], controls, *how, **chat["variables"])
            return dataclasses.asdict(shielded)
        text = template.render(chat["messages"], *how, **chat["variables"])
    except RequestError as error:
        return {"error": str(error)[:_MAX_ERROR], "kind": "request"}
    except TemplateError as error:
        kind = "failed" if isinstance(error, TemplateFailedError) else "template"
        return {"error": str(error)[:_MAX_ERROR], "kind": kind}
    return {"text": text}


if __name__ == "__main__":
    serve(_prepare, "the chat template takes more memory than it may; send fewer or shorter messages")
