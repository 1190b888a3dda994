"""Several trainable adapters on one model: sequences of different adapters share each pass over the base weights.

The rows of a forward pass are sorted by adapter. A layer computes the base product of all rows at once, and then adds
to the rows of each adapter the product of that adapter (mLoRA: Ye et al., 2023).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError
from chairlift.lora.trainable import TrainableAdapter, attach
from chairlift.models.layers.linear import Adapted

__all__ = ["TrainableAdapters"]


class TrainableAdapters:
    """Adapters of one model, made with ``attached=False``, by name. Their ranks, scales and layers may differ.

    Before each forward pass :meth:`route` assigns its rows to the adapters. Raises ConfigError without an adapter, and
    for a model that has adapters already.
    """

    def __init__(self, adapters: Mapping[str, TrainableAdapter]) -> None:
        if not adapters:
            raise ConfigError("there is no adapter to train; give at least one")
        self.adapters = dict(adapters)
        self.names = tuple(self.adapters)
        self.parameters: dict[str, nn.Parameter] = {
            f"{name}/{key}": parameter
            for name, adapter in self.adapters.items()
            for key, parameter in adapter.parameters.items()
        }
        """``NAME/KEY`` -> float32 matrix, where NAME is the name of an adapter, and KEY is PEFT's name of the
        matrix."""
        self._rows = [0] * len(self.names)
        layers: dict[str, list[Adapted | None]] = {}
        for index, adapter in enumerate(self.adapters.values()):
            for name, product in adapter.products.items():
                layers.setdefault(name, [None] * len(self.names))[index] = product
        model = next(iter(self.adapters.values())).model
        for name, products in layers.items():
            attach(model, name, _SharedLayer(products, self._rows))

    def parameters_of(self, name: str) -> list[nn.Parameter]:
        """The matrices of one adapter."""
        return list(self.adapters[name].parameters.values())

    @property
    def dropout(self) -> float:
        """Largest dropout fraction among the adapters."""
        return max(adapter.dropout for adapter in self.adapters.values())

    def route(self, rows: Sequence[int]) -> None:
        """Assign the rows of the next forward passes to adapters: the first ``rows[0]`` rows to the first adapter, the
        next ``rows[1]`` rows to the second adapter, and so on."""
        self._rows[:] = rows

    @contextlib.contextmanager
    def selecting(self, rows: Tensor) -> Iterator[None]:
        """Context for layers that compute only the ``rows`` (ascending int64 [R]) of the routed rows, such as the
        output head."""
        before = list(self._rows)
        ends = torch.tensor(before).cumsum(0)
        reached = torch.searchsorted(rows.cpu(), ends)
        self._rows[:] = reached.diff(prepend=reached.new_zeros(1)).tolist()
        try:
            yield
        finally:
            self._rows[:] = before

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each adapter, as :meth:`route` assigned them last."""
        return tuple(self._rows)

    def settings(self) -> dict[str, Any]:
        """Settings of all adapters as plain data. Training with saved matrices may continue only if the settings are
        the same."""
        found: dict[str, Any] = {"adapters": list(self.names)}
        for name, adapter in self.adapters.items():
            own = adapter.settings()
            found["base"] = own.pop("base")
            found |= {f"adapters.{name}.{key}": value for key, value in own.items()}
        return found

    def write(self, directory: Path) -> None:
        """Write each adapter as PEFT does, into ``directory/NAME``, which is created if needed. Raises OSError."""
        for name, adapter in self.adapters.items():
            adapter.write(directory / name)


class _SharedLayer:
    """Computes one layer's result plus the low-rank terms of several adapters, each for its own rows."""

    def __init__(self, products: Sequence[Adapted | None], rows: Sequence[int]) -> None:
        self._products = products
        self._rows = rows
        self.matrices = [matrix for product in products for matrix in getattr(product, "matrices", ())]
        """The trained matrices of all adapters."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if sum(self._rows) != len(x):
            raise ConfigError(f"a pass over {len(x)} rows, but adapters were given {sum(self._rows)}; route them first")
        rows = list(self._rows)
        parts = zip(self._products, torch.split(x, rows), torch.split(out, rows), strict=True)
        return torch.cat(
            [own if product is None or not len(own) else product(part, own) for product, part, own in parts]
        )
