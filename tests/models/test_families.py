"""Every family computes what transformers computes, packed or paged, whole or in chunks, alone or in company."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.kernels import ops
from chairlift.kernels.weights import ONEDNN, PLAIN
from chairlift.models.causal_lm import CausalLM
from chairlift.models.context import PackedContext
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.models.paged import PagedRunner, packed_logits
from tests.models.tiny import FAMILIES, hf_logits, hf_model, tiny_hf_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-no-grouping": ("llama", {"num_key_value_heads": 4}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-window-7": ("mistral", {"sliding_window": 7}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-late-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-mixed-windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def load(model_dir: Path, dtype: str = "auto", **options: Any) -> CausalLM:
    return load_model(model_dir, read_config(model_dir), dtype, "cpu", **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=length)


def check_packed_and_chunked(ours: Any, theirs: Any) -> None:
    """Compare our logits with those of transformers: of three prompts side by side, and of one in chunks."""
    prompts = [prompt(40, 1), prompt(3, 2), prompt(61, 3)]
    expected = [hf_logits(theirs, tokens) for tokens in prompts]
    for logits, reference in zip(packed_logits(ours, prompts), expected, strict=True):
        assert close(logits, reference)
    runner = PagedRunner(ours, 8, num_blocks=256)
    chunks = [runner.step([("chunked", prompts[2][a:b])])[0] for a, b in ((0, 5), (5, 6), (6, 32), (32, 61))]
    assert close(torch.cat(chunks), expected[2])


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> bool:
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    return bool(error <= tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_and_paged_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    theirs = hf_model(model_dir)
    ours = load(model_dir)
    prompts = [prompt(40, 1), prompt(3, 2), prompt(61, 3)]
    expected = [hf_logits(theirs, tokens) for tokens in prompts]
    for logits, reference in zip(packed_logits(ours, prompts), expected, strict=True):
        assert close(logits, reference)
    for block_size in (1, 8, 16):
        runner = PagedRunner(ours, block_size, num_blocks=256)
        # Whole, in ragged chunks, and token by token.
        whole = torch.cat(runner.step([("whole", prompts[2])]))
        chunks = [runner.step([("chunked", prompts[2][a:b])])[0] for a, b in ((0, 5), (5, 6), (6, 32), (32, 61))]
        single = [runner.step([("single", [token])])[0] for token in prompts[0]]
        assert close(whole, expected[2])
        assert close(torch.cat(chunks), expected[2])
        assert close(torch.cat(single), expected[0])


@pytest.mark.parametrize("variant", ["llama", "qwen3-mixed-windows", "mistral-window-7"])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_decodes_and_chunks_share_a_batch(variant: str, block_size: int, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model_dir = tiny_hf_model(tmp_path, family, **overrides)
    theirs, runner = hf_model(model_dir), PagedRunner(load(model_dir), block_size, num_blocks=512)
    rng = random.Random(7)
    sequences = {str(i): prompt(rng.randint(1, 60), seed=i) for i in range(6)}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in sequences}
    while any(len(runner.tokens.get(name, [])) < len(tokens) for name, tokens in sequences.items()):
        rows: list[tuple[str, list[int]]] = []
        for name, tokens in sequences.items():
            done = len(runner.tokens.get(name, []))
            # Mostly decodes, some chunks, and now and then a sequence sits a step out.
            rows.append((name, tokens[done : done + rng.choice((0, 1, 1, 1, 4, 17))]))
        rows = [row for row in rows if row[1]]
        rng.shuffle(rows)
        for (name, _), out in zip(rows, runner.step(rows) if rows else [], strict=True):
            logits[name].append(out)
    for name, tokens in sequences.items():
        assert close(torch.cat(logits[name]), hf_logits(theirs, tokens))


def test_prompts_longer_than_a_query_tile_equal_transformers(tmp_path: Path) -> None:
    for window in (None, 100, 300):
        model_dir = tiny_hf_model(
            tmp_path / str(window), "mistral", sliding_window=window, max_position_embeddings=1024
        )
        tokens = prompt(700)
        expected = hf_logits(hf_model(model_dir), tokens)
        ours = load(model_dir)
        runner = PagedRunner(ours, 16, max_len=1024)
        chunks = [runner.step([("a", part)])[0] for part in (tokens[:90], tokens[90:]) if part]
        assert close(packed_logits(ours, [tokens])[0], expected)
        assert close(torch.cat(chunks), expected)


def test_rows_are_planned_once_per_cache_group_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, overrides = VARIANTS["qwen3-mixed-windows"]
    runner = PagedRunner(load(tiny_hf_model(tmp_path, family, **overrides)), 8)
    windows: list[object] = []
    plan = ops.plan_rows

    def counted(*args: Any) -> Any:
        windows.append(args[-1])
        return plan(*args)

    monkeypatch.setattr(ops, "plan_rows", counted)
    runner.step([("a", prompt(20)), ("b", prompt(3))])
    runner.step([("b", [5]), ("a", [6])])
    assert windows == [5, None, 5, None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.08), (torch.float16, 0.01)])
def test_half_precision_stays_near_float32(family: str, dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family, dtype=dtype)
    tokens = prompt(50)
    # The weights were rounded when they were saved, so float32 is the truth about this very model.
    expected = hf_logits(hf_model(model_dir, torch.float32), tokens)
    ours = load(model_dir)
    assert ours.model.embed_tokens.weight.dtype == dtype
    runner = PagedRunner(ours, 8)
    logits = torch.cat([runner.step([("a", part)])[0] for part in (tokens[:33], tokens[33:49], tokens[49:])])
    theirs = hf_logits(hf_model(model_dir, dtype), tokens)
    ours_error, theirs_error = (float((x.float() - expected).std() / expected.std()) for x in (logits, theirs))
    assert logits.dtype == dtype
    assert ours_error <= tolerance
    assert ours_error <= 1.25 * theirs_error


@pytest.mark.parametrize("family", FAMILIES)
def test_prepacked_and_plain_linears_agree(family: str, tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, family)
    plain, packed = load(model_dir, weight_format=PLAIN), load(model_dir, weight_format=ONEDNN)
    assert (packed.lm_head.format, plain.lm_head.format) == (ONEDNN, PLAIN)
    assert close(packed_logits(packed, [prompt(40)])[0], packed_logits(plain, [prompt(40)])[0], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_one_sequence_at_a_time(family: str, tmp_path: Path) -> None:
    model = load(tiny_hf_model(tmp_path, family), weight_format=PLAIN).requires_grad_(True)
    sequences = [prompt(30, 1), prompt(2, 2), prompt(41, 3)]

    def gradients(packs: list[list[list[int]]]) -> list[torch.Tensor]:
        loss = torch.zeros(())
        for pack in packs:
            cu_seqlens = [0]
            for sequence in pack:
                cu_seqlens.append(cu_seqlens[-1] + len(sequence))
            flat = torch.tensor([token for sequence in pack for token in sequence])
            positions = torch.cat([torch.arange(len(sequence)) for sequence in pack])
            logits = model.compute_logits(model(flat, positions, PackedContext(cu_seqlens)))
            loss = loss + logits.logsumexp(-1).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    together, apart = gradients([sequences]), gradients([[sequence] for sequence in sequences])
    for (name, _), whole, parts in zip(model.named_parameters(), together, apart, strict=True):
        assert close(whole, parts, 1e-5), name


@pytest.mark.parametrize("family", FAMILIES)
def test_training_under_autocast_has_nearly_the_same_loss(family: str, tmp_path: Path) -> None:
    model = load(tiny_hf_model(tmp_path, family, std=0.05), weight_format=PLAIN).requires_grad_(True)
    tokens, positions = torch.tensor(prompt(40)), torch.arange(40)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model.compute_logits(model(tokens, positions, PackedContext([0, 40])))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:]))
        gradients = torch.autograd.grad(losses[-1], list(model.parameters()))
        assert all(bool(gradient.isfinite().all()) and bool(gradient.any()) for gradient in gradients)
    assert close(losses[1], losses[0], 0.02)


@pytest.mark.planted("test_packed_and_paged_logits_equal_transformers[llama]")
def test_dropping_rope_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    expected = hf_logits(hf_model(model_dir), prompt(40))
    assert close(packed_logits(load(model_dir), [prompt(40)])[0], expected)
    monkeypatch.setattr(ops, "apply_rotary", lambda x, cos, sin: x)
    assert not close(packed_logits(load(model_dir), [prompt(40)])[0], expected)


@pytest.mark.planted("test_packed_and_paged_logits_equal_transformers[llama]")
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_dropping_one_kv_block_is_noticed(block_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    expected = hf_logits(hf_model(model_dir), prompt(40))
    runner = PagedRunner(load(model_dir), block_size)
    runner.step([("a", prompt(40)[:39])])
    lost = runner.tables["a"][0][1]
    for keys, values in runner.kv_caches:
        keys[lost].zero_()
        values[lost].zero_()
    assert not close(runner.step([("a", prompt(40)[39:])])[0], expected[39:])
