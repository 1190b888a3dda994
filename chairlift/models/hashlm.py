"""HashLM: a fake model for tests. It needs almost no time, and its output changes when any input is wrong.

HashLM takes the inputs of a real model (flat batch, block tables, slot mapping, swaps, copies, sampling rows) and runs
under the real executor. Instead of tensors it stores two 64-bit words per KV position. Each word depends on the token,
the position and everything the position attends to, read through the block table. The next token depends on all words
that the last position attends to, and on the row's sampling parameters. One wrong block, slot, copy, position, window
or row changes the text. A cache group of recurrent states stores two words per state, and every token changes both. The
arithmetic is exact and uses only numpy, so two runs can be compared with ``==``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from chairlift.base.row_failures import shaped_reason
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import Masks, SampledTokens, StepBatch
from chairlift.config import CacheGroup
from chairlift.executor.sampling.apart import sample_rows

__all__ = ["HASHLM_POSITION_BYTES", "STATE", "HashLM", "image_word", "reference_tokens"]

_Words = npt.NDArray[np.uint64]
DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""The sampling parameters on which a token depends. In another order, every simulated world would have other tokens."""
_MASK = (1 << 64) - 1
HASHLM_POSITION_BYTES = 16
"""Bytes per KV position, and also per recurrent state: two words of 64 bits."""
STATE = 0
"""Entry in a list of windows, one per cache group, for a group that stores recurrent states."""
_BASE = 0x9E3779B97F4A7C15  # odd, so that its powers never vanish modulo 2**64
_TOKEN = 0xD6E8FEB86659FD93
_PLACE = 0xA0761D6478BD642F
_TAG = 0xE7037ED1A0B428DB
_STATE = 0x8EBC6AF09C88C6E3


class HashLM:
    """A fake :class:`~chairlift.executor.local.ModelRunner` with the given cache groups.

    ``host_memory`` is a function from a number of bytes to a zeroed buffer for the groups' host blocks. Without it the
    buffers are ordinary memory.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        host_memory: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        self.cache_groups = list(groups)
        self._places = [1 if group.state_span else block_size for group in groups]
        self.block_bytes = [HASHLM_POSITION_BYTES * places for places in self._places]
        self._recurrent = [index for index, group in enumerate(groups) if group.state_span]
        self._states: dict[tuple[int, int], int] = {}  # (row, length) -> second words of the states behind it, summed
        self.vocab_size = vocab_size
        self._block_size = block_size
        # Per group, an array of two rows. For a KV position, row 0 has the word of its token and row 1 the hash of what
        # it attended to. For a recurrent state, the rows have the same two words, accumulated over all its tokens.
        sized = list(zip(groups, self._places, strict=True))
        self._words = [np.zeros((2, group.num_blocks * places), dtype=np.uint64) for group, places in sized]
        counts = [group.num_host_blocks * places for group, places in sized]
        make = host_memory or (lambda nbytes: np.zeros(nbytes, dtype=np.uint8))
        self._host_words = [make(HASHLM_POSITION_BYTES * count).view(np.uint64).reshape(2, count) for count in counts]
        self._powers = np.array([pow(_BASE, i + 1, 1 << 64) for i in range(max_model_len + 1)], dtype=np.uint64)
        self.adapter_tags: Mapping[int, int] = {}
        """Number of a loaded adapter -> 64-bit value mixed into the hash of each token that uses the adapter."""
        self.image_tags: Mapping[bytes, int] = {}
        """Key of an encoded tile -> 64-bit value on which the hashes of the tile's rows depend."""
        self._offsets = np.arange(block_size, dtype=np.int64)

    @property
    def repeats(self) -> bool:
        """Whether a failed step may be computed again: recurrent states are changed in place, KV is not."""
        return not self._recurrent

    @property
    def blocks(self) -> HashLM:
        """The model itself has :meth:`take`, :meth:`put` and :meth:`prepare`."""
        return self

    def take(self, group: int, block: int) -> bytes:
        """The words of a block as bytes."""
        size = self._places[group]
        return self._words[group][:, block * size : (block + 1) * size].tobytes()

    def put(self, group: int, block: int, content: bytes) -> None:
        """Overwrite the words of a block."""
        size = self._places[group]
        words = np.frombuffer(content, dtype=np.uint64).reshape(2, size)
        self._words[group][:, block * size : (block + 1) * size] = words

    def prepare(self, nbytes: int) -> None:
        """Nothing, because the words are few."""

    def move_blocks(self, batch: StepBatch) -> None:
        """Swap out, copy and swap in the blocks of a step, in this order."""
        sizes = self._places
        for group, block, host in batch.swap_out:
            _copy(self._words[group], block, self._host_words[group], host, sizes[group])
        for group, source, target in batch.copies:
            _copy(self._words[group], source, self._words[group], target, sizes[group])
        for group, host, block in batch.swap_in:
            _copy(self._host_words[group], host, self._words[group], block, sizes[group])

    def forward(self, batch: StepBatch) -> list[int]:
        """Write the step's words into the cache. Returns a hash per sample position: it covers everything that the
        position attends to."""
        tags = np.array([row.tag & _MASK if row is not None else 0 for row in batch.sampling], dtype=np.uint64)
        lengths = np.diff(batch.cu_seqlens)
        tags = np.repeat(tags, lengths)
        if batch.adapters is not None:
            tags ^= np.array([self.adapter_tags[each] if each else 0 for each in batch.adapters.tolist()], np.uint64)
        tokens = batch.token_ids.astype(np.uint64)
        for index, count, key, row in batch.image_rows:
            tokens[index : index + count] = [image_word(self.image_tags[key], row + each) for each in range(count)]
        first = _first_words(tokens, batch.positions, tags)
        for _, words, mapping in self._positional(batch):
            words[0, mapping] = first
        self._states.clear()
        for row in range(len(batch.seq_lens)):
            self._row(batch, row, first)
        ends = zip(batch.sample_rows.tolist(), batch.sample_lengths.tolist(), strict=True)
        return [self._seen(batch, row, length) for row, length in ends]

    def sample(self, hidden: list[int], batch: StepBatch, masks: Masks | None = None) -> SampledTokens:
        """One token per sample position. It depends on what the position attends to, and on the row's history, sampling
        parameters and mask."""
        return sample_rows(batch, masks, lambda places, part, masks: self.draw(hidden[places], part, masks))

    def draw(self, hidden: list[int], batch: StepBatch, masks: Masks | None) -> SampledTokens:
        """Sample the sample positions of ``batch``; ``hidden`` has a hash for each of them."""
        tokens = SampledTokens([])
        places = zip(hidden, batch.sample_rows.tolist(), batch.histories, strict=True)
        for index, (seen, row, history) in enumerate(places):
            allowed = range(self.vocab_size) if masks is None or index not in masks else _allowed_ids(masks[index])
            if allowed:
                choice = _next_token(seen, history.tolist(), batch.sampling[row], len(allowed))
                tokens.token_ids.append(allowed[choice])
            else:
                tokens.token_ids.append(-1)
                tokens.errors[index] = shaped_reason(-math.inf)
        return tokens

    def _row(self, batch: StepBatch, row: int, first: _Words) -> None:
        start, end = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        length = int(batch.seq_lens[row])
        begin = length - (end - start)
        seen: _Words = np.zeros(end - start, dtype=np.uint64)
        for group, _, _ in self._positional(batch):
            seen += self._attend(batch, group, row, 0, begin, length)
        for group in self._recurrent:
            seen += self._advance(batch, group, row, 0, first[start:end])
        second = _mix(first[start:end] ^ seen)
        for _, words, mapping in self._positional(batch):
            words[1, mapping[start:end]] = second
        last = [self._advance(batch, group, row, 1, second) for group in self._recurrent]
        for place in range(end - start):
            self._states[row, begin + place + 1] = sum(int(words[place]) for words in last)

    def _positional(self, batch: StepBatch) -> list[tuple[int, _Words, npt.NDArray[np.int64]]]:
        """(group index, the step's words, index where each word is stored), for each group that stores KV positions."""
        groups = [group for group in range(len(self._words)) if group not in self._recurrent]
        return [(group, self._words[group], batch.slot_mapping[group]) for group in groups]

    def _advance(self, batch: StepBatch, group: int, row: int, layer: int, words: _Words) -> _Words:
        """Mix ``words``, one per token of the row, into the row's state. Returns the state after each token."""
        start, end = int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])
        states = self._words[group]
        begin = int(batch.positions[start])
        state = 0
        if begin:
            entry = (begin - 1) // (self.cache_groups[group].state_span or 1)
            state = int(states[layer, batch.block_tables[group][row, entry]])
        behind = []
        for word, block in zip(words.tolist(), batch.slot_mapping[group][start:end].tolist(), strict=True):
            state = _mix_one(state * _STATE + word & _MASK)
            states[layer, block] = state
            behind.append(state)
        return np.array(behind, dtype=np.uint64)

    def _seen(self, batch: StepBatch, row: int, length: int) -> int:
        """Hash of everything that token ``length - 1`` of the row attends to."""
        words = [self._attend(batch, group, row, 1, length - 1, length)[0] for group, _, _ in self._positional(batch)]
        return (sum(int(word) for word in words) + self._states[row, length]) & _MASK

    def _attend(self, batch: StepBatch, group: int, row: int, layer: int, begin: int, end: int) -> _Words:
        """For each position in [begin, end), the weighted sum of the words that it attends to, read through the block
        table."""
        window = self.cache_groups[group].window
        low = 0 if window is None else max(0, begin - window + 1)
        size = self._block_size
        blocks = batch.block_tables[group][row, low // size : -(-end // size)].astype(np.int64)
        places = (blocks[:, None] * size + self._offsets).ravel()[low % size : low % size + end - low]
        sums = np.cumsum(self._words[group][layer, places] * self._powers[low:end])
        upto = sums[begin - low :]
        if window is None:
            return upto
        behind = np.zeros_like(upto)
        gone = np.arange(begin, end) - window - low  # last position, relative to low, that is out of reach
        behind[gone >= 0] = sums[gone[gone >= 0]]
        return np.asarray(upto - behind)


def _allowed_ids(bits: npt.NDArray[np.uint32]) -> list[int]:
    ids: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return ids


def _copy(source: _Words, block: int, target: _Words, to: int, size: int) -> None:
    target[:, to * size : (to + 1) * size] = source[:, block * size : (block + 1) * size]


def image_word(tag: int, row: int) -> int:
    """64 bits that stand for a row of a tile, in the place of a token id. ``tag`` identifies the tile."""
    return _mix_one((tag + row * _STATE) & _MASK)


def _first_words(tokens: _Words, positions: npt.NDArray[np.int32], tags: _Words) -> _Words:
    places = positions.astype(np.uint64)
    return _mix(
        (tokens + np.uint64(1)) * np.uint64(_TOKEN)
        ^ (places + np.uint64(1)) * np.uint64(_PLACE)
        ^ tags * np.uint64(_TAG)
    )


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_one(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def _next_token(seen: int, history: list[int], row: SamplingRow, num_choices: int) -> int:
    params = row.params
    settings = (row.seed, row.num_prompt_tokens, *(getattr(params, name) for name in DRAWN))
    counts = sum(history[row.num_prompt_tokens :]) if params.presence_penalty or params.frequency_penalty else 0
    return _mix_one((seen ^ hash(settings) ^ counts * _TOKEN) & _MASK) % num_choices


def reference_tokens(
    prompt: Sequence[int],
    row: SamplingRow,
    windows: Sequence[int | None],
    vocab_size: int,
    count: int,
    allowed: Callable[[int], Sequence[int] | None] = lambda position: None,
) -> list[int]:
    """The first ``count`` tokens that HashLM generates for a prompt served alone, computed without blocks, batch or
    numpy.

    ``windows`` has one entry per cache group: :data:`STATE` for recurrent states. ``allowed`` is a function from a
    position to the token ids that the mask allows there, ascending; None if there is no mask.
    """
    tokens = list(prompt)
    first: list[int] = []
    second: list[int] = []
    generated: list[int] = []
    powers = [pow(_BASE, i + 1, 1 << 64) for i in range(len(prompt) + count)]
    while len(generated) < count:
        for place in range(len(first), len(tokens)):
            word = ((tokens[place] + 1) * _TOKEN & _MASK) ^ ((place + 1) * _PLACE & _MASK)
            first.append(_mix_one(word ^ (row.tag * _TAG & _MASK)))
            second.append(_mix_one(first[place] ^ _reach(first, powers, place, windows)))
        seen = _reach(second, powers, len(tokens) - 1, windows)
        choices = allowed(len(tokens)) or range(vocab_size)
        generated.append(choices[_next_token(seen, tokens, row, len(choices))])
        tokens.append(generated[-1])
    return generated


def _reach(words: list[int], powers: list[int], place: int, windows: Sequence[int | None]) -> int:
    total = 0
    for window in windows:
        if window == STATE:
            total += _state(words[: place + 1])
            continue
        low = 0 if window is None else max(0, place - window + 1)
        total += sum(words[i] * powers[i] for i in range(low, place + 1))
    return total & _MASK


def _state(words: list[int]) -> int:
    """Recurrent state of HashLM after it has read all tokens, which have these ``words``."""
    state = 0
    for word in words:
        state = _mix_one(state * _STATE + word & _MASK)
    return state
