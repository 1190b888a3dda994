"""Compiles each grammar first in a process that can be killed, before the engine compiles it.

A small schema may take seconds and gigabytes, and a process cannot stop its own native code. The kernel limits time
and memory of the process. The test uses a tokenizer of single bytes instead of the model's tokenizer, because errors
of a grammar do not depend on tokens, and the model's tables are large.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift.base.cache_key import cache_key
from chairlift.base.structured_outputs import CANNOT_BE_FOLLOWED, Grammar
from chairlift.base.workers.child import Answer, serve
from chairlift.base.workers.pool import WorkerPool
from chairlift.errors import RequestError
from chairlift.text.grammar.compiler import have_llguidance, markers_of, matcher_for
from chairlift.text.grammar.structural_tag import TagMarkers
from chairlift.text.tokenizer.byte_level import byte_tokenizer
from chairlift.text.tokenizer.tokenizer import Tokenizer

__all__ = ["GrammarChecker"]

_SECONDS: Final = 2.0
"""Maximum processor time per grammar in seconds. Real grammars take 1 to 50 ms."""
_CPU_SECONDS: Final = 4
"""Processor seconds after which the kernel kills a worker, if the server has not killed it before."""
_MAX_REPLY: Final = 16_384
_MAX_KEPT: Final = 1024
_END: Final = "<|end|>"


class GrammarChecker(WorkerPool):
    """Checks grammars for a model with ``vocab_size`` logits.

    Up to ``max_waiting`` grammars wait in the queue. Workers start when the first grammar arrives. All methods run on
    one event loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_waiting: int = 256,
        *,
        memory_bytes: int = 256 << 20,
        time_limit: float = _SECONDS,
    ) -> None:
        markers = markers_of(tokenizer)
        setup = {
            "special": markers.special,
            "others": markers.others,
            "vocab_size": max(vocab_size, tokenizer.vocab_size),
            "memory_bytes": memory_bytes,
        }
        super().__init__(__name__, setup, "grammars", _MAX_REPLY, num_workers=2, max_waiting=max_waiting)
        self._byte_decoding = tokenizer.byte_decoding
        self._time_limit = time_limit
        self._good: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar, salt: str = "") -> None:
        """Raise RequestError if the grammar is invalid, or takes too much time or memory. A grammar that was good is
        not compiled again for callers with the same ``salt``.

        Other errors, those of :meth:`WorkerPool.ask`, do not mean that the grammar is wrong.
        """
        have_llguidance()
        key = cache_key("grammar", salt, grammar.key)
        if key in self._good:
            self._good.move_to_end(key)
            return
        fields = {
            "kind": grammar.kind,
            "text": grammar.text,
            "compact": grammar.compact,
            "cpu_seconds": _CPU_SECONDS,
        }
        try:
            reply = await self.ask(fields, self._time_limit)
        except TimeoutError:
            raise RequestError(
                f"{CANNOT_BE_FOLLOWED}it was not compiled after {self._time_limit:g} s of processor time; simplify it"
            ) from None
        except (EOFError, ValueError):
            raise RequestError(f"{CANNOT_BE_FOLLOWED}it takes more memory than it may; make it simpler") from None
        if "error" in reply:
            raise RequestError(str(reply["error"]))
        self._good[key] = None
        if len(self._good) > _MAX_KEPT:
            self._good.popitem(last=False)


def _prepare(setup: Mapping[str, Any]) -> tuple[Answer, Callable[[], object]]:
    from llguidance import LLTokenizer

    markers = TagMarkers(setup["special"], setup["others"])
    width = max(int(setup["vocab_size"]), 257)
    tables = LLTokenizer(byte_tokenizer((_END,), eos=_END).backend.to_str(), n_vocab=width, eos_token=[256])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            matcher_for(Grammar(request["kind"], request["text"], request["compact"]), tables, markers)
        except RequestError as error:
            return {"error": str(error)}
        return {}

    return answer, lambda: None


if __name__ == "__main__":
    serve(_prepare, f"{CANNOT_BE_FOLLOWED}it takes more memory than it may; make it simpler")
