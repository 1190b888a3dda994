"""Code for vLLM works once its import or first word is changed, or gets an error that names the counterpart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.quantities import read_bytes, read_count
from chairlift.base.vllm_names import NAMES, SERVER_NAMES, notes, translate
from chairlift.cli.main import main
from chairlift.config import EngineConfig, SpeculativeConfig, flat_fields, server_fields
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
def test_texts_with_units_are_read_as_bytes(text: str, number: int) -> None:
    assert read_bytes("x", text) == number


@pytest.mark.parametrize("text", ["", "GB", "4 XB", "-1", "1e-9", "0.3", "nan", "1.0001kb", "4GB4"])
def test_a_text_that_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="x must be a number of bytes, or a size such as 512MB or 4GiB; got"):
        read_bytes("x", text)


def settings_in(dry_run: str) -> list[str]:
    """The settings of a dry run, without the comments that name their sources."""
    return [line.split("  # ")[0] for line in dry_run.splitlines()]


def test_texts_with_units_are_read_as_counts() -> None:
    texts = {"32k": 32000, "32K": 32768, "1.5k": 1500, "1m": 10**6, "12": 12, "1e6": 10**6, "2.5E3": 2500, "-1": -1}
    assert {text: read_count("x", text) for text in texts} == texts
    with pytest.raises(ConfigError, match="such as 32k"):
        read_count("x", "32kb")


def test_settings_flags_and_files_take_amounts_with_units(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig.from_flat({"kv_cache_memory_bytes": "4GB", "max_model_len": "32k"})
    assert (config.cache.kv_cache_memory_bytes, config.model.max_model_len) == (4 * 1000**3, 32000)
    file = tmp_path / "settings.yaml"
    file.write_text("kv-cache-memory-bytes: 64MB\nmax-body-bytes: 2MiB\nenforce-eager: true\n")
    assert main(["serve", "--config", str(file), "--max-num-batched-tokens", "4k", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    lines = settings_in(out)
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
    out = settings_in(capsys.readouterr().out)
    assert {"max_num_seqs: 100", "max_connections: 2000", "seed: -3"} <= set(out)
    assert EngineConfig.from_flat({"max_num_seqs": "1K"}).scheduler.max_num_seqs == 1024


def test_no_name_is_known_to_both() -> None:
    ours = {flag.name for flag in (*flat_fields(), *server_fields())}
    assert not ours & (set(NAMES) | set(SERVER_NAMES)) and not set(NAMES) & set(SERVER_NAMES)
    for name, known in (NAMES | SERVER_NAMES).items():
        assert known.instead or known.accepted is None or known.accepted == (), name
        assert known.why or known.accepted == (), name


def test_vllms_image_settings_are_translated_noted_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_vllms_settings_are_translated_to_ours() -> None:
    given = {"swap_space": 4, "enforce_eager": True, "num_gpu_blocks_override": 9, "task": "embed", "max_num_seqs": 3}
    assert translate(given) == {
        "swap_space_bytes": 4 * 2**30,
        "cuda_graphs": "off",
        "num_kv_blocks": 9,
        "runner": "pooling",
        "max_num_seqs": 3,
    }
    assert translate({"enforce_eager": False, "pipeline_parallel_size": None}) == {}
    assert len(notes(given)) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2, which is not offered: one model runs",
        ),
        ({"enable_chunked_prefill": False}, "always computed in chunks"),
        ({"quantization": "awq"}, "found in its files; leave quantization out"),
        ({"quantization": "modelopt_fp4"}, "quantization is 'modelopt_fp4'.*leave quantization out"),
        ({"quantization": "AWQ"}, "quantization is 'AWQ'.*found in its files"),
        ({"quantization": "iq4_xs"}, r"^IQ4_XS is a type of GGUF files.*FILE\.gguf or OWNER/NAME:IQ4_XS as model"),
        ({"quantization": "Q4_K_M"}, "^Q4_K_M is a type of GGUF files.*leave quantization out .it is 'Q4_K_M'"),
        ({"quantization": "q8_0"}, "^Q8_0 is a type of GGUF files.*round a model as it is loaded: int8, int4 or fp8"),
        ({"quantization": "iq2_xxs"}, "^IQ2_XXS is a type of GGUF files"),
        ({"quantization": "ud-q4_k_xl"}, "^UD-Q4_K_XL is a type of GGUF files"),
        ({"quantization": "tq1_0"}, "^TQ1_0 is a type of GGUF files"),
        ({"quantization": "gguf"}, "^GGUF files carry their own format.*OWNER/NAME:Q4_K_M"),
        ({"quantization": "int3"}, "^quantization must be one of"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is 'fp8_e4m3'.*write int8"),
        ({"kv_cache_dtype": "bfloat16"}, "write auto, and bfloat16 as dtype"),
        ({"task": "transcribe"}, "known: auto, generate, embed"),
        ({"trust_remote_code": "yes"}, "must be of type bool, got 'yes'"),
        ({"pipeline_parallel_size": True}, "must be of type int, got True"),
        ({"enforce_eager": True, "cuda_graphs": "lazy"}, "vLLM's name for cuda_graphs, and both are given"),
        ({"load_format": "pt"}, "only safetensors and GGUF"),
    ],
)
def test_vllms_settings_with_another_result_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat(settings)


def speculation(**settings: Any) -> SpeculativeConfig:
    found = EngineConfig.from_flat({"speculative_config": json.dumps({"method": "ngram", **settings})})
    parsed = found.scheduler.speculation
    assert parsed is not None
    return parsed


def test_the_longest_match_of_vllm_is_the_shortest_where_no_other_is_given() -> None:
    assert speculation(prompt_lookup_max=4).prompt_lookup_min == 4
    assert speculation(prompt_lookup_max=4, prompt_lookup_min=2).prompt_lookup_min == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "at least prompt_lookup_min; got 2 and 3"),
        ({"prompt_lookup_max": "4"}, "must be a whole number"),
        ({"prompt_lookup_max": True}, "must be a whole number"),
        ({"disable_by_batch_size": 8}, "disable_by_batch_size is a key of vLLM: .*the load of each step; leave it out"),
        ({"draft_tensor_parallel_size": 1}, "one model runs on one device"),
        ({"anything": 1}, r"unknown keys \['anything'\]"),
    ],
)
def test_other_keys_of_vllms_speculation_are_explained(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        speculation(**settings)


def test_values_of_vllm_are_explained_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--quantization", "awq", "--dry-run"]) == 2
    assert "the format of a quantised checkpoint is found in its files" in capsys.readouterr().err
    assert main(["serve", "--quantization", "iq4_xs", "--dry-run"]) == 2
    assert "--quantization: IQ4_XS is a type of GGUF files" in capsys.readouterr().err
    assert main(["serve", "--kv-cache-dtype", "fp8", "--dry-run"]) == 2
    assert "write int8, or auto" in capsys.readouterr().err
    assert main(["serve", "--kv-cache-dtype", "int7", "--dry-run"]) == 2
    assert "invalid choice: 'int7'" in capsys.readouterr().err
    assert main(["serve", "--ngram-prompt-lookup-max", "4", "--dry-run"]) == 2
    assert "is a flag of vLLM: write --speculative-config" in capsys.readouterr().err


def test_a_script_for_vllm_runs_unchanged() -> None:
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


def test_a_command_line_for_vllm_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bundled", "--served-model-name", "a", "b", "-tp", "1", "--trust-remote-code", "--enforce-eager"]
    assert main(["serve", *words, "--no-enable-log-requests", "--dry-run"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["serve", *words, "--disable-log-requests", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert 'served_model_name: ["a", "b"]' in out
    assert "chairlift: trust_remote_code True is accepted: code in a model's directory is never run" in err
    assert len(err.splitlines()) == 3
    assert main(["serve", "bundled", "--pipeline-parallel-size", "2", "--dry-run"]) == 2
    assert "a proxy before them" in capsys.readouterr().err


def test_names_that_may_have_taken_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--served-model-name", "a", "org/model", "--dry-run"]) == 2
    assert "(a, org/model), and no model is given; write the model first" in capsys.readouterr().err
    assert main(["serve", "--served-model-name", "a", "--served-model-name", "b", "--dry-run"]) == 0


def test_names_of_ours_are_not_vllms_alone() -> None:
    ours = {flag.name for flag in (*flat_fields(), *server_fields())}
    assert not ours & (NAMES.keys() | SERVER_NAMES.keys())
