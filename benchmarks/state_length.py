"""Compares the time per token after a long text with the time after a short text. A recurrent state does not grow with
the text.

    python benchmarks/state_length.py --rounds 7 --json state_length.json

A purely recurrent model (Mamba-2) and a Llama decode after prompts of ``--short`` and of ``--long`` tokens, interleaved
in every round. Results are the median time of a step that decodes all rows and computes no prompt, and the ratio of
long to short within each round. For a recurrent model, the two times should differ by less than 5 %. Where other
programs share the machine, ``--clock processor`` measures the processor time of all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.scheduling import turns
from chairlift import LLM, SamplingParams
from chairlift.models.random_weights import write_random_model
from chairlift_lab.bench.machine import describe_machine

VOCABULARY = 8192
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {
        **{"model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 12, "num_heads": 24, "head_dim": 64},
        **{"n_groups": 1, "state_size": 128, "expand": 2, "tie_word_embeddings": True},
    },
    "llama": {
        **{"model_type": "llama", "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 8},
        **{"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    },
}


def step_seconds(llm: LLM, rows: int, length: int, args: argparse.Namespace) -> float:
    """Median seconds of a step that decodes all ``rows``, each after a prompt of ``length`` tokens."""
    clock, generator = CLOCKS[args.clock], torch.Generator().manual_seed(length)
    for tokens in torch.randint(VOCABULARY, (rows, length), generator=generator).tolist():
        llm.engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True))
    taken = []
    while llm.engine.has_unfinished:
        begin = clock()
        llm.engine.step()
        end, step = clock(), llm.engine.step_log[-1].features
        if step.num_decodes == rows and not step.prefill_tokens:
            taken.append(end - begin)
    if len(taken) < args.tokens // 2:
        raise SystemExit(f"only {len(taken)} steps decoded all {rows} rows; take more --tokens")
    return statistics.median(taken)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--short", type=int, default=10)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = (args.short, args.long)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, config in MODELS.items():
            sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "eos_token_id": 0}
            whole = {**config, **sizes, "dtype": "bfloat16"}
            where = write_random_model(Path(directory) / name, whole, dtype="bfloat16")
            for rows in args.rows:
                llm = LLM(
                    where,
                    **{"skip_tokenizer_init": True, "threads": args.threads, "max_num_seqs": rows},
                    **{"enable_prefix_caching": False, "max_model_len": args.long + args.tokens + 16},
                )
                for number in range(-1, args.rounds):  # the first round warms up
                    for length in turns(lengths, number):
                        taken = step_seconds(llm, rows, length, args)
                        if number >= 0:
                            seconds.setdefault(f"{name} {rows} {length}", []).append(taken)
                llm.engine.core.shutdown()
                report(name, rows, seconds, lengths)
    if args.json:
        record = {"machine": describe_machine(), "settings": {**vars(args), "json": None}, "seconds": seconds}
        args.json.write_text(json.dumps(record, indent=2, default=str) + "\n")


def report(name: str, rows: int, seconds: dict[str, list[float]], lengths: tuple[int, int]) -> None:
    """Print the median step time for each prompt length, and the ratio of the long prompt's to the short prompt's."""
    short, long = (seconds[f"{name} {rows} {length}"] for length in lengths)
    ratios = sorted(b / a for a, b in zip(short, long, strict=True))
    print(
        f"{name:7s} {rows:2d} rows: behind {lengths[0]} tokens {1e3 * statistics.median(short):6.2f} ms, behind"
        f" {lengths[1]:,} tokens {1e3 * statistics.median(long):6.2f} ms, ratio {statistics.median(ratios):.3f}"
        f" ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
