"""HashLM as a served model: ``--model hashlm`` generates text that a test can compute itself.

Clients see a normal model: it has tokens (one per byte, then special ones), a chat template, an end of sequence and
log-probabilities. ``hashlm:5ms`` takes 5 ms per step, like a slow model. ``hashlm:seed=7`` is another model: it
generates other tokens for each seed. The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.base.step_batch import Masks, PromptLogprobs, SampledTokens, StepBatch
from chairlift.config import CacheGroup, EngineConfig
from chairlift.errors import ConfigError
from chairlift.models.hashlm import HASHLM_POSITION_BYTES, HashLM

__all__ = [
    "HASHLM_EOS",
    "HASHLM_TEMPLATE",
    "HASHLM_TOKENS",
    "HASHLM_VOCAB_SIZE",
    "NUM_BLOCKS",
    "HashLMServed",
    "ServedHashLM",
    "hashlm_runner",
    "logprobs_of",
    "parse_hashlm",
]

HASHLM_TOKENS: Final = ("<|im_start|>", "<|im_end|>", "<|bos|>")
"""Special tokens of HashLM. Their ids follow the ids of the 256 byte tokens."""
HASHLM_VOCAB_SIZE: Final = 256 + len(HASHLM_TOKENS)
HASHLM_EOS: Final = 256 + HASHLM_TOKENS.index("<|im_end|>")
HASHLM_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SEED: Final = 0x9E3779B97F4A7C15 >> 31
"""Factor of the seed. The product stays below 64 bits."""
_MAX_MODEL_LEN: Final = 4096
NUM_BLOCKS: Final = 4096
"""Number of blocks of HashLM's cache if no setting says it."""
_NAME: Final = re.compile(r"hashlm(?::([0-9]{1,5}(?:\.[0-9]{1,3})?)ms)?(?::seed=([0-9]{1,9}))?")


def parse_hashlm(name: str) -> float | None:
    """Seconds per step of a model called ``hashlm`` or ``hashlm:5ms``; None for the name of another model.

    Raises ConfigError for ``hashlm:`` with anything else after it.
    """
    found = _NAME.fullmatch(name)
    if found is not None:
        return float(found[1] or 0) / 1000
    if name.startswith("hashlm:"):
        raise ConfigError(
            f"model is {name!r:.80}; after 'hashlm:' comes the time per step, as in hashlm:5ms, or hashlm:5ms:seed=7"
        )
    return None


def _seed_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return 0 if found is None else int(found[2] or 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HashLMServed:
    """The model runner, and the facts about the model that the engine needs."""

    runner: ServedHashLM
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    memory_plan: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities in the sampler's form: first the entry of the sampled token, then the most likely tokens in
    descending order."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rank: int


class ServedHashLM(HashLM):
    """HashLM with one full cache group, a fixed time per step, and made-up log-probabilities (:func:`logprobs_of`)."""

    def __init__(
        self,
        group: CacheGroup,
        block_size: int,
        max_model_len: int,
        delay: float = 0.0,
        host_memory: Callable[[int], npt.NDArray[np.uint8]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__([group], block_size, HASHLM_VOCAB_SIZE, max_model_len, host_memory)
        self._delay = delay
        self._salt = seed * _SEED

    def forward(self, batch: StepBatch) -> list[int]:
        if self._delay:
            time.sleep(self._delay)
        hashes = super().forward(batch)
        return [each ^ self._salt for each in hashes] if self._salt else hashes

    def sample(self, hidden: list[int], batch: StepBatch, masks: Masks | None = None) -> SampledTokens:
        tokens = super().sample(hidden, batch, masks)
        wanted = [batch.sampling[row].params.logprobs for row in batch.sample_rows.tolist()]
        if any(count is not None for count in wanted):
            pairs = zip(tokens.token_ids, wanted, strict=True)
            tokens.logprobs = [None if count is None else logprobs_of(token, count) for token, count in pairs]
        for row, first, known in batch.prompt_rows:
            length = int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row])
            count = batch.sampling[row].params.prompt_logprobs
            entries = [logprobs_of(token, count) for token in known[first + 1 : first + 1 + length].tolist()]
            tokens.prompt_logprobs.append(PromptLogprobs(int(batch.slots[row]), first + 1, entries))
        return tokens


def logprobs_of(token: int, count: int) -> _Logprobs:
    """Fake log-probabilities: ``token`` is the most likely token, and each following id is half as likely as the one
    before."""
    ids = [(token + i) % HASHLM_VOCAB_SIZE for i in range(min(count, HASHLM_VOCAB_SIZE))]
    logprobs = np.log(np.float32(2.0)) * -np.arange(1, max(len(ids), 1) + 1, dtype=np.float32)
    return _Logprobs(np.array([token, *ids], np.int32), np.concatenate((logprobs[:1], logprobs[: len(ids)])), 1)


def hashlm_runner(
    config: EngineConfig, delay: float, host_memory: Callable[[int], npt.NDArray[np.uint8]] | None = None
) -> HashLMServed:
    """HashLM for the given settings. The defaults of ``max_model_len`` and ``num_kv_blocks`` are 4,096, and swap space
    has a tenth as many blocks, rounded up. ``host_memory`` is that of :class:`~chairlift.models.hashlm.HashLM`."""
    length = config.model.max_model_len or _MAX_MODEL_LEN
    blocks = config.cache.num_kv_blocks or NUM_BLOCKS
    size = config.cache.block_size
    tokens = (blocks - 1) * size
    chats = tokens // min(2048, length)
    swap = config.cache.swap_space_bytes
    num_host = -(-blocks // 10) if swap is None else swap // (HASHLM_POSITION_BYTES * size)
    group = CacheGroup(blocks, num_host_blocks=num_host)
    return HashLMServed(
        runner=ServedHashLM(group, size, length, delay, host_memory, _seed_of(config.model.model)),
        vocab_size=HASHLM_VOCAB_SIZE,
        max_model_len=length,
        eos_token_ids=(HASHLM_EOS,),
        memory_plan=f"KV cache: {tokens:,} tokens in blocks of {size}; room for about {chats:,} chats of "
        f"{min(2048, length):,} tokens at once; "
        + (f"swap space for {num_host * size:,} tokens of preempted requests" if num_host else "no swap space"),
    )
