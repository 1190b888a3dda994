"""How different colours look, also to people who see fewer colours.

The simulations of protanopia, deuteranopia and tritanopia are those of Machado, Oliveira and Fernandes (2009), at full
strength. Differences are distances in OKLab (Ottosson, 2020): 1 is the distance of black and white.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEAST", "least_difference", "light_and_dark"]

LEAST: Final = 0.08
"""Least difference of two colours of one picture."""
_SIGHTS: Final = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_CONES: Final = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB: Final = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def _seen(colour: str, sight: NDArray[np.float64]) -> NDArray[np.float64]:
    """OKLab coordinates of ``#rrggbb`` as somebody with this sight sees it."""
    given = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    return np.asarray(_LAB @ np.cbrt(_CONES @ np.clip(sight @ linear, 0, 1)))


def least_difference(colours: Iterable[str]) -> tuple[float, str]:
    """(difference, words) of the two colours that are most alike for somebody."""
    return min(
        (float(np.linalg.norm(_seen(one, sight) - _seen(other, sight))), f"{one} and {other} with {name}")
        for one, other in itertools.combinations(colours, 2)
        for name, sight in _SIGHTS.items()
    )


def light_and_dark(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """[colours on a light background, colours on a dark one] of (light, dark) pairs."""
    return [list(side) for side in zip(*pairs, strict=True)]
