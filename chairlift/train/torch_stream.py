"""A stream of packs as a PyTorch dataset, for any number of loader processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from chairlift.train.layout import Pack

if TYPE_CHECKING:
    from chairlift.train.stream import PackStream

__all__ = ["TorchPackStream"]


class TorchPackStream(IterableDataset[Pack]):
    """Packs in the stream's order for any ``num_workers``. With n loader processes each makes every n-th pack.

    Give it to a DataLoader with ``batch_size=None``, or with ``batch_size=1`` and a collator. With loader processes
    the stream in this process stands still, and its state is theirs: resume with torchdata's ``StatefulDataLoader``,
    which asks each of them for it; and let them live (``persistent_workers=True``), or every pass is the first again.
    """

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self._passed = 0  # packs since the loader began, those of other processes too
        self._workers = 1
        self._resumes = False

    def __iter__(self) -> Iterator[Pack]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        resumes, self._resumes = self._resumes, False
        if resumes and workers > 1 and self.stream.ended:
            return iter(())  # the pass has ended; the other processes do not know, but have no more of it either
        # What as many processes had handed out counts in the round; any other number begins it anew.
        if self.stream.ended or self._workers != workers:
            self._passed = 0
        self._workers = workers
        iter(self.stream)  # a pass that has ended begins again here, so that a state before its first pack says so
        return self._packs(workers, (worker - self._passed) % workers, self._passed)

    def _packs(self, workers: int, first: int, before: int) -> Iterator[Pack]:
        for number, pack in self.stream.every(workers, first):
            self._passed = before + number + 1
            yield pack

    def state_dict(self) -> dict[str, Any]:
        """The stream's own state, and where in the round of loader processes it is."""
        return {"stream": self.stream.state_dict(), "passed": self._passed, "workers": self._workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError as :meth:`~chairlift.train.stream.PackStream.load_state_dict` does."""
        self.stream.load_state_dict(state["stream"])
        self._passed, self._workers, self._resumes = int(state["passed"]), int(state["workers"]), True
