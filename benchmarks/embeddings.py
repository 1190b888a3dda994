"""Embeddings of texts of log-normal lengths: flat batches, compared with padded batches of transformers.

``python benchmarks/embeddings.py [--texts N] [--size minilm|base]`` makes a random BERT, embeds the same token ids with
both, compares the vectors, and prints the times of both, in turns. The padded batches are those of
sentence-transformers (Reimers and Gurevych, 2019): texts sorted by length, 32 at a time, mean of the last hidden
states, length 1.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
from transformers import BertConfig, BertModel

from chairlift import LLM

_SIZES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
_BATCH = 32


def padded(model: BertModel, texts: Sequence[list[int]]) -> np.ndarray:
    """Embeddings computed as in sentence-transformers."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    out = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
    for first in range(0, len(texts), _BATCH):
        places = order[first : first + _BATCH]
        width = max(len(texts[place]) for place in places)
        ids, mask = torch.zeros(len(places), width, dtype=torch.int64), torch.zeros(len(places), width)
        for row, place in enumerate(places):
            ids[row, : len(texts[place])] = torch.tensor(texts[place])
            mask[row, : len(texts[place])] = 1
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
            out[places] = torch.nn.functional.normalize(mean, dim=1).numpy()
    return out


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--size", choices=tuple(_SIZES), default="minilm")
    parser.add_argument("--median", type=float, default=60.0, help="median length in tokens")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of lengths")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = BertModel(BertConfig(**_SIZES[args.size])).eval()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(args.median), args.sigma, args.texts), 3, 512).astype(int)
    texts = [rng.integers(1000, 30_000, length).tolist() for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", pooling_type="MEAN")
    print(f"{len(texts)} texts, {lengths.sum():,} tokens, median {int(np.median(lengths))}, longest {lengths.max()}")
    print(f"{args.size}, float32, {llm.info.kernels} kernels, {llm.info.threads} threads")

    def flat() -> np.ndarray:
        return np.array([each.outputs.embedding for each in llm.embed(texts)], dtype=np.float32)

    ways = {"flat": flat, "padded": lambda: padded(model, texts)}
    # Processor time is measured as well, because it is steadier on a shared machine.
    found = {name: way() for name, way in ways.items()}  # the first run is not measured
    print(f"largest difference {np.abs(found['flat'] - found['padded']).max():.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeat):
        for name, way in ways.items():
            begin, busy = time.perf_counter(), time.process_time()
            way()
            seconds[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - busy)
    for name, times in seconds.items():
        median = statistics.median(times)
        each, busy = ", ".join(f"{value:.2f}" for value in times), statistics.median(processor[name])
        rate = f"{len(texts) / median:.0f} texts/s, {lengths.sum() / median:,.0f} tokens/s"
        print(f"{name:8} {median:.2f} s (of {each}), {busy:.2f} s of processors; {rate}", flush=True)


if __name__ == "__main__":
    main()
