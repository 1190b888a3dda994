"""Measures the image encoder's speed compared with transformers, and the pauses of text streams while images arrive.

``python benchmarks/images.py [--images N] [--pixels P] [--streams N] [--tokens N]`` makes a random Qwen3-VL with the
encoder of the published 2B model and a text model like SmolLM-135M's. First, Chairlift and transformers encode the same
images in turns, one at a time, with the same number of threads. Then text streams run in turns alone, with arriving
images, and with arriving text prompts of as many tokens as a prompt with an image. The gap between two tokens of a
stream is measured. The script prints medians, ratios, the number of answered images and the difference of the encoded
rows. A run in which few images are answered says little: raise ``--tokens``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from chairlift import LLM, SamplingParams
from chairlift.models.hf_config import read_hf_config
from chairlift.models.vision.vision_files import load_tower, read_processor
from chairlift.text.tokenizer.byte_level import byte_tokenizer

_SPECIAL = ("<|im_end|>", "<|image_pad|>")
_MEAN = [0.5, 0.5, 0.5]


def write_model(folder: Path) -> Any:
    """Write the random model and its files, unless they exist. Returns the model as a transformers object."""
    if (folder / "tokenizer_config.json").is_file():
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text = {
        "vocab_size": 256 + len(_SPECIAL),
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10]},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    vision = {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, image_token_id=257)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    settings = {"size": {"shortest_edge": 1024, "longest_edge": 2**24}, "image_mean": _MEAN, "image_std": _MEAN}
    settings |= {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    byte_tokenizer(_SPECIAL, eos="<|im_end|>").backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return model


def in_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Run all ``ways`` in each round, in an order that changes from round to round. Returns name of a way -> its result
    in each round."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for index in range(rounds):
        for name in list(ways)[:: 1 if index % 2 else -1]:
            found[name].append(ways[name]())
    return found


def compare_encoders(folder: Path, model: Any, images: Sequence[Image.Image], rounds: int) -> int:
    """Print images per second of both encoders, and their ratio. Returns the number of prompt positions of an image."""
    processor = read_processor(folder, byte_tokenizer(_SPECIAL, eos="<|im_end|>"))
    assert processor is not None
    tiles = [processor.prepare("it", image).tiles[0] for image in images]
    tower = load_tower(folder, read_hf_config(folder), torch.float32)
    theirs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tile in tiles:
        rows, columns = tile.grid
        pixels = torch.frombuffer(bytearray(tile.pixels), dtype=torch.uint8).view(3, rows * 16, columns * 16)
        parts = (pixels / 255 - 0.5).div(0.5).view(3, rows // 2, 2, 16, columns // 2, 2, 16)
        patches = parts.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, 256).repeat(1, 1, 2, 1).flatten(1)
        theirs.append((patches, torch.tensor([[1, rows, columns]])))

    def ours() -> tuple[float, Any]:
        begin = time.perf_counter()
        found = [list(tower.encode(tile))[-1] for tile in tiles]
        return time.perf_counter() - begin, found[0]

    def other() -> tuple[float, Any]:
        begin = time.perf_counter()
        with torch.inference_mode():
            found = [model.model.visual(patches, grid_thw=grid) for patches, grid in theirs]
        return time.perf_counter() - begin, torch.cat([found[0].pooler_output, *found[0].deepstack_features], 1)

    found = in_turns({"chairlift": ours, "transformers": other}, rounds + 1)
    times = {name: [each[0] for each in results[1:]] for name, results in found.items()}  # the first is not measured
    difference = (found["chairlift"][0][1] - found["transformers"][0][1]).abs().max()
    patches = sum(tile.grid[0] * tile.grid[1] for tile in tiles) // len(tiles)
    for name, seconds in times.items():
        print(f"{name}: {len(tiles) / statistics.median(seconds):.2f} images/s of {patches} patches")
    ratios = sorted(b / a for a, b in zip(times["chairlift"], times["transformers"], strict=True))
    middle = statistics.median(ratios)
    print(f"ratio {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); largest difference {difference:.1e}", flush=True)
    return patches // 4


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the text streams."""

    p99: float
    """p99 of the gaps between two tokens of a stream, in seconds."""
    answered: int
    """Number of the other requests that were answered while the streams ran."""
    seconds: float
    """Time from the first arrival of another request to the end of the streams."""


def run_streams(llm: LLM, streams: int, tokens: int, arrivals: Sequence[Any], seed: int) -> Run:
    """Run text streams. A prompt of ``arrivals`` arrives at every second step, starting at the tenth."""
    engine, rng = llm.engine, np.random.default_rng(seed)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    texts = {
        engine.add_request({"prompt_token_ids": rng.integers(0, 256, 64).tolist()}, params) for _ in range(streams)
    }
    last: dict[str, float] = {}
    gaps, left, answered, steps, start = list[float](), list(arrivals), 0, 0, 0.0
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = set[str]()
    while texts:
        steps += 1
        if steps == 11:
            start = time.perf_counter()
        if left and steps > 10 and steps % 2:
            asked.add(engine.add_request(left.pop(), short))
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id in texts:
                if output.request_id in last and steps > 10:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
                if output.finished:
                    texts.discard(output.request_id)
            answered += output.request_id in asked and output.finished
    seconds = time.perf_counter() - start
    for request_id in asked:
        engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()
    return Run(float(np.percentile(gaps, 99)), answered, seconds)


def report(found: dict[str, list[Run]], arrivals: int) -> None:
    """Print the gaps, the answered requests, and the ratios of the gaps to those of the streams alone."""
    for way, runs in found.items():
        listed = ", ".join(f"{1000 * run.p99:.1f}" for run in runs)
        line = f"{way}: p99 of gaps {listed} ms"
        if way != "alone":
            rate = statistics.median(run.answered / run.seconds for run in runs)
            line += f"; answered of {arrivals} meanwhile: {[run.answered for run in runs]}, {rate:.2f} a second"
            ratios = sorted(run.p99 / alone.p99 for run, alone in zip(runs, found["alone"], strict=True))
            line += f"; ratio to alone {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(line)


def main() -> None:
    """Measure, and print one line per result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--pixels", type=int, default=160, help="pixels of a side")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, help="max_num_batched_tokens; default: the engine's")
    parser.add_argument("--folder", type=Path, help="keep the random model here, and use it if it is there already")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    count = args.images * (args.rounds + 1)  # no image comes twice
    pixels = rng.integers(0, 256, (count, args.pixels, args.pixels, 3), dtype=np.uint8)
    images = [Image.fromarray(each) for each in pixels]
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        model = write_model(folder)
        length = 3 + compare_encoders(folder, model, images[:4], args.rounds)
        del model
        budget = {} if args.budget is None else {"max_num_batched_tokens": args.budget}
        llm = LLM(folder, dtype="float32", max_num_seqs=args.streams + 8, enable_prefix_caching=False, **budget)
    left = [{"prompt_token_ids": [1, 257, 2, 3], "multi_modal_data": {"image": image}} for image in images]

    def run(arrivals: Sequence[Any]) -> Run:
        return run_streams(llm, args.streams, args.tokens, arrivals, 1)

    def texts() -> Run:
        return run([{"prompt_token_ids": rng.integers(0, 256, length).tolist()} for _ in range(args.images)])

    run_streams(llm, args.streams, 30, [], 0)  # not measured
    ways = {
        "alone": lambda: run([]),
        "with images": lambda: run([left.pop() for _ in range(args.images)]),
        f"with texts of {length} tokens": texts,
    }
    report(in_turns(ways, args.rounds), args.images)


if __name__ == "__main__":
    main()
