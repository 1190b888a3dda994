"""Code for vLLM works once its import or first word is changed, or gets an error that names the counterpart."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.quantities import read_bytes, read_count
from chairlift.base.vllm_names import NAMES, SERVER_NAMES, notes, translate
from chairlift.cli.main import main
from chairlift.config import EngineConfig, flat_fields, server_fields
from chairlift.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4GB", 4 * 1000**3),
        ("4gb", 4 * 1000**3),
        ("4GiB", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("1.5 MiB", 1536 * 1024),
        ("1_000", 1000),
        ("7", 7),
        ("7b", 7),
        ("1e9", 10**9),
        ("1.5e3", 1500),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert read_bytes("x", text) == number


@pytest.mark.parametrize("text", ["", "GB", "4 XB", "-1", "1e-9", "0.3", "nan", "1.0001kb", "4GB4"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="x must be a number of bytes, or a size such as 512MB or 4GiB; got"):
        read_bytes("x", text)


def test_counts() -> None:
    texts = {"32k": 32000, "32K": 32768, "1.5k": 1500, "1m": 10**6, "12": 12, "1e6": 10**6, "2.5E3": 2500, "-1": -1}
    assert {text: read_count("x", text) for text in texts} == texts
    with pytest.raises(ConfigError, match="such as 32k"):
        read_count("x", "32kb")


def test_amounts_in_settings_flags_and_files(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig.from_flat({"kv_cache_memory_bytes": "4GB", "max_model_len": "32k"})
    assert (config.cache.kv_cache_memory_bytes, config.model.max_model_len) == (4 * 1000**3, 32000)
    file = tmp_path / "settings.yaml"
    file.write_text("kv-cache-memory-bytes: 64MB\nmax-body-bytes: 2MiB\nenforce-eager: true\n")
    assert main(["serve", "--config", str(file), "--max-num-batched-tokens", "4k", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    for line in ("kv_cache_memory_bytes: 64000000", "max_body_bytes: 2097152", "max_num_batched_tokens: 4000"):
        assert line in lines
    assert 'cuda_graphs: "off"' in lines and "enforce_eager True is accepted" in err
    assert main(["serve", "--swap-space-bytes", "4 XB", "--dry-run"]) == 2
    assert "--swap-space-bytes: must be a number of bytes, or a size such as 512MB" in capsys.readouterr().err


def test_every_whole_number_of_every_command_is_read_alike(capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag with a whole number takes 4k, 32K, 1_000 and 1e3, and refuses the same texts."""
    for command, flags in (
        (["serve", "--dry-run"], ("--max-num-seqs", "--block-size", "--port", "--max-connections", "--replicas")),
        (["sim", "--machine", "h100-sxm"], ("--num-prompts", "--seed", "--max-num-seqs")),
        (["bench", "offline", "hashlm"], ("--num-prompts", "--rounds", "--max-concurrency")),
        (["bench", "serve"], ("--num-prompts", "--rounds", "--num-warmups")),
        (["generate", "hi"], ("--max-tokens", "--top-k", "--n", "--threads")),
        (["trace", "draw", "--workload", "chat"], ("--num-prompts", "--seed")),
        (["trace", "record"], ("--requests", "--block-size")),
    ):
        for flag in flags:
            assert main([*command, flag, "4 apples"]) == 2
            err = capsys.readouterr().err
            assert flag in err and "whole number" in err, err
    assert main(["serve", "--dry-run", "--max-num-seqs", "1e2", "--max-connections", "2k", "--seed", "-3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert {"max_num_seqs: 100", "max_connections: 2000", "seed: -3"} <= set(out)
    assert EngineConfig.from_flat({"max_num_seqs": "1K"}).scheduler.max_num_seqs == 1024


def test_no_name_is_known_to_both() -> None:
    ours = {flag.name for flag in (*flat_fields(), *server_fields())}
    assert not ours & (set(NAMES) | set(SERVER_NAMES)) and not set(NAMES) & set(SERVER_NAMES)
    for name, known in (NAMES | SERVER_NAMES).items():
        assert known.instead or known.accepted is None or known.accepted == (), name
        assert known.why or known.accepted == (), name


def test_settings_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate({"limit_mm_per_prompt": {"image": 2}, "mm_processor_kwargs": {}}) == {}
    assert notes({"limit_mm_per_prompt": {"image": 2}})[0].startswith("limit_mm_per_prompt {'image': 2} is accepted: a")
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs is .* not offered: .*preprocessor_config\.json"):
        translate({"mm_processor_kwargs": {"max_pixels": 9}})
    with pytest.raises(ConfigError, match="limit_mm_per_prompt must be of type dict, got 2"):
        translate({"limit_mm_per_prompt": 2})
    assert main(["serve", "--limit-mm-per-prompt", '{"image": 2}', "--dry-run"]) == 0
    assert "a prompt may have up to 64 images" in capsys.readouterr().err
    assert main(["serve", "--limit-mm-per-prompt", "image=2", "--dry-run"]) == 2
    assert "--limit-mm-per-prompt: must be a JSON object, got 'image=2'" in capsys.readouterr().err


def test_what_is_translated() -> None:
    given = {"swap_space": 4, "enforce_eager": True, "num_gpu_blocks_override": 9, "task": "embed", "max_num_seqs": 3}
    assert translate(given) == {
        "swap_space_bytes": 4 * 2**30,
        "cuda_graphs": "off",
        "num_kv_blocks": 9,
        "runner": "pooling",
        "max_num_seqs": 3,
    }
    assert translate({"enforce_eager": False, "tensor_parallel_size": None}) == {}
    assert len(notes(given)) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, which is not offered: one model runs on one device"),
        ({"enable_chunked_prefill": False}, "always computed in chunks"),
        ({"quantization": "awq"}, "found in its files; leave quantization out"),
        ({"task": "transcribe"}, "known: auto, generate, embed"),
        ({"trust_remote_code": "yes"}, "must be of type bool, got 'yes'"),
        ({"tensor_parallel_size": True}, "must be of type int, got True"),
        ({"enforce_eager": True, "cuda_graphs": "lazy"}, "vLLM's name for cuda_graphs, and both are given"),
        ({"load_format": "pt"}, "only safetensors and GGUF"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(settings)


def test_a_script_for_vllm() -> None:
    llm = LLM(
        tensor_parallel_size=1,
        trust_remote_code=False,
        enforce_eager=True,
        enable_chunked_prefill=True,
        swap_space=0.01,
        disable_log_stats=True,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes="8MiB",
    )
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=True, logits_processors=[])
    (output,) = llm.generate("A batch", params)
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    assert tokenizer.encode("A batch") == output.prompt_token_ids
    with pytest.raises(RequestError, match=r"get_tokenizer\(\)\.encode"):
        llm.encode("A batch")
    with pytest.raises(RequestError, match="may be 'embed' or 'classify'"):
        llm.encode("A batch", pooling_task="token_embed")
    with pytest.raises(RequestError, match=r"no beam search.*cumulative_logprob"):
        llm.beam_search(["A batch"], None)


def test_a_command_line_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bundled", "--served-model-name", "a", "b", "-tp", "1", "--trust-remote-code", "--enforce-eager"]
    assert main(["serve", *words, "--no-enable-log-requests", "--dry-run"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["serve", *words, "--disable-log-requests", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert 'served_model_name: ["a", "b"]' in out
    assert "chairlift: trust_remote_code True is accepted: code in a model's directory is never run" in err
    assert len(err.splitlines()) == 4
    assert main(["serve", "bundled", "--tensor-parallel-size", "2", "--dry-run"]) == 2
    assert "a proxy before them" in capsys.readouterr().err


def test_names_that_may_have_taken_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--served-model-name", "a", "org/model", "--dry-run"]) == 2
    assert "(a, org/model), and no model is given; write the model first" in capsys.readouterr().err
    assert main(["serve", "--served-model-name", "a", "--served-model-name", "b", "--dry-run"]) == 0


def test_names_of_ours_are_not_vllms_alone() -> None:
    ours = {flag.name for flag in (*flat_fields(), *server_fields())}
    assert not ours & (NAMES.keys() | SERVER_NAMES.keys())
