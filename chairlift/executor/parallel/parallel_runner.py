"""Model runners of the processes that share a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.native.sampling_rows import NativeRows
from chairlift.executor.executor import OnProgress, WeightSource
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.parallel.messages import MessageKind, Messages, message_bytes
from chairlift.kernels.cpu.communicator import Communicator
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.cpu.packing import PackedMatrix
from chairlift.models.causal_lm import CausalLM

__all__ = ["ParallelRunner", "RankRunner"]


class _Closing(Protocol):
    def close(self) -> None: ...


class RankRunner(NativeModelRunner):
    """Runs the part of one process. ``plan`` is that of the heads that the process keeps. All processes must have the
    same sizes. Sampling takes place in process 0, which is a :class:`ParallelRunner`."""

    def __init__(
        self,
        model: CausalLM,
        plan: KVPlan,
        dtype: torch.dtype,
        pool: ThreadPool,
        comm: Communicator,
        *,
        isa: str,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        super().__init__(model, plan, dtype, pool, isa=isa, max_tokens=max_tokens, comm=comm)
        self._comm = comm
        self._messages = Messages(comm, message_bytes(max_tokens, max_rows, max_model_len, plan))
        self._shared_logits = comm.tensor(torch.float32, self._scratch_shape())
        """[rows, V rounded up to 32]: each process writes the columns of its part of the vocabulary."""

    def serve(self) -> None:
        """In another process than number 0: do what messages ask for, until one asks to end. Raises EngineDeadError if
        another process ended."""
        hidden: Any = None
        while True:
            message = self._messages.receive()
            if message.kind == MessageKind.FORWARD:
                hidden = self.program.run(message.batch(), message.arrays[-1])
            elif message.kind == MessageKind.HEAD:
                self._write_logits(hidden, message.arrays[0])  # type: ignore[arg-type]
            elif message.kind == MessageKind.MOVE:
                super().move_blocks(message.moves())
            else:
                return

    def end(self) -> None:
        """End every wait of all processes."""
        self._comm.end()

    def _write_logits(self, hidden: Tensor, token_rows: npt.NDArray[np.int32]) -> None:
        """Write the logits of this process's part of the vocabulary, and wait for those of the others."""
        self.program.logits(self._head_weight, hidden, token_rows, self._shared_logits, self._cap)
        self._comm.meet()


class ParallelRunner(RankRunner):
    """The runner of process 0: it sends each step to the other processes, computes its own part, and samples."""

    processes: _Closing | None = None
    """The other processes, if they belong to this runner."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.blocks = None  # type: ignore[assignment]  # this process has a part of each block

    @property
    def repeats(self) -> bool:
        """False: the other processes may have computed the step that failed here."""
        return False

    def move_blocks(self, batch: StepBatch) -> None:
        with self._together():
            self._messages.send_moves(batch)
            super().move_blocks(batch)

    def forward(self, batch: StepBatch) -> Tensor:
        with self._together():
            self._messages.send_forward(batch, self._needed(batch))
            return super().forward(batch)

    def _head(
        self,
        hidden: Tensor,
        token_rows: npt.NDArray[np.int32],
        rows: NativeRows,
        head: PackedMatrix | None = None,
        adapters: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Sample the rows ``token_rows`` of ``hidden``, which is the result of :meth:`forward`."""
        logits = self._shared_logits.numpy()
        for start in range(0, len(token_rows), len(logits)):
            these = np.ascontiguousarray(token_rows[start : start + len(logits)])
            with self._together():
                self._messages.send_head(these)
                self._write_logits(hidden, these)
            index = np.arange(start, start + len(these))
            part = rows.part(index)
            self.program.sample(logits[: len(these)], self._vocab_size, part.records)
            rows.records[index] = part.records

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        raise ConfigError(
            f"tensor_parallel_size is {self._comm.size}, and weights of such a model cannot be replaced yet; load the"
            " new ones instead"
        )

    def collective_seconds(self) -> float:
        """Seconds that this process has waited for the others."""
        return self._comm.waited

    @property
    def meetings(self) -> int:
        """Number of times that the processes have met."""
        return self._comm.meetings

    def shutdown(self) -> None:
        """End the other processes."""
        with contextlib.suppress(EngineDeadError):
            self._messages.send_stop()
        if self.processes is not None:
            self.processes.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Within this context the other processes compute, too. An error here ends all of them, because they would wait
        for this process. Raises EngineDeadError."""
        try:
            yield
        except EngineDeadError:
            raise
        except BaseException as error:
            self._comm.end()
            raise EngineDeadError(
                f"a step failed in process 0 of {self._comm.size} ({type(error).__name__}: {error}), and the others"
                " may have computed it; the model must be loaded again"
            ) from error
