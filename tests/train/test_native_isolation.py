"""check_isolation proves that native recurrent models reset their states at the borders of a pack, and finds a leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.kernels.recurrent import recur_packed
from chairlift.models.hf_config import parse_config
from chairlift_train import varlen
from chairlift_train.isolation import IsolationReport, check_isolation
from chairlift_train.varlen import VarlenContext
from tests.models.tiny import RECURRENT_FAMILIES
from tests.train.test_native_families import CELLS, config_of, model_of

FAMILIES = (*CELLS, *RECURRENT_FAMILIES)


def check(family: str) -> IsolationReport:
    model = model_of(parse_config(config_of(family)))

    def forward(batch: dict[str, Any]) -> torch.Tensor:
        ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        starts = (positions == 0).nonzero().flatten().tolist()
        logits: torch.Tensor = model.compute_logits(model(ids, positions, VarlenContext([*starts, len(ids)])))
        return logits

    return check_isolation(model, forward=forward)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_begin_anew_at_each_border_and_a_leak_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = check(family)
    assert report, str(report)
    monkeypatch.setattr(varlen, "recur_packed", lambda cell, inputs, cu: recur_packed(cell, inputs, (0, cu[-1])))
    leaky = check(family)
    assert not leaky
    assert {(0, 1), (1, 2)} <= {(leak.source, leak.victim) for leak in leaky.leaks}
    assert leaky.first_layer is not None and leaky.first_layer.endswith(".mixer")
