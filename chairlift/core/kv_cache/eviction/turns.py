"""The turns of conversations that have ended last, and where their blocks are in the prefix cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request

__all__ = ["EndedTurn", "EndedTurns", "path_of"]

_MOST_TURNS: Final = 4096
_MOST_TOKENS: Final = 1 << 20
"""Most tokens of all turns that are not known to have called tools. They keep nodes of evicted blocks in memory until
it is known whether they called tools, which takes milliseconds."""


@dataclasses.dataclass(slots=True, eq=False)
class EndedTurn:
    """A request that has ended. The conversation may go on with a prompt that begins like its prompt and answer."""

    number: int
    """Number of the turn in the order in which turns ended, from 1."""
    request_id: str
    tenant: str
    node: PrefixNode
    """Node of its last full block."""
    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens of prompt and answer."""
    ended_at: float
    tools: tuple[str, ...] = ()
    """Names of the tools that it called. Empty: it is not known to have called any."""
    until: float = 0.0
    """End of its lease; 0 without one."""
    due: float = 0.0
    """Time at which its blocks should be there again; 0 if they were not given up for the pause."""
    is_fetched: bool = False
    """Whether some of its blocks were read from files before the next turn came."""
    next_id: str = ""
    """Id of the request that continues the conversation; empty until it arrives."""
    num_matched: int = 0
    """Number of leading blocks that the next turn has in common with this one; 0 until it arrives."""
    keys: tuple[bytes, ...] = ()
    """Keys of its last full block and of the last full block of its prompt, while it is found by them."""

    def forget_path(self) -> None:
        """Keep no node but the last one, so that evicted nodes are freed."""
        self.node = PrefixNode(self.node.key, None, b"", 0)


class EndedTurns:
    """The newest turns. Those that called tools are found by what the next prompt begins with: the prompt and the
    answer, or at least the prompt, because some chat templates leave out the reasoning of earlier answers."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, EndedTurn] = OrderedDict()
        """Turns that are not known to have called tools."""
        self._num_tokens = 0
        """Number of their tokens."""
        self._open: OrderedDict[str, EndedTurn] = OrderedDict()
        """Turns that called tools, and whose next turn has not joined."""
        self._paused: dict[bytes, EndedTurn] = {}
        """Key of a block -> the newest turn that called tools and has this key."""
        self._continued: dict[str, EndedTurn] = {}
        """Id of a request that continues a conversation and has not joined -> the turn before it."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._turns) + len(self._open)

    @property
    def paused(self) -> list[EndedTurn]:
        """The turns that called tools and whose next turn has not joined, in the order in which they ended."""
        return list(self._open.values())

    def paused_since(self, time: float) -> Iterator[EndedTurn]:
        """The turns of :attr:`paused` that ended at ``time`` or later, the newest pause first."""
        return itertools.takewhile(lambda turn: turn.ended_at >= time, reversed(self._open.values()))

    def add(self, request: Request, now: float) -> None:
        """Note that a turn has ended. EndedTurns without a full block are not kept."""
        name, node = request.request_id, request.last_node
        if node is None or node.parent is None:
            return
        self._count += 1
        if (older := self._turns.get(name) or self._open.get(name)) is not None:
            self._remove(older)
        lengths = request.num_prompt_tokens, len(request.token_ids)
        self._turns[name] = EndedTurn(self._count, name, request.service.tenant, node, *lengths, now)
        self._num_tokens += len(request.token_ids)
        while len(self._turns) > _MOST_TURNS or (self._num_tokens > _MOST_TOKENS and len(self._turns) > 1):
            self._remove(next(iter(self._turns.values())))

    def pause(self, request_id: str, tools: Iterable[str], block_size: int) -> EndedTurn | None:
        """Note that a turn called tools. Returns the turn; None if it is not known, or if this is known already."""
        turn = self._turns.get(request_id)
        if turn is None:
            return None
        self._remove(turn)
        turn.tools = tuple(tools)
        self._open[request_id] = turn
        if len(self._open) > _MOST_TURNS:
            self._remove(next(iter(self._open.values())))
        last = turn.num_prompt_tokens // block_size - 1
        prompt = [node.key for index, node in path_of(turn.node) if index == last]
        turn.keys = turn.node.key, *prompt
        for key in turn.keys:
            self._paused[key] = turn
        return turn

    def arrived(self, request: Request, keys: Iterable[bytes]) -> EndedTurn | None:
        """The turn that a request continues, if it is the first one to do so. ``keys`` are those of the full blocks of
        its prompt. They are not read while no turn has called tools. A prompt that is not longer is no next turn, but
        the same one again."""
        found = None
        if self._paused:
            for index, key in enumerate(keys):
                turn = self._paused.get(key)
                if turn is not None and _continues(request, turn):
                    found = turn
                    turn.num_matched = index + 1
        if found is not None:
            found.next_id = request.request_id
            self._continued[request.request_id] = found
        return found

    def joined(self, request_id: str) -> EndedTurn | None:
        """The turn that a request continues, which is forgotten."""
        turn = self._continued.get(request_id)
        if turn is not None:
            self._remove(turn)
        return turn

    def _remove(self, turn: EndedTurn) -> None:
        if self._turns.pop(turn.request_id, None) is not None:
            self._num_tokens -= turn.num_tokens
        self._open.pop(turn.request_id, None)
        for key in turn.keys:
            if self._paused.get(key) is turn:
                del self._paused[key]
        self._continued.pop(turn.next_id, None)


def _continues(request: Request, turn: EndedTurn) -> bool:
    own = turn.tenant == request.service.tenant and not turn.next_id
    return own and request.num_prompt_tokens > turn.num_prompt_tokens


def path_of(node: PrefixNode | None) -> Iterator[tuple[int, PrefixNode]]:
    """(index of the block, node), from ``node`` up to the first block."""
    nodes: list[PrefixNode] = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    for above, each in enumerate(nodes):
        yield len(nodes) - 1 - above, each
