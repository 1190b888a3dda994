"""Model runners of the processes that share a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.config import LoRAConfig
from chairlift.errors import ConfigError, EngineDeadError, InvariantError
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.native.sampling_rows import NativeRows
from chairlift.executor.executor import OnProgress, WeightSource
from chairlift.executor.kv_tensors import KVPlan
from chairlift.executor.parallel.messages import MessageKind, Messages, message_bytes
from chairlift.executor.parallel.orders import Orders
from chairlift.executor.parallel.parallel_adapters import ParallelAdapters
from chairlift.executor.parallel.process_memory import ProcessMemory, memory_notes
from chairlift.kernels.cpu.communicator import Communicator
from chairlift.kernels.cpu.library import ThreadPool
from chairlift.kernels.cpu.packing import PackedMatrix
from chairlift.lora.held import Held
from chairlift.models.causal_lm import CausalLM
from chairlift.models.loader import replace_weights

__all__ = ["ParallelRunner", "RankRunner"]


class _Processes(Protocol):
    @property
    def memory(self) -> list[ProcessMemory]: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


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
        lora: LoRAConfig | None = None,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        how: dict[str, Any] = {"isa": isa, "max_tokens": max_tokens, "comm": comm}
        super().__init__(model, plan, dtype, pool, lora=lora, logprobs_mode=logprobs_mode, **how)
        self._comm = comm
        self.held: dict[int, Held] = {}
        """Key -> adapter that this process has read, and that is not in memory yet."""
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
                self._write_logits(hidden, *message.arrays)  # type: ignore[arg-type]
            elif message.kind == MessageKind.MOVE:
                super().move_blocks(message.moves())
            elif message.kind == MessageKind.STOP:
                return
            else:
                self._keep_adapter(message.kind, message.numbers())

    def read_adapter(self, key: int, path: Path, root: Path | None) -> Held:
        """In another process than number 0: read an adapter, for a later ADAPTER message with its ``key``. Raises
        ModelLoadError."""
        if self.adapters is None:
            raise InvariantError("this process serves no adapters")
        self.held[key] = self.adapters.read(path, root)
        return self.held[key]

    def check_weights(self, path: str) -> None:
        """Check new weights, and replace nothing. Raises ModelLoadError."""
        replace_weights(self._model, path, writes=False)

    def _keep_adapter(self, kind: MessageKind, numbers: list[int]) -> None:
        if self.adapters is None:
            raise InvariantError("this process serves no adapters")
        if kind == MessageKind.ADAPTER:
            self.adapters.put(numbers[0], self.held.pop(numbers[1]))
        else:
            self.adapters.drop(numbers[0])

    def end(self) -> None:
        """End every wait of all processes."""
        self._comm.end()

    def _write_logits(
        self, hidden: Tensor, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[Any] | None
    ) -> None:
        """Write the logits of this process's part of the vocabulary, and wait for those of the others."""
        self.program.logits(self._head_weight, hidden, token_rows, self._shared_logits, self._cap, adapters)
        self._comm.meet()


class ParallelRunner(RankRunner):
    """The runner of process 0: it sends each step to the other processes, computes its own part, and samples."""

    heartbeat = 1.0
    """Seconds between two calls of :meth:`check_processes` while no steps are computed."""
    processes: _Processes | None = None
    """The other processes, if they belong to this runner."""
    _orders: Orders | None = None

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
            own = None if adapters is None else np.ascontiguousarray(adapters[start : start + len(logits)])
            self._share_logits(hidden, these, own)
            index = np.arange(start, start + len(these))
            part = rows.part(index)
            self.program.sample(logits[: len(these)], self._vocab_size, part.records)
            rows.records[index] = part.records

    def _logits_at(
        self, hidden: Tensor, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.float32]:
        self._share_logits(hidden, np.ascontiguousarray(token_rows), adapters)
        found: npt.NDArray[np.float32] = self._shared_logits.numpy()[: len(token_rows), : self._vocab_size].copy()
        return found

    def _share_logits(
        self, hidden: Tensor, token_rows: npt.NDArray[np.int32], adapters: npt.NDArray[Any] | None
    ) -> None:
        """Have all processes write their logits of some rows, at most as many as the shared logits have."""
        with self._together():
            self._messages.send_head(token_rows, adapters)
            self._write_logits(hidden, token_rows, adapters)

    def use_orders(self, orders: Orders) -> None:
        """Let the other processes obey ``orders``, and read adapters in all of them."""
        self._orders = orders
        if self.adapters is not None:
            self.adapters = ParallelAdapters(self.adapters, self._messages, orders)  # type: ignore[assignment]

    def update_weights(self, source: WeightSource, progress: OnProgress | None = None) -> None:
        """Replace the weights of all processes by those in a directory, which each process reads. No process replaces
        anything before the others have checked the directory."""
        if not isinstance(source, str | Path) or self._orders is None:
            raise ConfigError(
                f"tensor_parallel_size is {self._comm.size}, and each process reads its part of new weights itself,"
                " from a directory; save them to one, in place of weights in memory"
            )
        path = str(Path(source).absolute())
        self._orders.give({"do": "check weights", "path": path}, between_steps=True)
        super().update_weights(source, progress)
        with self._together("new weights were refused"):
            self._orders.give({"do": "weights", "path": path}, between_steps=True)

    def check_processes(self) -> None:
        """Raise EngineDeadError if another process has ended, or hangs. Call it between two steps."""
        with self._together():
            self._comm.look()

    def describe_processes(self) -> list[str]:
        """Text for the user about the memory of each process."""
        return [] if self.processes is None else [each.words() for each in self.processes.memory]

    def notes(self) -> list[str]:
        """Notes for the user about memory nodes that are too small."""
        return [] if self.processes is None else memory_notes(self.processes.memory)

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
    def _together(self, what: str = "a step failed in process 0") -> Iterator[None]:
        """Within this context the other processes compute, too. An error here ends all of them, because they would wait
        for this process, or would no longer have the state that it has. ``what`` says what an error means. Raises
        EngineDeadError."""
        try:
            yield
        except EngineDeadError:
            if self.processes is not None:
                self.processes.kill()  # none of them has anything to lose, and one may hang
            raise
        except BaseException as error:
            self._comm.end()
            raise EngineDeadError(
                f"tensor_parallel_size is {self._comm.size}, and {what} ({type(error).__name__}: {error}), while other"
                " processes may have gone on; the model must be loaded again"
            ) from error
