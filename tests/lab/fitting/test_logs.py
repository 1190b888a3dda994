"""Lines of vLLM's and SGLang's logs, in the forms that their versions print."""

from __future__ import annotations

import pytest

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.sglang_log import is_sglang_log, read_sglang_log
from chairlift_lab.fitting.vllm_log import is_vllm_log, read_vllm_log


def vllm(index: int, prompts: tuple[int, int], rows: int, ms: str, usage: float) -> str:
    """A line of vLLM 0.32: ``prompts`` are (requests, tokens)."""
    return (
        f"(APIServer pid=5) INFO 11-30 10:00:01 [loggers.py:201] Engine 000: Iteration({index}): {prompts[0]} context"
        f" requests, {prompts[1]} context tokens, {rows} generation requests, {rows} generation tokens, iteration"
        f" elapsed time: {ms}, GPU KV cache usage: {usage:.1f}%\n"
    )


VLLM = (
    "(EngineCore pid=7) INFO 11-30 10:00:00 [kv_cache_utils.py:2328] GPU KV cache size: 10,000 tokens\n"
    + vllm(0, (2, 300), 0, "40.50 ms", 3.0)
    + vllm(1, (1, 100), 2, "21.25 ms", 4.0)
    + vllm(2, (0, 0), 3, "9.00 ms", 4.1)
    + vllm(3, (0, 0), 0, "1.00 ms (dummy)", 0.0)
)
OLD_VLLM = (
    "INFO 02-05 12:00:00 [core.py:182] Iteration(12): 1 context requests, 2048 context tokens, 4 generation requests,"
    " 4 generation tokens, iteration elapsed time: 10.00 ms"
)


def test_vllm_lines_are_steps() -> None:
    assert is_vllm_log(VLLM) and not is_sglang_log(VLLM)
    run = read_vllm_log("a.log", VLLM)
    assert run.steps == [
        (StepFeatures(0, 0, 300, 300 * 151 / 2), 0.0405),
        (StepFeatures(2, 300, 100, 100 * 101 / 2), 0.02125),
        (StepFeatures(3, 410, 0, 0.0), 0.009),
    ]
    assert list(run.unknown) == ["pair"]
    on_cpu = read_vllm_log("a.log", VLLM.replace("GPU KV", "CPU KV"))
    assert on_cpu.steps == run.steps


def test_a_vllm_log_without_usage_has_no_positions() -> None:
    run = read_vllm_log("a.log", OLD_VLLM)
    assert run.steps == [(StepFeatures(4, 0, 2048, 2048 * 2049 / 2), 0.01)]
    assert "neither the size of the KV cache nor its usage" in run.unknown["context"]


def test_a_vllm_log_with_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.log: 1 of 1 steps .* the engine speculates"):
        read_vllm_log("x.log", OLD_VLLM.replace("4 generation tokens", "9 generation tokens"))


def test_a_vllm_log_whose_times_are_rests_is_refused() -> None:
    """With asynchronous scheduling, an iteration is only the wait for a result."""
    lines = [
        OLD_VLLM.replace("12:00:00", f"12:00:{index // 50:02d}").replace("10.00 ms", "0.03 ms") for index in range(400)
    ]
    with pytest.raises(ConfigError, match="Start vLLM with --no-async-scheduling"):
        read_vllm_log("x.log", "\n".join(lines))
    whole = "\n".join(line.replace("0.03 ms", "19.00 ms") for line in lines)
    assert len(read_vllm_log("x.log", whole).steps) == 400


def sglang(*lines: str) -> str:
    return "".join(f"[2026-05-27 20:14:38 TP0] {line}\n" for line in lines)


def decode(rows: int, tokens: int, rate: float, stop: str = ".") -> str:
    return (
        f"Decode batch{stop} #running-req: {rows}, #token: {tokens}, token usage: 0.41, cuda graph: True,"
        f" gen throughput (token/s): {rate:.2f}, #queue-req: 0,"
    )


def prefill(tokens: int) -> str:
    return (
        f"Prefill batch. #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.02, #running-req: 8,"
        " #queue-req: 0,"
    )


@pytest.mark.parametrize("stop", [".", ",", " [124],"])
def test_sglang_lines_are_mean_steps(stop: str) -> None:
    """Steps of 10 ms with 8 rows: 800 tokens/s. A prefill of 1,000 tokens adds 200 ms to the 400 ms of 40 steps."""
    lines = [decode(8, 1000 + 320 * index, 800.0, stop) for index in range(10)]
    lines += [prefill(1000), decode(8, 4200, 8 * 40 / 0.6, stop)]
    text = sglang(*lines)
    assert is_sglang_log(text) and not is_vllm_log(text)
    run = read_sglang_log("s.log", text)
    assert [step for step, _ in run.steps[:2]] == [StepFeatures(8, 1320), StepFeatures(8, 1640)]
    assert [seconds for _, seconds in run.steps[:9]] == pytest.approx([0.01] * 9)
    step, seconds = run.steps[9]
    assert step == StepFeatures(0, 0, 1000, 1000 * 1001 / 2) and seconds == pytest.approx(0.2, rel=1e-3)


def test_sglang_lines_whose_rows_changed_are_left_out() -> None:
    lines = [decode(8, 1000, 800.0)] * 10 + [decode(16, 1000, 800.0)] + [decode(16, 1000, 1600.0)] * 2
    steps = read_sglang_log("s.log", sglang(*lines)).steps
    assert [step.num_decodes for step, _ in steps] == [8] * 9 + [16] * 2


def test_an_sglang_log_that_cannot_be_fitted_is_refused() -> None:
    drafts = decode(8, 1000, 800.0).replace("cuda graph", "accept len: 2.40, cuda graph")
    with pytest.raises(ConfigError, match="accept len, so the engine speculates"):
        read_sglang_log("s.log", sglang(*[drafts] * 20))
    with pytest.raises(ConfigError, match=r"3 pairs of decode lines .* a fit needs 8"):
        read_sglang_log("s.log", sglang(*[decode(8, 1000, 800.0)] * 4))
    with pytest.raises(ConfigError, match="lacks #new-token"):
        read_sglang_log("s.log", sglang("Decode batch. #running-req: 8, token usage: 0.4"))


def test_the_interval_of_sglang_lines_matters_only_for_prefill() -> None:
    lines = [decode(8, 1000, 800.0)] * 10 + [prefill(1000), decode(8, 1000, 8 * 10 / 0.3)]
    steps = read_sglang_log("s.log", sglang(*lines), steps_per_line=10).steps
    assert steps[-1][1] == pytest.approx(0.2, rel=1e-3)
