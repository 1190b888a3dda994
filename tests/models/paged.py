"""Runs a model over a paged KV cache without the engine: a minimal executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import LayerCache, LayerState, PackedContext, PagedContext
from chairlift.models.fallback.model import TransformersLM

__all__ = ["PagedRunner", "packed_logits"]

STATE = 0
"""Marks a group of recurrent states in the list of the groups' windows."""
_NO_BLOCK = 10**9
"""Block id in table entries that must not be read. Reading such an entry raises an index error instead of silently
returning zeros."""


class PagedRunner:
    """Runs steps over sequences that have names. Blocks are allocated in random order; unused memory is NaN.

    There is one cache group per distinct window, each with its own pool and tables. In a group with a window, blocks
    before the window are removed from the table before each step. If the model has recurrent states, they form one more
    group: a block holds one state, and a table entry covers ``state_span`` positions.
    """

    def __init__(
        self,
        model: CausalLM | TransformersLM,
        block_size: int,
        *,
        num_blocks: int = 128,
        max_len: int = 128,
        seed: int = 0,
        state_span: int | None = None,
    ):
        self.model = model
        self.block_size = block_size
        spec = model.kv_cache_spec()
        kinds = [layer.window if isinstance(layer, LayerCache) else STATE for layer in spec]
        self.windows = list(dict.fromkeys(kinds))
        self.layer_groups = [self.windows.index(kind) for kind in kinds]
        self.state_spans = [(state_span or 2 * block_size) if window == STATE else None for window in self.windows]
        dtype = model.dtype if isinstance(model, TransformersLM) else model.model.embed_tokens.weight.dtype
        self.kv_caches: list[tuple[Tensor, ...]] = []
        for layer in spec:
            if isinstance(layer, LayerState):
                parts = [torch.full((num_blocks, *p.shape), float("nan"), dtype=p.dtype or dtype) for p in layer.parts]
                self.kv_caches.append(tuple(parts))
                continue
            shape = (num_blocks, block_size, layer.num_kv_heads)
            widths = (layer.head_dim, layer.value_dim or layer.head_dim)
            keys, values = (torch.full((*shape, width), float("nan"), dtype=dtype) for width in widths)
            self.kv_caches.append((keys, values))
        generator = torch.Generator().manual_seed(seed)
        self.free = [torch.randperm(num_blocks, generator=generator).tolist() for _ in self.windows]
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.max_blocks = -(-max_len // block_size)

    def step(self, rows: Sequence[tuple[str, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to each named sequence in one flat batch; returns the logits [n, V] of each row."""
        cu_seqlens, seq_lens = [0], []
        positions: list[int] = []
        for name, new in rows:
            tokens = self.tokens.setdefault(name, [])
            positions += range(len(tokens), len(tokens) + len(new))
            tokens += new
            cu_seqlens.append(cu_seqlens[-1] + len(new))
            seq_lens.append(len(tokens))
        block_tables, slot_mapping = [], []
        for group in range(len(self.windows)):
            table, slots = self._place(group, rows)
            block_tables.append(table)
            slot_mapping.append(slots)
        places = torch.stack(block_tables), torch.stack(slot_mapping)
        ctx = PagedContext(cu_seqlens, seq_lens, *places, self.kv_caches, self.layer_groups, self.state_spans)
        flat = torch.tensor([token for _, new in rows for token in new])
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(flat, torch.tensor(positions), ctx))
        return list(torch.split(logits, [len(new) for _, new in rows]))

    def _place(self, group: int, rows: Sequence[tuple[str, Sequence[int]]]) -> tuple[Tensor, Tensor]:
        table = torch.full((len(rows), self.max_blocks), _NO_BLOCK)
        slots: list[int] = []
        span, window = self.state_spans[group] or self.block_size, self.windows[group]
        reach = 2 if window == STATE else window
        for i, (name, new) in enumerate(rows):
            blocks = self.tables.setdefault(name, [[] for _ in self.windows])[group]
            length = len(self.tokens[name])
            while len(blocks) * span < length:
                blocks.append(self.free[group].pop())
            first = 0 if reach is None else max(0, length - len(new) - reach + 1) // span
            table[i, first : len(blocks)] = torch.tensor(blocks[first:])
            for position in range(length - len(new), length):
                slots.append(blocks[position // span] * span + position % span)
        return table, torch.tensor(slots)


def packed_logits(model: CausalLM, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [n, V] of whole sequences that are computed in one pack."""
    cu_seqlens = [0]
    for sequence in sequences:
        cu_seqlens.append(cu_seqlens[-1] + len(sequence))
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    with torch.no_grad():
        logits = model.compute_logits(model(flat, positions, PackedContext(cu_seqlens)))
    return list(torch.split(logits, [len(sequence) for sequence in sequences]))
