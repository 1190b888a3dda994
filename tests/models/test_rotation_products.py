"""q and k are rotated and normalised as in transformers, for every product of rotation, share of a head, norm and
spelling of the settings. What is not supported is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from chairlift import LLM, SamplingParams
from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.library import supported_isas
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.layers.attention import Attention
from chairlift.models.layers.rotary import RotaryEmbedding, inverse_frequencies
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from chairlift.models.registry import FAMILIES
from chairlift.models.rope_config import WITH_ORIGINAL, RopeConfig
from tests.models.paged import packed_logits
from tests.models.tiny import (
    EXPERT_FAMILIES,
    MORE_FAMILIES,
    RECURRENT_FAMILIES,
    hf_logits,
    hf_model,
    tiny_fields,
    tiny_hf_model,
)
from tests.models.tiny import FAMILIES as USUAL_FAMILIES
from tests.models.vision.tiny import tiny_qwen
from tests.tiers import one_in

LONGEST, ORIGINAL = 96, 32
"""Length of the prompt, and of the texts for which the positions are not scaled."""
PROMPT = random.Random(1).choices(range(128), k=LONGEST)
KERNELS = (*supported_isas()[-1:], "torch")
THETA = 20_000.0
_YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "yarn": _YARN,
    "yarn-attention_factor": {**_YARN, "attention_factor": 1.5},
    "yarn-mscale": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-implicit-length": {"factor": 4.0},
    "yarn-exact": {**_YARN, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False},
    "longrope": _YARN,
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 1.5},
    "llama3": {**_YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Name of a rotation -> its parameters. Its type is the part of the name before the hyphen."""
_ATTENTION_ONLY = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
_OWN: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "mixtral": {"head_dim": 16},  # without it, transformers cannot compute YaRN
    "qwen3_5_text": _ATTENTION_ONLY,
    "qwen3_5_moe_text": _ATTENTION_ONLY,
    "qwen3_next": _ATTENTION_ONLY,
}
_ROPE_KEYS: dict[str, dict[str, Any]] = {
    "ministral3": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": ORIGINAL},
    "qwen3_5_text": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
}
"""Family -> further keys of its published rotary parameters."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, _OWN.get(family, {}))
        for family in (*USUAL_FAMILIES, *MORE_FAMILIES, *EXPERT_FAMILIES, *RECURRENT_FAMILIES)
        if FAMILIES[family].rotary
    },
    "glm4_moe-norms": ("glm4_moe", {"use_qk_norm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
}
QUICK = [
    *itertools.product(("glm4_moe-norms", "qwen3_5_text", "qwen3_next"), ("yarn", "yarn-attention_factor")),
    *(("hunyuan_v1_dense", "yarn"), ("gemma3_text", "yarn"), ("olmo2", "yarn-mscale"), ("olmo3", "longrope")),
    *(("phi3", "longrope"), ("phi3", "linear"), ("qwen3", "yarn-exact"), ("stablelm", "llama3"), ("glm", "dynamic")),
]
"""Products that run by default: each kind of norm, and each rotation."""
NIGHT = [case for case in itertools.product(VARIANTS, KINDS) if case not in QUICK]


def rotation(variant: str, kind: str, share: float | None) -> dict[str, Any]:
    """Rotary parameters without their type, base and share of a head."""
    family, overrides = VARIANTS[variant]
    found = {**_ROPE_KEYS.get(family, {}), **KINDS[kind]}
    if "implicit" in kind:
        found.pop("original_max_position_embeddings", None)
    if kind == "longrope":
        fields = {**tiny_fields(family), **overrides}
        usual = FAMILIES[family].defaults.get("partial_rotary_factor", 1.0)
        dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        pairs = int(dim * (share or usual)) // 2
        found |= {"short_factor": [1 + i / 10 for i in range(pairs)], "long_factor": [2 + i for i in range(pairs)]}
    return found


def spellings(variant: str, kind: str, share: float | None) -> dict[str, dict[str, Any]]:
    """Ways to write one rotation in ``config.json``: name -> keys."""
    family = FAMILIES[VARIANTS[variant][0]]
    named, rope = kind.split("-")[0], rotation(variant, kind, share)
    theta_key, share_key = (family.keys.get(key, key) for key in ("rope_theta", "partial_rotary_factor"))
    inside = {} if share is None else {"partial_rotary_factor": share}
    beside = {theta_key: THETA, **({} if share is None else {share_key: share})}
    if family.window_rope:
        plain = {"rope_type": "default", "rope_theta": family.defaults.get("rope_local_base_freq", 5e5)}
        whole = {"rope_type": named, **rope, "rope_theta": THETA, **inside}
        return {
            "new": {"rope_parameters": {"full_attention": whole, "sliding_attention": plain}},
            "new, type": {
                "rope_parameters": {"full_attention": {**whole, "rope_type": named, "type": named}},
                **({"rope_theta": THETA}),
            },
            "old": {"rope_scaling": {"rope_type": named, **rope}, **beside},
        }
    shorter = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    apart = {"original_max_position_embeddings": ORIGINAL} if shorter != rope and named in WITH_ORIGINAL else {}
    if "original_max_position_embeddings" in family.defaults:  # a value in the parameters is ignored
        always = {"original_max_position_embeddings": ORIGINAL}
        older = {"rope_scaling": {"type": "su", **rope}, **beside, **always}
        return {
            "new": {"rope_parameters": {"rope_type": named, **rope, "rope_theta": THETA, **inside}, **always},
            "new, share beside": {"rope_parameters": {"rope_type": named, **rope}, **beside, **always},
            "old": {"rope_scaling": {"type": named, **shorter}, **beside, **always},
            **({"old, another name": older} if kind == "longrope" else {}),
        }
    return {
        "old, length beside": {"rope_scaling": {"type": named, **(shorter if apart else rope)}, **beside, **apart},
        "new": {"rope_parameters": {"rope_type": named, **rope, "rope_theta": THETA, **inside}},
        "new, type": {"rope_parameters": {"type": named, **rope, "rope_theta": THETA, **inside}},
        "new, share beside": {"rope_parameters": {"rope_type": named, **rope}, **beside},
        "old": {"rope_scaling": {"type": named, **rope}, **beside},
        "old, rope_type": {"rope_scaling": {"rope_type": named, **rope, **inside}, theta_key: THETA},
        "old, both names": {"rope_scaling": {"rope_type": named, "type": named, **rope}, **beside},
    }


def write(model_dir: Path, keys: dict[str, Any]) -> None:
    """Replace the rotation in ``config.json``."""
    raw = json.loads((model_dir / "config.json").read_text())
    ours = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
    ours += ("original_max_position_embeddings",)
    kept = {key: value for key, value in raw.items() if key not in ours}
    (model_dir / "config.json").write_text(json.dumps({**kept, **keys}))


def in_transformers(model_dir: Path) -> Any:
    """Rotary parameters as transformers reads them, without the older name of the type."""
    config = AutoConfig.from_pretrained(model_dir)
    config.standardize_rope_params()  # the first call of transformers does not see a length beside the parameters
    found = config.rope_parameters
    nested = {key: value for key, value in found.items() if isinstance(value, dict)} or {"": found}
    return {name: {key: value for key, value in rope.items() if key != "type"} for name, rope in nested.items()}


def trained_length(kind: str) -> int:
    """``max_position_embeddings`` of the model. ``dynamic`` scales for the longest text, so this is the prompt."""
    lengths = {"dynamic": 2 * LONGEST // 3, "yarn-implicit-length": ORIGINAL}
    return lengths.get(kind, 4 * ORIGINAL)


def why_refused(variant: str, kind: str, share: float | None) -> str:
    """Part of the message with which this rotation is refused; empty if it is supported."""
    family = FAMILIES[VARIANTS[variant][0]]
    if kind.split("-")[0] not in family.rope_types:
        return f"rope_type '{kind.split('-')[0]}' is not supported"
    if family.rope_types[kind.split("-")[0]] == "longrope" and kind != "longrope":
        return "short_factor must be"
    if family.window_rope and "truncate" in KINDS[kind]:
        return "truncate is false"
    return "" if share is None or family.partial_rotary else f"partial_rotary_factor {share:g} is not supported"


def check(model_dir: Path, expected: Tensor, kernels: str) -> None:
    """Fail unless the log-probability of each token of the prompt is the expected one."""
    if kernels == "torch":
        logits = packed_logits(load_model(model_dir, read_config(model_dir), "float32", "cpu"), [PROMPT])[0]
        assert float((logits.log_softmax(-1) - expected).abs().max()) <= 1e-4
        return
    sizes = {"num_kv_blocks": 60, "max_num_batched_tokens": 24, "max_model_len": LONGEST}
    llm = LLM(model_dir, dtype="float32", kernels=kernels, skip_tokenizer_init=True, **sizes)
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    found = [given[token].logprob for token, given in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True) if given]
    wanted = expected[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert float((torch.tensor(found) - wanted).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("variant", "kind"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHT)]
)
def test_rotations_equal_transformers_or_are_refused(variant: str, kind: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    length = trained_length(kind)
    model_dir = tiny_hf_model(tmp_path, family, std=0.15, **{**overrides, "max_position_embeddings": length})
    for share in (None, 0.5, 0.75):
        spelled, reason = spellings(variant, kind, share), why_refused(variant, kind, share)
        if reason:
            for keys in spelled.values():
                write(model_dir, keys)
                with pytest.raises(ModelLoadError, match=reason):
                    read_config(model_dir)
            continue
        write(model_dir, spelled.pop("new"))
        ours, theirs = read_config(model_dir), in_transformers(model_dir)
        expected = hf_logits(hf_model(model_dir), PROMPT).log_softmax(-1)
        for kernels in KERNELS:
            check(model_dir, expected, kernels)
        for name, keys in spelled.items():
            write(model_dir, keys)
            assert in_transformers(model_dir) == theirs, name
            assert read_config(model_dir) == ours, name


@pytest.mark.parametrize("kind", one_in(4, (kind for kind in KINDS if kind != "longrope")))
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_rotations_with_axes_equal_transformers(family: str, kind: str, tmp_path: Path) -> None:
    model_dir = tiny_qwen(tmp_path, family)
    raw = json.loads((model_dir / "config.json").read_text())
    rope = {"rope_type": kind.split("-")[0], **KINDS[kind], "rope_theta": THETA, "mrope_section": [2, 3, 3]}
    length = trained_length(kind)
    raw["text_config"] |= {"rope_parameters": rope, "max_position_embeddings": length}
    (model_dir / "config.json").write_text(json.dumps(raw))
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    expected = hf_logits(model.eval(), PROMPT).log_softmax(-1)
    for kernels in KERNELS:
        check(model_dir, expected, kernels)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_settings_that_transformers_ignores_are_refused(family: str, tmp_path: Path) -> None:
    """With ``rope_parameters`` per type of layer, transformers reads ``rope_type`` of ``rope_scaling`` only."""
    model_dir = tiny_hf_model(tmp_path, family)
    write(model_dir, {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}, "original_max_position_embeddings": 64})
    assert in_transformers(model_dir)["full_attention"]["original_max_position_embeddings"] == 512
    with pytest.raises(ModelLoadError, match=r"original_max_position_embeddings 64 stands outside the rope parameters"):
        read_config(model_dir)
    write(model_dir, {"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert in_transformers(model_dir)["full_attention"]["rope_type"] == "default"
    with pytest.raises(ModelLoadError, match=r"'linear' under the key 'type'.*write it under the key 'rope_type'"):
        read_config(model_dir)
    write(model_dir, {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 8.0}})
    assert read_config(model_dir).rope == RopeConfig("linear", 1e6 if family == "gemma3_text" else 5e5, 8.0, 512)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_old_scaling_is_added_to_new_parameters(family: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, std=0.15)
    kinds = {"full_attention": {"rope_theta": 3e3}, "sliding_attention": {"rope_theta": 7e3}}
    write(model_dir, {"rope_parameters": kinds, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    config = read_config(model_dir)
    assert config.rope is not None and config.window_rope is not None
    assert (config.rope.theta, config.rope.factor, config.window_rope.theta) == (3e3, 8.0, 7e3)
    check(model_dir, hf_logits(hf_model(model_dir), PROMPT).log_softmax(-1), "torch")


def test_dynamic_scaling_ignores_an_original_length(tmp_path: Path) -> None:
    """As transformers does: up to ``max_position_embeddings`` tokens, positions are not scaled."""
    model_dir = tiny_hf_model(tmp_path, "llama", std=0.15)
    write(model_dir, {"rope_scaling": {"type": "dynamic", **_YARN}, "rope_theta": THETA})
    assert read_config(model_dir).for_length(512).rope == RopeConfig(theta=THETA, original_max_position_embeddings=512)
    check(model_dir, hf_logits(hf_model(model_dir), PROMPT).log_softmax(-1), KERNELS[0])


# -- the layer, against its formula: also products that no family has --------------------------------------------------

_HEADS, _KV_HEADS, _DIM, _HIDDEN = 4, 2, 16, 24
ROPES = {
    "plain": RopeConfig(theta=50.0),
    "linear": RopeConfig("linear", 50.0, 3.0),
    "llama3": RopeConfig("llama3", 50.0, 4.0, ORIGINAL),
    "yarn": RopeConfig("yarn", 50.0, 4.0, ORIGINAL, attention_factor=1.5),
}


class Heads:
    """A context that keeps the q, k and v that a layer attends with."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        self.q, self.k, self.v = q, k, v
        return q


def by_formula(x: Tensor, weight: Tensor, head: int, angles: Tensor, factor: float, norm: tuple[str, Any]) -> Tensor:
    """One head [T, Dh] of q or k in float64. ``x`` [T, heads * Dh] are all heads of its kind, ``angles`` [T, pairs]."""
    (kind, offset), pairs, half = norm, angles.shape[1], _DIM // 2
    one = slice(head * _DIM, (head + 1) * _DIM)

    def normed(y: Tensor, scales: Tensor) -> Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (offset + scales)

    if kind == "all":
        x = normed(x, weight)
    y = normed(x[:, one], weight) if kind == "head" else x[:, one].clone()
    first, second = y[:, :pairs].clone(), y[:, half : half + pairs].clone()
    y[:, :pairs] = factor * (first * angles.cos() - second * angles.sin())
    y[:, half : half + pairs] = factor * (second * angles.cos() + first * angles.sin())
    return normed(y, weight) if kind == "rotated" else y


def layer_config(qk_norm: str, norm: str, rope: RopeConfig, gate: bool) -> NetworkConfig:
    sizes = {"hidden_size": _HIDDEN, "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS}
    raw = {"model_type": "qwen3", **sizes, "head_dim": _DIM, "intermediate_size": 8, "num_hidden_layers": 1}
    config = parse_config({**raw, "vocab_size": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 128})
    return dataclasses.replace(config, qk_norm=qk_norm or None, norm=norm, rope=rope, output_gate=gate)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("norm", ["rms", "rms_offset"])
@pytest.mark.parametrize("qk_norm", ["", "head", "rotated", "all"])
def test_heads_are_those_of_the_formula(qk_norm: str, norm: str, gate: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, positions = torch.randn(40, _HIDDEN, generator=generator), torch.arange(100, 140)
    for (name, rope), dim in itertools.product(ROPES.items(), (None, 8, 12)):
        config = layer_config(qk_norm, norm, dataclasses.replace(rope, dim=dim), gate)
        layer = Attention(config, 0).requires_grad_(False)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        table = None
        if not config.rotates_apart:
            table = RotaryEmbedding(_DIM, layer_config("", norm, config.layer_ropes[0], gate).rope, 128)(
                positions, torch.float32
            )
        heads: Any = Heads()
        layer(x, table, positions, heads)
        frequencies, factor = inverse_frequencies(dim or _DIM, rope, 128)
        angles = positions[:, None].double() * frequencies.double()
        product = (x.double() @ layer.qkv_proj.weight.double().T)[:, _HEADS * _DIM if gate else 0 :]
        split = _HEADS * _DIM, _KV_HEADS * _DIM, _KV_HEADS * _DIM
        for found, given, scales in zip(
            (heads.q, heads.k), product.split(split, 1), (layer.q_norm, layer.k_norm), strict=False
        ):
            weight = torch.zeros(0) if scales is None else scales.weight.double()
            for head in range(found.shape[1]):
                wanted = by_formula(given, weight, head, angles, factor, (qk_norm, config.norm_offset))
                assert (found[:, head] - wanted).abs().max() <= 2e-4, (name, dim, head)
