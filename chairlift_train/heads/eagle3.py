"""Trains the drafting layer of EAGLE-3 (Li et al., 2025), which the engine serves as it is written.

The layer is :class:`~chairlift.models.eagle3.Eagle3`, the class that serves; only the attention context differs. It is
unrolled: "head" i of :mod:`~chairlift_train.heads.training` is the layer's i-th step, whose feature is the layer's own
result of the step before. So the layer learns from its own features, as it will draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.models.causal_lm import CausalLM
from chairlift.models.eagle3 import Eagle3, hidden_at, parse_eagle3_config, stored_tensors
from chairlift.models.hf_config import NetworkConfig
from chairlift_train.checkpoint import ModelFiles
from chairlift_train.collate import IGNORED
from chairlift_train.heads.training import HeadsNetwork
from chairlift_train.heads.unrolled import UnrolledContext
from chairlift_train.layout import Pack
from chairlift_train.varlen import VarlenContext

__all__ = ["Eagle3Network", "check_taps", "default_taps", "saved_target_ids"]

_WEIGHTS_NAME: Final = "model.safetensors"
_DEFAULT_FROM: Final = 8
"""Number of layers from which the taps are those that EAGLE-3's readers take by default."""


class Eagle3Network(HeadsNetwork):
    """A frozen model with a drafting layer. Training is in float32.

    The layer has the sizes of the model's own layers. Its output head begins as the model's, or as the rows of
    ``target_ids`` in it.

    Args:
        model: The frozen model.
        num_steps: Number of steps that are unrolled: drafts of a row that are trained.
        taps: Layers of the model before which hidden states are read.
        intermediate_size: Inner width of the layer's MLP. None: the model's.
        own_output_head: Whether the layer trains an output head of its own. Otherwise it uses the model's.
        target_ids: Ascending token ids of the reduced vocabulary, which needs an output head of its own. None: all.
        distribution: Whether the layer learns the model's probabilities instead of the tokens of the text.
        base: Name of the model.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_steps: int,
        taps: tuple[int, ...],
        intermediate_size: int | None = None,
        own_output_head: bool = True,
        target_ids: npt.NDArray[np.int32] | None = None,
        distribution: bool = False,
        base: str = "",
    ) -> None:
        super().__init__(model, base=base)
        target = model.config
        output = model.lm_head.weight.detach()
        self.num_steps = num_steps
        self.taps = taps
        self.distribution = distribution
        if not own_output_head:
            rows = None
        elif target_ids is None:
            rows = target.vocab_size
        else:
            rows = len(target_ids)
        self._config = _layer_config(target, taps, intermediate_size, rows)
        config = parse_eagle3_config(self._config, target, Path("config.json"))
        self.layer = Eagle3(config, own_embedding=False, own_head=own_output_head)
        self.layer.target_ids = target_ids
        if self.layer.lm_head is not None:
            kept = slice(None) if target_ids is None else torch.from_numpy(target_ids.astype(np.int64))
            self.layer.lm_head.weight.data.copy_(output[kept])
        self.layer.to(output.device)
        self.trained = dict(self.layer.named_parameters())
        self._rows = torch.arange(target.vocab_size, device=output.device)
        """int64 [V]: row of the output head for each token id; :data:`IGNORED` for a token without a row."""
        if target_ids is not None:
            ids = torch.from_numpy(target_ids.astype(np.int64)).to(output.device)
            self._rows = torch.full_like(self._rows, IGNORED).index_copy(0, ids, torch.arange(len(ids)).to(ids))
        self._hidden = torch.empty(0)
        """Last hidden states of the model for the newest pack, if the layer learns its probabilities."""

    def states(self, batch: Mapping[str, Tensor], pack: Pack) -> Iterator[Tensor]:
        """Yield the layer's states of each step for the output head, [tokens, hidden size]. Row t of step i is position
        t + i, and predicts token t + i + 2."""
        positions = batch["position_ids"][0]
        with torch.no_grad():
            context = VarlenContext(pack.layout.cu_seqlens)
            hidden, tapped = hidden_at(self.model, self.taps, batch["input_ids"][0], positions, context)
        self._hidden = hidden
        features = self.layer.project(torch.cat(tapped, dim=-1))
        unrolled = UnrolledContext(pack.layout.cu_seqlens)
        for step in range(self.num_steps):
            embedded = self.model.model.embed_tokens(batch["input_ids"][0][self._later(batch, step + 1)])
            features, state = self.layer(embedded, features, positions + step, unrolled)
            yield state

    def _later(self, batch: Mapping[str, Tensor], distance: int) -> Tensor:
        """int64 [T]: index of the token ``distance`` positions later, at most the last of the same sequence."""
        ends = batch["cu_seqlens"].long()[1:][batch["segment_ids"][0].long()] - 1
        return torch.minimum(torch.arange(len(ends), device=ends.device) + distance, ends)

    def head_logits(self, states: Tensor, head: int) -> Tensor:
        """Logits [R, rows of the output head] for the states [R, D] of any step."""
        if self.layer.lm_head is None:
            return self.model.compute_logits(states)
        logits: Tensor = self.layer.lm_head(states)
        return logits

    def head_labels(self, labels: Tensor) -> Tensor:
        """Rows of the output head for token ids. Tokens outside the reduced vocabulary are :data:`IGNORED`."""
        return self._rows[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)

    def teacher(self, rows: Tensor, head: int) -> Tensor | None:
        """Probabilities of the model's next token where a step predicts it, over the rows of the output head; None if
        the layer learns tokens."""
        if not self.distribution:
            return None
        with torch.no_grad():
            later = (rows + head + 1).clamp(max=len(self._hidden) - 1)  # beyond a sequence, there is no target
            logits = self.model.compute_logits(self._hidden[later]).float()
            return logits[:, self._rows != IGNORED].softmax(-1)

    def settings(self) -> Mapping[str, Any]:
        """Settings that must be equal when the training is resumed, as plain data."""
        config = self.layer.config
        return {
            "method": "eagle3",
            "taps": list(self.taps),
            "intermediate_size": config.layer.intermediate_size,
            "own_output_heads": self.layer.lm_head is not None,
            "draft_vocab_size": None if self.layer.target_ids is None else config.draft_vocab_size,
            "base": self._base_digest,
        }

    def write(self, directory: Path, files: ModelFiles) -> None:
        """Write the layer as EAGLE-3's authors publish it, in the dtype of ``files``. ``directory`` is created if
        needed."""
        tensors = {
            name: each.to(files.dtype) if each.is_floating_point() else each
            for name, each in stored_tensors(self.layer).items()
        }
        dtype = str(files.dtype).removeprefix("torch.")
        ids = {key: files.config[key] for key in ("bos_token_id", "eos_token_id") if key in files.config}
        self._write_files(directory, _WEIGHTS_NAME, tensors, {**self._config, **ids, "torch_dtype": dtype})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers before which hidden states are read: 2, L / 2 and L - 3 of L layers, which EAGLE-3's readers take by
    default; in models of fewer than 8 layers the first, the middle and the last, without repetitions."""
    if num_layers >= _DEFAULT_FROM:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({0, num_layers // 2, num_layers - 1}))


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raise ConfigError for taps that the model does not have, or that the files cannot name."""
    if not taps or len(set(taps)) != len(taps) or not all(0 <= tap < num_layers for tap in taps):
        raise ConfigError(
            f"heads.taps must be different layers of the model, which are 0 to {num_layers - 1}, got {list(taps)}"
        )
    if taps[0] == 1:
        raise ConfigError(
            f"heads.taps {list(taps)} begins with 1, which readers of the files take for another convention; put"
            " another tap first, or leave 1 out"
        )


def saved_target_ids(directory: Path) -> npt.NDArray[np.int32] | None:
    """The reduced vocabulary of a checkpoint: ascending token ids. None if it has none."""
    path = directory / _WEIGHTS_NAME
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        offsets = file.get_tensor("d2t").numpy() if "d2t" in names else None
    if offsets is None:
        return None
    found: npt.NDArray[np.int32] = (offsets + np.arange(len(offsets))).astype(np.int32)
    return found


def _layer_config(
    target: NetworkConfig, taps: tuple[int, ...], intermediate_size: int | None, rows: int | None
) -> dict[str, Any]:
    """Content of ``config.json``. ``rows`` is the number of rows of the layer's own output head; None: it has none.

    Keys with the value of a default are there because readers have different defaults, or need the key.
    """
    rope = target.rope
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "base_model_name_or_path": None,
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size or 4 * target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
        "rope_theta": 10_000.0 if rope is None else rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": rows,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
    }
