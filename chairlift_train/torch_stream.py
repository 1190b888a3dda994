"""A stream of packs as a PyTorch dataset. It works with any number of loader processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from chairlift_train.layout import Pack

if TYPE_CHECKING:
    from chairlift_train.stream import PackStream

__all__ = ["TorchPackStream"]


class TorchPackStream(IterableDataset[Pack]):
    """A dataset of packs in the order of the stream, for any ``num_workers``.

    Give it to a DataLoader with ``batch_size=None``, or with ``batch_size=1`` and a collator. With n loader processes,
    each process makes every n-th pack. The stream of the main process then does not advance, because each loader
    process has its own copy. To save and resume, use torchdata's ``StatefulDataLoader``, which collects the states of
    the loader processes. Set ``persistent_workers=True``; otherwise the processes start again at every epoch, with the
    first epoch.
    """

    def __init__(self, stream: PackStream) -> None:
        self.stream = stream
        self._passed = 0  # packs of all loader processes since the loader began
        self._workers = 1
        self._resumes = False

    def __iter__(self) -> Iterator[Pack]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        resumes = self._resumes
        self._resumes = False
        if resumes and workers > 1 and self.stream.ended:
            return iter(())  # this epoch has ended, and the other loader processes have no more packs of it either
        # The count of returned packs continues if the number of loader processes is unchanged. Otherwise it begins
        # again at 0.
        if self.stream.ended or self._workers != workers:
            self._passed = 0
        self._workers = workers
        iter(self.stream)  # after the end of an epoch, this begins the next epoch
        return self._packs(workers, (worker - self._passed) % workers, self._passed)

    def _packs(self, workers: int, first: int, before: int) -> Iterator[Pack]:
        for number, pack in self.stream.every(workers, first):
            self._passed = before + number + 1
            yield pack

    def state_dict(self) -> dict[str, Any]:
        """State of the stream, and the number of packs that all loader processes have returned."""
        return {"stream": self.stream.state_dict(), "passed": self._passed, "workers": self._workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        Raises ConfigError for the same errors as :meth:`~chairlift_train.stream.PackStream.load_state_dict`.
        """
        self.stream.load_state_dict(state["stream"])
        self._passed = int(state["passed"])
        self._workers = int(state["workers"])
        self._resumes = True
