"""Embeddings of texts of log-normal lengths: flat batches, compared with padded batches of sentence-transformers.

``python benchmarks/embeddings.py [--texts N] [--size minilm|base]`` makes a random BERT in which each token is a word,
embeds the same texts in both ways in turn, compares the vectors, and prints the times and their ratio.
sentence-transformers (Reimers and Gurevych, 2019) computes the padded batches if it is installed: texts sorted by
length, 32 at a time, the mean of the last hidden states, scaled to length 1. If it is not installed, transformers
computes the same batches from token ids.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from chairlift import LLM

_SIZES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
_BATCH = 32


def padded(model: BertModel, texts: Sequence[list[int]]) -> np.ndarray:
    """Embeddings in padded batches, computed as in sentence-transformers."""
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


def write_tokenizer(folder: str, vocab_size: int) -> None:
    """Write a tokenizer in which token 7 is the word ``w7``. It adds no special tokens."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w100"))
    words.pre_tokenizer = WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", model_max_length=512)
    whole.save_pretrained(folder)


def sentence_transformers(folder: str, width: int) -> Callable[[Sequence[str]], np.ndarray]:
    """Function that embeds texts with sentence-transformers, using the model in ``folder``."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    model = SentenceTransformer(modules=[Transformer(folder), Pooling(width, "mean"), Normalize()], device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=_BATCH, show_progress_bar=False)


def main() -> None:
    """Time the flat and the padded batches, and print one line for each and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--size", choices=tuple(_SIZES), default="minilm")
    parser.add_argument("--median", type=float, default=60.0, help="median length in tokens")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of lengths")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = BertModel(BertConfig(**_SIZES[args.size])).eval()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(args.median), args.sigma, args.texts), 3, 512).astype(int)
    texts = [rng.integers(1000, 30_000, length).tolist() for length in lengths]
    words = [" ".join(f"w{token}" for token in text) for text in texts]
    peer: Callable[[Any], np.ndarray] = partial(padded, model)
    given: Any = texts
    name = "padded"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if importlib.util.find_spec("sentence_transformers") is not None:
            write_tokenizer(folder, model.config.vocab_size)
            encode = sentence_transformers(folder, model.config.hidden_size)
            peer, given, name = encode, words, "sentence-transformers"
        llm = LLM(folder, skip_tokenizer_init=given is texts, dtype="float32", pooling_type="MEAN")
    print(f"{len(texts)} texts, {lengths.sum():,} tokens, median {int(np.median(lengths))}, longest {lengths.max()}")
    print(f"{args.size}, float32, {llm.info.kernels} kernels, {llm.info.threads} threads")

    def flat(count: int) -> np.ndarray:
        return np.array([each.outputs.embedding for each in llm.embed(given[:count])], dtype=np.float32)

    ways = {"flat": flat, name: lambda count: peer(given[:count])}
    # Processor time is measured as well, because it is steadier on a shared machine.
    found = {each: way(2 * _BATCH) for each, way in ways.items()}  # not measured
    seconds: dict[str, list[float]] = {each: [] for each in ways}
    processor: dict[str, list[float]] = {each: [] for each in ways}
    for _ in range(args.repeat):
        for each, way in ways.items():
            begin, busy = time.perf_counter(), time.process_time()
            found[each] = way(len(texts))
            seconds[each].append(time.perf_counter() - begin)
            processor[each].append(time.process_time() - busy)
    print(f"largest difference {np.abs(found['flat'] - found[name]).max():.1e}")
    for each, times in seconds.items():
        median, busy = statistics.median(times), statistics.median(processor[each])
        listed = ", ".join(f"{value:.2f}" for value in times)
        rate = f"{len(texts) / median:.0f} texts/s, {lengths.sum() / median:,.0f} tokens/s"
        print(f"{each} {median:.2f} s (of {listed}), {busy:.2f} s of processors; {rate}", flush=True)
    ratios = [other / ours for ours, other in zip(seconds["flat"], seconds[name], strict=True)]
    middle = statistics.median(ratios)
    print(f"flat batches are {middle:.2f}x as fast ({min(ratios):.2f} to {max(ratios):.2f} over the rounds)")


if __name__ == "__main__":
    main()
