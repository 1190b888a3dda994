"""Decode steps of recurrent and hybrid models, compared with the memory floor and with transformers.

    python benchmarks/recurrent_decode.py                                    # all shapes; 1, 16 and 64 rows
    python benchmarks/recurrent_decode.py --shapes mamba2-370m --rows 16 --rounds 5 --json decode.json

Models have the sizes of published ones and random weights in bfloat16. In every round Chairlift and transformers'
``generate`` answer prompts of ``--prompt`` tokens in turns, all rows at once. A figure is the median time from one
token of all rows to the next. The floor reads the weights once, and reads and writes the states, or computes the
products; bandwidth and peak are measured between the runs. Where other programs share the machine, ``--clock processor
--threads 1`` measures the processor time of one thread everywhere, the limits included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.scheduling import turns
from chairlift import LLM, SamplingParams
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.roof import Roof, product_kind
from chairlift.models.hf_config import parse_config
from chairlift.models.random_weights import write_random_model
from chairlift.models.step_cost import ModelCost
from chairlift_lab.bench.machine import describe_machine

COMMON = {
    **{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 8192},
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2-370m": {
        **{"model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 48, "num_heads": 32, "head_dim": 64},
        **{"n_groups": 1, "state_size": 128, "expand": 2, "vocab_size": 50_288, "chunk_size": 16},
    },
    "lfm2-350m": {
        **{"model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 4608},
        **{"block_auto_adjust_ff_dim": False, "num_attention_heads": 16, "num_key_value_heads": 8, "conv_L_cache": 3},
        **{"layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]},
        **{"vocab_size": 65_536, "norm_eps": 1e-5, "conv_bias": False},
    },
    "qwen3.5-0.8b": {
        **{"model_type": "qwen3_5_text", "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 4},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
        **{"layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(24)]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}

_BUFFER, _TRIALS, _MOMENT = 256 << 20, 5, 0.01
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
Times = list[float]
Answer = Callable[[list[list[int]], int], Times]
"""Function from (token ids of each prompt, number of output tokens per prompt) to the times at which every row had a
further token."""


def ours(model: Path, args: argparse.Namespace) -> tuple[LLM, Answer]:
    """(engine of Chairlift, function that answers prompts with it). The engine has room for the largest batch."""
    # Blocks for more than the texts need, because a request joins only if some blocks stay free.
    longest, clock = 2 * (args.prompt + args.tokens) + 16, CLOCKS[args.clock]
    sizes = {"max_num_seqs": max(args.rows), "max_model_len": longest, "kv_cache_memory_bytes": args.cache << 20}
    llm = LLM(model, threads=args.threads, skip_tokenizer_init=True, enable_prefix_caching=False, **sizes)

    def answer(prompts: list[list[int]], count: int) -> Times:
        times: Times = []
        for tokens in prompts:
            llm.engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        while llm.engine.has_unfinished:
            llm.engine.step()
            step = llm.engine.step_log[-1].features
            if step.num_decodes == len(prompts) and not step.prefill_tokens:
                times.append(clock())
        return times

    return llm, answer


def theirs(model: Path, args: argparse.Namespace) -> Answer:
    """Function that answers prompts with transformers' ``generate`` and its own cache."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    clock = CLOCKS[args.clock]
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def answer(prompts: list[list[int]], count: int) -> Times:
        times: Times = []

        def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            times.append(clock())
            return scores

        ids = torch.tensor(prompts)
        options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "eos_token_id": None}
        with torch.inference_mode():
            network.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[note], **options)
        return times

    return answer


def step_seconds(answer: Answer, rows: int, args: argparse.Namespace, vocabulary: int) -> float:
    """Median time between two steps that give every row one more token."""
    generator = torch.Generator().manual_seed(rows)
    prompts = torch.randint(vocabulary, (rows, args.prompt), generator=generator).tolist()
    times = answer(prompts, args.tokens)
    steps = [later - earlier for earlier, later in pairwise(times)]
    if len(steps) < args.tokens // 2:
        raise SystemExit(f"only {len(steps)} steps decoded all {rows} rows; take more --tokens or --cache")
    return statistics.median(steps)


def floor_seconds(
    cost: ModelCost, rows: int, args: argparse.Namespace, pool: lib.ThreadPool, memory: lib.Memory
) -> float:
    """Minimum time of a step that decodes ``rows`` rows in the middle of their answers, computed from the limits of the
    machine that are measured now."""
    library, clock = lib.require(), CLOCKS[args.clock]

    def best(measure: Callable[[], float]) -> float:
        """Highest of several measured rates, converted to units per second of the chosen clock."""
        rates = []
        for _ in range(_TRIALS):
            begin, passed = clock(), time.perf_counter()
            rate = measure()
            rates.append(rate * (time.perf_counter() - passed) / (clock() - begin))
        return max(rates)

    isa = lib.best_isa()
    path, product = lib.ISA_NAMES.index(isa), lib.PRODUCTS.index(product_kind(isa, torch.bfloat16))
    roof = Roof(
        best(lambda: library.cl_measure_read(pool.handle, memory.address, memory.nbytes)),
        best(lambda: library.cl_measure_peak(pool.handle, path, product, _MOMENT)),
    )
    return cost.least_seconds(roof, rows, rows, rows * cost.kv_read(args.prompt + args.tokens // 2))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--cache", type=int, default=4096, help="MiB for K, V and states")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--layers", type=int, help="fewer layers than the published model has")
    parser.add_argument("--models", type=Path, help="folder that keeps the models for the next run")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, (args.models or Path(folder)) / name, args, figures)
    if args.json:
        record = {"machine": describe_machine(), "settings": {**vars(args), "json": None}, "figures": figures}
        args.json.write_text(json.dumps(record, indent=2, default=str) + "\n")


def measure(name: str, folder: Path, args: argparse.Namespace, figures: dict[str, list[dict[str, float]]]) -> None:
    """Measure a shape with every number of rows, in turns, and print a line for each."""
    config = {**COMMON, **SHAPES[name]}
    if args.layers:
        config["num_hidden_layers"] = args.layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: args.layers]
    cost = ModelCost.of(parse_config(config), torch.bfloat16)
    if not (folder / "config.json").exists():
        write_random_model(folder, config, dtype="bfloat16")
    states = sum(nbytes for window, nbytes in cost.kv_bytes if window == 1)
    print(f"{name}: weights {cost.weight_bytes / 2**20:,.0f} MiB, states {states / 2**20:.1f} MiB a row and step")
    answers: dict[str, Answer] = {} if args.alone else {"transformers": theirs(folder, args)}
    llm, answers["chairlift"] = ours(folder, args)
    pool, memory = lib.ThreadPool(args.threads), lib.Memory(_BUFFER)
    memory.tensor(torch.uint8, (memory.nbytes,)).fill_(1)  # unwritten pages are all the same physical page
    for rows in args.rows:
        found: list[dict[str, float]] = []
        for number in range(-1, args.rounds):  # the first round warms up
            taken = {
                who: step_seconds(answers[who], rows, args, config["vocab_size"]) for who in turns([*answers], number)
            }
            taken["floor"] = floor_seconds(cost, rows, args, pool, memory)
            if number >= 0:
                found.append(taken)
        figures[f"{name} {rows}"] = found
        report(rows, found)
    pool.close()
    llm.engine.core.shutdown()


def report(rows: int, found: list[dict[str, float]]) -> None:
    """Print the median times, and the median and range of the ratios within rounds."""
    line = f"{rows:4d} rows: " + ", ".join(
        f"{who} {1e3 * statistics.median(each[who] for each in found):.2f} ms" for who in found[0]
    )
    for title, above, below in (
        ("share of the floor", "floor", "chairlift"),
        ("speed-up", "transformers", "chairlift"),
    ):
        if above in found[0]:
            ratios = sorted(each[above] / each[below] for each in found)
            line += f", {title} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(line, flush=True)


if __name__ == "__main__":
    main()
