"""``examples/mini``: its tokens are those of the engine, whatever its batch looks like, and it stays small."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.base import seeds
from chairlift.executor.sampling import gumbel
from tests.examples.mini import FOLDER, MODULES
from tests.models.tiny import tiny_hf_model

BUNDLED = Path(__file__).resolve().parents[2] / "chairlift" / "assets"
MOST_LINES, MOST_FILES = 1000, 8
EOS = 1
SETTINGS: dict[str, dict[str, Any]] = {
    "ample": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "one token per step": {"max_num_batched_tokens": 1},
    "preemption": {"num_kv_blocks": 16, "block_size": 4},
    "preemption without sharing": {"num_kv_blocks": 16, "block_size": 4, "enable_prefix_caching": False},
    "static": {"batching": "static"},
    "large blocks": {"block_size": 32},
}
CASES = [("llama", name) for name in SETTINGS] + [("bundled", name) for name in ("ample", "chunks", "preemption")]

Job = tuple[list[int], SamplingParams]


def jobs(vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts of 1 to 40 tokens, half of them with one beginning; half greedy, half sampled with all parameters of the
    example.

    The two best scores are never closer than 0.005, so that another order of rounding selects the same tokens.
    """
    rng = random.Random(seed)
    root = [rng.randrange(2, vocab_size) for _ in range(24)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.7},
        {"top_k": 8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
    ]
    found: list[Job] = []
    for i in range(16):
        prompt = [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 16))]
        kind = {"temperature": 0.0} if i % 2 else kinds[i // 2 % len(kinds)]
        params = SamplingParams(max_tokens=rng.randint(1, 20), seed=rng.getrandbits(40), **kind)
        found.append(((root if i % 4 < 2 else []) + prompt, params))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model -> its directory."""
    return {"bundled": BUNDLED, "llama": tiny_hf_model(tmp_path_factory.mktemp("models"), "llama")}


@pytest.fixture(scope="module")
def expected(directory: dict[str, Path]) -> dict[str, tuple[list[Job], list[list[int]]]]:
    """Model -> jobs, and the engine's tokens for them."""
    found = {}
    for name, path in directory.items():
        llm = LLM(path, dtype="float32", skip_tokenizer_init=True, num_kv_blocks=256)
        todo = jobs(llm.engine.limits.vocab_size)
        outputs = llm.generate([prompt for prompt, _ in todo], [params for _, params in todo])
        found[name] = todo, [output.outputs[0].token_ids for output in outputs]
    return found


def run(path: Path, todo: list[Job], **settings: Any) -> tuple[Any, list[Any], list[Any]]:
    """Run the jobs in the example. Returns its engine, its requests and its steps."""
    steps: list[Any] = []
    core = MODULES["engine"].EngineCore(path, watch=lambda out, _: steps.append(out), **settings)
    requests = []
    for i, (prompt, params) in enumerate(todo):
        mine = MODULES["request"].SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            stop_token_ids=frozenset({EOS}),
        )
        requests.append(core.add(str(i), prompt, mine))
    core.run()
    return core, requests, steps


@pytest.mark.parametrize(("model", "setting"), CASES)
def test_tokens_are_those_of_the_engine(
    model: str, setting: str, directory: dict[str, Path], expected: dict[str, tuple[list[Job], list[list[int]]]]
) -> None:
    todo, tokens = expected[model]
    core, requests, steps = run(directory[model], todo, **SETTINGS[setting])
    assert [request.output_token_ids for request in requests] == tokens
    assert len({tuple(each) for each in tokens}) > 12
    preempted = {request.request_id for request in requests if request.num_preemptions}
    assert bool(preempted) == setting.startswith("preemption")
    shares = setting not in ("ample", "preemption without sharing", "large blocks")
    assert any(request.num_cached_tokens for request in requests) or not shares
    chunks = [chunk for out in steps for chunk in out.chunks if not chunk.samples]
    assert bool(chunks) == (setting != "ample")
    assert all(out.num_tokens <= core.scheduler.token_budget for out in steps)
    pool = core.kv.pool
    assert pool.num_free == pool.num_blocks and not any(pool.ref_counts)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_and_no_block_is_written_for_two(seed: int) -> None:
    """The scheduler alone, in random traffic with little memory. Invented tokens take the place of a model's."""
    rng = random.Random(seed)
    kv = MODULES["kv_cache"].KVCacheManager(rng.randint(6, 12), 4, enable_prefix_caching=rng.random() < 0.7)
    limits = {"max_num_seqs": rng.randint(1, 6), "max_num_batched_tokens": rng.randint(1, 12)}
    scheduler = MODULES["scheduler"].Scheduler(kv, **limits, batching=rng.choice(["continuous", "static"]))
    requests: list[Any] = []
    num_steps = 0
    while len(requests) < 12 or scheduler.has_unfinished:
        if len(requests) < 12 and (rng.random() < 0.3 or not scheduler.has_unfinished):
            params = MODULES["request"].SamplingParams(max_tokens=rng.randint(1, 8), stop_token_ids=frozenset({0}))
            prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 16))]
            requests.append(MODULES["request"].Request(str(len(requests)), prompt, params))
            scheduler.add(requests[-1])
        out = scheduler.schedule()
        num_steps += 1
        assert 0 < out.num_tokens <= limits["max_num_batched_tokens"]
        assert len({chunk.slot for chunk in out.chunks}) == len(out.chunks) <= limits["max_num_seqs"]
        for chunk in out.chunks:
            written = {position // 4 for position in range(chunk.start, chunk.end)}
            assert all(kv.pool.ref_counts[chunk.request.block_ids[i]] == 1 for i in written)
            assert all(kv.pool.keys[chunk.request.block_ids[i]] is None for i in written)
        tables = [block for request in requests for block in request.block_ids]
        assert kv.pool.ref_counts == [tables.count(block) for block in range(kv.pool.num_blocks)]
        scheduler.update(out, [rng.randint(0, 5) for chunk in out.chunks if chunk.samples])
        assert num_steps < 2000
    assert all(request.finish_reason and request.output_token_ids for request in requests)
    assert kv.pool.num_free == kv.pool.num_blocks


def test_noise_is_that_of_the_engine() -> None:
    sampler = MODULES["sampler"]
    for seed in (0, 1, -1, 1 << 40, (1 << 64) - 1):
        assert sampler.sample_seed(seed) == seeds.sample_seed(seed, 0)
        assert sampler.sample_seed(seed, 3) == seeds.sample_seed(seed, 3)
    for seed, position in ((0, 0), (1 << 40, 17), ((1 << 64) - 1, 1 << 31)):
        theirs = gumbel.gumbel_noise([seed], [position], torch.arange(1001))[0].numpy()
        np.testing.assert_allclose(sampler.gumbel_noise(seed, position, 1001), theirs, rtol=1e-6)


def test_a_request_that_cannot_fit_is_refused_with_both_numbers() -> None:
    core = MODULES["engine"].EngineCore(BUNDLED, num_kv_blocks=2, block_size=8)
    params = MODULES["request"].SamplingParams
    with pytest.raises(ValueError, match="20 tokens, but the whole cache holds 16"):
        core.add("0", [5] * 5, params(max_tokens=16))
    with pytest.raises(ValueError, match="512 positions"):
        core.add("0", [5] * 500, params(max_tokens=16))
    with pytest.raises(ValueError, match="no tokens"):
        core.add("0", [], params())
    assert not core.scheduler.has_unfinished


def test_command_prints_answers_and_a_row_for_each_request(capsys: pytest.CaptureFixture[str]) -> None:
    MODULES["generate"].main(["What is a KV cache?", "What is a block table?", "--max-tokens", "12"])
    text = capsys.readouterr().out
    assert "The KV cache stores the attention keys and values" in text
    assert "  row 0  Aaaaaaaaaaaa\n  row 1  Bbbbbbbbbbbb\n  row 2  ............\n" in text
    assert "A joins row 0, B joins row 1" in text
    assert "A leaves, B leaves" in text


def test_continuous_batching_needs_fewer_steps_than_static(capsys: pytest.CaptureFixture[str]) -> None:
    MODULES["generate"].main(["--compare", "--max-tokens", "16"])
    lines = capsys.readouterr().out.splitlines()
    static, continuous = (int(line.split()[2]) for line in lines if " batching: " in line)
    assert continuous < 0.8 * static


def test_example_stays_small() -> None:
    files = sorted(FOLDER.rglob("*.py"))
    assert {path.stem for path in files} == set(MODULES)
    assert len(files) <= MOST_FILES
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_LINES


def test_example_stands_alone() -> None:
    """It imports neither the engine nor PyTorch."""
    imported = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert not imported & {"chairlift", "torch", "transformers"}
