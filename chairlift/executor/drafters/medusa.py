"""Medusa: heads on the model's last hidden state; each head guesses a token further ahead (Cai et al., 2024).

The model's own output head draws the next token from the hidden state of the newest known token. Head 0 guesses the
token after that one, head 1 the token after head 0's, and so on, all from the same hidden state. The drafts of a row
form a single chain (not a tree): each head gives the one token that it draws with the request's parameters and noise.

The files are those that Medusa publishes: ``medusa_num_heads`` and ``medusa_num_layers`` in ``config.json``. The blocks
of a head compute x + SiLU(Wx + b), with ``{head}.{layer}.linear.weight`` and ``.bias``; ``{head}.{layers}.weight`` is
the head's output matrix. With ``original_lm_head``, a key of vLLM's, all heads use the output matrix of the model
instead.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.spec_decode.upkeep import Upkeep
from chairlift.errors import InvariantError, ModelLoadError
from chairlift.executor.drafters.drafting import DraftTimes, drawing_batch, take_rows
from chairlift.executor.drafters.runner import DraftRunner
from chairlift.executor.drafters.source import DraftSource, Served
from chairlift.kernels import ops
from chairlift.kernels.recording import Value
from chairlift.kernels.weights import MatrixShape, WeightFormat

__all__ = ["MedusaHead", "MedusaHeads", "load_drafts", "load_medusa"]

_FILES: Final = ("medusa_lm_head.safetensors", "model.safetensors")
_MAX_HEADS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class MedusaHead:
    """Weights of one Medusa head."""

    blocks: Sequence[tuple[Tensor, Tensor]]
    """(weight [D, D], bias [D]) of each block of the head, in float32."""
    head: Any
    """Output matrix [V, D] of the head, in the backend's format; None: the head uses the model's output matrix."""


class MedusaHeads:
    """Makes drafts for decoding requests. See :class:`~chairlift.core.spec_decode.adaptive.Proposer`.

    Args:
        heads: Heads in the order of the positions that they guess.
        runner: Runner of the served model.
        num_slots: Number of rows of the engine.
        weight_format: Format in which the backend multiplies with the blocks' matrices.
    """

    def __init__(
        self, heads: Sequence[MedusaHead], runner: DraftRunner, num_slots: int, weight_format: WeightFormat
    ) -> None:
        self._runner = runner
        self.most = len(heads)
        self._outputs = [head.head for head in heads]
        self._shared = all(output is None for output in self._outputs)
        self._blocks = _Blocks(heads, runner, num_slots, weight_format)
        self._newest: tuple[Tensor, StepBatch, Sequence[int]] | None = None
        """The newest step with sampled tokens: (hidden states, the step, sampled tokens). The next step overwrites
        them."""
        self._tokens: np.ndarray = np.zeros((num_slots, 0), dtype=np.int32)
        """Token ids [slots, positions] of every slot: the engine's own array. Drafts are written after the known
        tokens."""
        self._times = DraftTimes()
        self.upkeep = Upkeep()  # there is no upkeep, so it stays on
        self.sleeps = False

    def follow(self, out: SchedulerOutput, batch: StepBatch) -> None:
        """Do nothing: the heads need only the hidden states that :meth:`saw` gets."""

    def saw(self, hidden: Tensor, batch: StepBatch, token_ids: Sequence[int]) -> None:
        """Note the newest step. Its hidden states are read only if the next step gets drafts."""
        self._tokens = batch.tokens
        self._newest = (hidden, batch, token_ids)

    def _places(self) -> dict[int, int]:
        """Slot -> index of the hidden state from which the slot's newest token was sampled, for rows of the newest
        step. For a row with drafts it is the hidden state of its last accepted draft."""
        if self._newest is None:
            return {}
        _, batch, token_ids = self._newest
        places = self._runner.sample_places(batch).tolist()
        found = dict(zip(batch.sample_slots.tolist(), places, strict=True))
        for first, slot, chunk in batch.verifies:
            found[slot] = places[first + chunk.num_accepted(token_ids[first : first + chunk.samples])]
        return found

    def _states_at(self, places: Sequence[int]) -> Tensor:
        """Hidden states ``places`` of the newest step, [R, D] in the model's dtype."""
        if self._newest is None:
            raise InvariantError("hidden states are read before the first step")
        return take_rows(self._newest[0], places)

    def seconds(self, num_rows: int) -> float:
        """Expected seconds in which one draft for each of ``num_rows`` rows is made; 0 before the first drafts."""
        return self._times.seconds(num_rows)

    def propose(self, rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Drafts for each row: one per Medusa head, and at most the number given with the row. A row that the newest
        step did not compute gets none."""
        begin = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in rows]
        places = self._places()
        computed = [index for index, (request, limit) in enumerate(rows) if request.slot in places and limit > 0]
        if computed:
            made = self._drafts([rows[index] for index in computed], places)
            for index, tokens in zip(computed, made, strict=True):
                drafts[index] = tokens
        if number := max(map(len, drafts), default=0):
            self._times.note(len(computed), (time.perf_counter() - begin) / number)
        return drafts

    def _drafts(self, rows: Sequence[tuple[Request, int]], places: Mapping[int, int]) -> list[list[int]]:
        """Drafts for each row; ``places`` is the result of :meth:`_places`."""
        drafts: list[list[int]] = [[] for _ in rows]
        slots = np.array([request.slot for request, _ in rows], dtype=np.int32)
        known = np.array([len(request.token_ids) for request, _ in rows], dtype=np.int32)
        sampling = [request.sampling for request, _ in rows]
        numbers = range(min(self.most, max(limit for _, limit in rows)))
        states = self._blocks.run(self._states_at([places[request.slot] for request, _ in rows]), len(numbers))
        together = self._shared and not any(_reads_history(request) for request, _ in rows)
        for part in [numbers] if together else [range(number, number + 1) for number in numbers]:
            drawn = self._draw(part, states[part.start : part.stop], slots, known, sampling)
            for at, token in enumerate(drawn):
                number = part[at // len(rows)]
                row = at % len(rows)
                if len(drafts[row]) == number < rows[row][1] and token >= 0:
                    drafts[row].append(token)
                    self._tokens[slots[row], known[row] + number] = token
        return drafts

    def forget(self, request: Request) -> None:
        """Do nothing: the next request in the slot gets its own hidden state."""

    def _draw(
        self, numbers: range, states: Tensor, slots: np.ndarray, known: np.ndarray, sampling: list[object]
    ) -> list[int]:
        """One token per head and row, head by head, sampled with the noise of the token's position; -1 if no token
        could be sampled. ``states`` [heads, R, D] are the results of the heads' blocks. Several ``numbers`` are allowed
        only if the heads use the same output matrix."""
        if len(numbers) > 1:
            slots = np.tile(slots, len(numbers))
            sampling = sampling * len(numbers)
        lengths = np.concatenate([known + number for number in numbers])
        lengths = np.minimum(lengths, self._tokens.shape[1] - 1)
        batch = drawing_batch(self._tokens, slots, lengths, sampling)
        return self._runner.draw(states.flatten(0, 1), batch, self._outputs[numbers[0]])


class _Blocks:
    """The blocks of all heads as a step program.

    Args:
        heads: The heads; all have the same number of blocks.
        runner: Runner of the served model.
        max_rows: Maximum number of rows in a call.
        weight_format: Format of the blocks' matrices.
    """

    def __init__(
        self, heads: Sequence[MedusaHead], runner: DraftRunner, max_rows: int, weight_format: WeightFormat
    ) -> None:
        blocks = [block for head in heads for block in head.blocks]
        shapes = [MatrixShape(*weight.shape) for weight, _ in blocks]
        packed = iter(weight_format.empty(shapes, runner.dtype, torch.device("cpu")))
        recorder: Any = runner.recorder()
        given = recorder.given(shapes[0].in_features)
        made = list[Value]()
        for head in heads:
            state = given
            for (weight, bias), matrix in zip(head.blocks, packed, strict=False):
                weight_format.write(matrix, 0, weight, mapped=False)
                weight_format.finish(matrix, bias)
                state = state + ops.silu(weight_format.linear(state, matrix, bias))
            made.append(state)
        self._made = made
        self._dtype = runner.dtype
        self._program = runner.program_of(recorder, made[-1], max_rows, made[:-1])
        # Rows as bytes of numpy arrays. Copies in torch would start threads that spin on the model's processors.
        self._given, *self._results = (
            self._program.rows_of(value, max_rows).view(torch.uint8).numpy() for value in (given, *made)
        )
        self._batches: dict[int, StepBatch] = {}
        """Number of rows -> batch of that many rows. The program uses only its size."""

    def run(self, states: Tensor, count: int) -> Tensor:
        """Results [``count``, R, D] of the blocks of the first ``count`` heads, for hidden states [R, D]. Both are in
        the model's dtype."""
        rows = len(states)
        if rows not in self._batches:
            every = np.zeros(rows, dtype=np.int32)
            self._batches[rows] = drawing_batch(every[:, None], every, every, [])
        self._given[:rows] = states.view(torch.uint8).numpy()
        self._program.run_until(self._made[count - 1], self._batches[rows])
        made = np.stack([result[:rows] for result in self._results[:count]])
        return torch.from_numpy(made).view(self._dtype)


def _reads_history(request: Request) -> bool:
    """Whether the token that a head samples can depend on the row's earlier tokens, including drafts (by penalties, for
    example)."""
    params = request.params
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalties or params.bad_words)


def load_drafts(folder: Path, served: Served) -> DraftSource:
    """Read Medusa's heads in ``folder``. Raises ConfigError and ModelLoadError."""
    network = served.native
    weight_format = served.backend.weight_format(None)
    heads = load_medusa(folder, network.vocab_size, network.hidden_size, served.dtype, weight_format)

    def make(runner: DraftRunner, *, num_slots: int, **sizes: int) -> MedusaHeads:
        return MedusaHeads(heads[: served.most], runner, num_slots, weight_format)

    return DraftSource(make=make)


def load_medusa(
    folder: Path, vocab_size: int, hidden_size: int, dtype: torch.dtype, weight_format: WeightFormat
) -> list[MedusaHead]:
    """Read Medusa's heads for a model with this vocabulary size, hidden size and dtype. If heads have output matrices,
    these are in ``weight_format``. Raises ModelLoadError."""
    count, layers, shares = _sizes(folder)
    found = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if found is None:
        raise ModelLoadError(
            f"{folder} has none of {', '.join(_FILES)}; heads in other files, such as medusa_lm_head.pt, are pickled"
            " and not read: convert them to safetensors"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(count):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden_size, hidden_size)
            shapes[f"{head}.{layer}.linear.bias"] = (hidden_size,)
        if not shares:
            shapes[f"{head}.{layers}.weight"] = (vocab_size, hidden_size)
    try:
        with safe_open(found, "pt") as file:
            names_given = list(file.keys())
            _check(found, {name: tuple(file.get_slice(name).get_shape()) for name in names_given}, shapes)
            own = [] if shares else [MatrixShape(vocab_size, hidden_size)] * count
            packed = weight_format.empty(own, dtype, torch.device("cpu")) if own else [None] * count
            heads: list[MedusaHead] = []
            for head, matrix in enumerate(packed):
                if matrix is not None:
                    weight_format.write(matrix, 0, file.get_tensor(f"{head}.{layers}.weight"), mapped=False)
                names = [f"{head}.{layer}.linear" for layer in range(layers)]
                parts = [(file.get_tensor(f"{name}.weight"), file.get_tensor(f"{name}.bias")) for name in names]
                heads.append(MedusaHead([(weight.float(), bias.float()) for weight, bias in parts], matrix))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{found} cannot be read: {error}") from None
    return heads


def _sizes(folder: Path) -> tuple[int, int, bool]:
    """(number of heads, number of blocks per head, whether they use the model's output matrix)."""
    path = folder / "config.json"
    if not path.is_file():
        found = "is a file" if folder.is_file() else "has no config.json"
        raise ModelLoadError(f"{folder} {found}; give the directory of the Medusa heads, with config.json and weights")
    try:
        config = json.loads(path.read_text())
        sizes = [config["medusa_num_heads"], config["medusa_num_layers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} does not say how many Medusa heads there are: {error!r:.200}") from None
    for name, size in zip(("medusa_num_heads", "medusa_num_layers"), sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_HEADS:
            raise ModelLoadError(f"{path}: {name} must be a whole number from 1 to {_MAX_HEADS}, got {size!r:.80}")
    shares = config.get("original_lm_head", False)
    if not isinstance(shares, bool):
        raise ModelLoadError(f"{path}: original_lm_head must be true or false, got {shares!r:.80}")
    return sizes[0], sizes[1], shares


def _check(path: Path, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelLoadError unless ``found`` (tensor name -> shape in the file) equals ``expected``."""
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelLoadError(f"{path} lacks {missing[0]!r} ({len(missing)} tensors in all); is config.json its own?")
    if surplus := sorted(found.keys() - expected.keys()):
        raise ModelLoadError(f"{path} has {surplus[0]!r}, which Medusa heads have not ({len(surplus)} in all)")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(
                f"{path}: {name} has shape {list(found[name])}, and this model needs {list(shape)}; use heads that were"
                " trained for it"
            )
