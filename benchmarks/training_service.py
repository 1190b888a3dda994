"""Measures the training service: clients together against one after another, packs against padding, chat beside it.

    python benchmarks/training_service.py --json benchmarks/results/training-service.json
    python benchmarks/make_random_model.py /tmp/s135 --shape smollm-135m
    python benchmarks/training_service.py --model /tmp/s135

Eight clients train an adapter each on one server (``chairlift serve --enable-training``), over HTTP.

- loops: whole loops of reinforcement learning. Each draws four samples of 64 tokens from the client's newest weights,
  makes a pass over them, and takes a step. All clients at once, against one client after another.
- calls: passes and steps over data of log-normal lengths. All clients at once, against transformers, which computes the
  same calls one after another, each as one padded batch, with the same low-rank terms and the same steps.
- chat: four streams of chat beside two clients that train, for several settings. The 99th percentile of the time
  between two tokens, and the rate of training, against chat alone.

Each part has interleaved rounds in one run. The script prints medians with their range.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chairlift import __version__
from chairlift_lab.bench.machine import describe_machine
from chairlift_train.service.wire.proto import (
    ForwardBackwardOutputMessage,
    ForwardBackwardRequestMessage,
    SampleResponseMessage,
)

NAME = "bench/model"
RANK = 16
ALPHA = 32.0
RATE = 1e-4
ROWS, ANSWER = 4, 64
IDLE = 2.0
"""Seconds without a request after which a client connects again."""
SETTINGS = ((0.1, 5.0), (0.25, 10.0), (0.5, 25.0))
"""(training_share, training_gap_ms) of the chat part; the last is the default."""


@contextlib.contextmanager
def server(model: str, directory: Path, *flags: str) -> Iterator[int]:
    """Context manager: a server that trains ``model``, on the port that it gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "chairlift", "serve", *([model] if model else []), "--enable-training"]
    command += ["--training-dir", str(directory), "--served-model-name", NAME, "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "is ready" in line:
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield port
    finally:
        process.terminate()
        process.wait()


class Client:
    """One training run of a server. One thread uses it."""

    def __init__(self, port: int, seed: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._used = time.perf_counter()
        self._seq = self._samples = 0
        self._rng = random.Random(seed)
        self.session = self._post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        lora = {"rank": RANK, "seed": seed, "train_unembed": False}
        made = self._post("create_model", session_id=self.session, model_seq_id=0, base_model=NAME, lora_config=lora)
        self.model = str(json.loads(self.result(made))["model_id"])

    def _send(self, path: str, body: bytes, kind: str) -> bytes:
        if time.perf_counter() > self._used + IDLE:
            self._http.close()  # the server may have closed it, too; the next request connects again
        self._http.request("POST", f"/api/v1/{path}", body, {"content-type": kind})
        reply = self._http.getresponse()
        content = reply.read()
        self._used = time.perf_counter()
        if reply.status != 200:
            raise SystemExit(f"{path}: {reply.status} {content.decode(errors='replace')}")
        return content

    def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        return dict(json.loads(self._send(path, json.dumps(fields).encode(), "application/json")))

    def result(self, accepted: dict[str, Any]) -> bytes:
        """The result of a call, when it is there."""
        body = json.dumps({"request_id": accepted["request_id"]}).encode()
        while True:
            found = self._send("retrieve_future", body, "application/json")
            if not found.startswith(b"{"):
                return found
            answer = json.loads(found)
            if "error" in answer:
                raise SystemExit(answer["error"])
            if answer.get("type") != "try_again":
                return found

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def begin_pass(self, data: Sequence[tuple[list[int], dict[str, list[float]]]], loss: str) -> dict[str, Any]:
        """Send a pass over (tokens with the last target, inputs of the loss)."""
        message = ForwardBackwardRequestMessage(model_id=self.model, seq_id=self._next(), loss_fn=loss)
        for tokens, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], "<i4").tobytes()
            targets = datum.loss_fn_inputs["target_tokens"]
            targets.dtype = 2
            targets.shape.append(len(tokens) - 1)
            targets.dense = np.asarray(tokens[1:], "<i8").tobytes()
            for name, values in inputs.items():
                given = datum.loss_fn_inputs[name]
                given.dtype = 1
                given.shape.append(len(values))
                given.dense = np.asarray(values, "<f4").tobytes()
        content = self._send("forward_backward", message.SerializeToString(), "application/x-protobuf")
        return dict(json.loads(content))

    def begin_step(self) -> dict[str, Any]:
        """Send an optimiser step."""
        return self._post("optim_step", model_id=self.model, seq_id=self._next(), adam_params={"learning_rate": RATE})

    def learn(self, data: Sequence[list[int]]) -> float:
        """A pass and a step over sequences; returns the sum of the losses."""
        given = [(tokens, {"weights": [1.0] * (len(tokens) - 1)}) for tokens in data]
        calls = [self.begin_pass(given, "cross_entropy"), self.begin_step()]
        message = ForwardBackwardOutputMessage()
        message.ParseFromString(self.result(calls[0]))
        self.result(calls[1])
        return float(message.metrics["loss:sum"])

    def loop(self, vocab: int) -> None:
        """A loop of reinforcement learning: samples from the newest weights, a pass over them, and a step."""
        saved = self._post(
            "save_weights_for_sampler",
            **{"model_id": self.model, "seq_id": self._next(), "sampling_session_seq_id": self._samples},
            kind="inflight",
        )
        sampler = json.loads(self.result(saved))["sampling_session_id"]
        prompt = [self._rng.randrange(3, vocab) for _ in range(self._rng.randint(16, 48))]
        asked = self._post(
            "asample",
            sampling_session_id=sampler,
            seq_id=0,
            num_samples=ROWS,
            prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            sampling_params={"max_tokens": ANSWER, "temperature": 1.0, "seed": self._samples, "stop": []},
        )
        self._samples += 1
        message = SampleResponseMessage()
        message.ParseFromString(self.result(asked))
        data = []
        for index, each in enumerate(message.sequences):
            answer = np.frombuffer(each.tokens, "<i4").tolist()
            scores = np.frombuffer(each.logprobs, "<f4").tolist()
            unread = [0.0] * (len(prompt) - 1)
            advantages = [*unread, *([1.0 if index % 2 else -1.0] * len(answer))]
            data.append(([*prompt, *answer], {"logprobs": [*unread, *scores], "advantages": advantages}))
        calls = [self.begin_pass(data, "importance_sampling"), self.begin_step()]
        for call in calls:
            self.result(call)


def together(works: Sequence[Callable[[], Any]]) -> float:
    """Seconds of all works at once."""
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
    return time.perf_counter() - begin


def after_another(works: Sequence[Callable[[], Any]]) -> float:
    """Seconds of all works, one after another."""
    begin = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - begin


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def shown(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['lowest']:.2f} to {found['highest']:.2f})"


def rounds_of(number: int, ways: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of each way in each round. The order alternates; a round before them is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(number + 1):
        for name in sorted(ways, reverse=bool(index % 2)):
            seconds = ways[name]()
            if index:
                times[name].append(seconds)
    return times


# -- loops -------------------------------------------------------------------------------------------------------------


def measure_loops(port: int, args: argparse.Namespace, vocab: int) -> dict[str, Any]:
    clients = [Client(port, seed) for seed in range(args.clients)]
    works = [lambda client=client: [client.loop(vocab) for _ in range(args.loops)] for client in clients]
    ways = {"together": lambda: together(works), "one after another": lambda: after_another(works)}
    times = rounds_of(args.rounds, ways)
    ratios = [alone / shared for shared, alone in zip(times["together"], times["one after another"], strict=True)]
    print(f"loops: {args.clients} clients together are {shown(spread(ratios))} times as fast as one after another")
    return {"seconds": times, "ratio": spread(ratios)}


# -- calls -------------------------------------------------------------------------------------------------------------


def data_of(seed: int, count: int, vocab: int) -> list[list[int]]:
    """Sequences of random tokens, of log-normal lengths."""
    rng = random.Random(seed)
    lengths = [max(4, min(round(rng.lognormvariate(3.9, 0.8)), 400)) for _ in range(count)]
    return [[rng.randrange(3, vocab) for _ in range(length + 1)] for length in lengths]


class LowRank(nn.Module):
    """A linear layer with low-rank terms."""

    def __init__(self, layer: nn.Module, inner: int, outer: int) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(RANK, inner) / inner**0.5)
        self.b = nn.Parameter(torch.zeros(outer, RANK))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + (x @ self.a.T @ self.b.T) * (ALPHA / RANK)
        return found


class Padded:
    """One client's training in transformers, where each call is one padded batch."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).requires_grad_(False)
        self._matrices: list[nn.Parameter] = []
        for module in list(self._model.model.layers.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    low = LowRank(layer, layer.in_features, layer.out_features)
                    setattr(module, name, low)
                    self._matrices += [low.a, low.b]
        self._optimizer = torch.optim.AdamW(self._matrices, RATE, weight_decay=0.0)

    def learn(self, data: Sequence[list[int]]) -> float:
        """A pass and a step over sequences; returns the sum of the losses."""
        width = max(map(len, data))
        ids = torch.zeros(len(data), width, dtype=torch.int64)
        mask = torch.zeros(len(data), width, dtype=torch.int64)
        for row, tokens in enumerate(data):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        logits = self._model(ids[:, :-1], attention_mask=mask[:, :-1]).logits
        scores = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(scores * mask[:, 1:]).sum()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def measure_calls(port: int, args: argparse.Namespace, vocab: int, directory: str) -> dict[str, Any]:
    clients = [Client(port, 100 + seed) for seed in range(args.clients)]
    padded = Padded(directory)
    given = [data_of(seed, args.data, vocab) for seed in range(args.clients)]
    losses: dict[str, list[float]] = {}

    def packed() -> float:
        works = [
            lambda client=client, data=data: client.learn(data) for client, data in zip(clients, given, strict=True)
        ]
        return together(works)

    def batches() -> float:
        begin = time.perf_counter()
        losses["padded"] = [padded.learn(data) for data in given]
        return time.perf_counter() - begin

    times = rounds_of(args.rounds, {"packed": packed, "padded": batches})
    ratios = [slow / fast for fast, slow in zip(times["packed"], times["padded"], strict=True)]
    tokens = sum(len(each) - 1 for data in given for each in data)
    waste = sum(len(data) * (max(map(len, data)) - 1) for data in given) / tokens
    print(
        f"calls: packed calls of {args.clients} clients are {shown(spread(ratios))} times as fast as padded batches"
        f" ({tokens:,} tokens; padding makes {waste:.2f} times as many)"
    )
    return {"seconds": times, "ratio": spread(ratios), "tokens": tokens, "padded_tokens_ratio": waste}


# -- chat --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Chat:
    """Streams of chat, until :meth:`stop`. Collects the times between two tokens."""

    port: int
    gaps: list[float] = dataclasses.field(default_factory=list)
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)

    def stream(self, seed: int) -> None:
        number = 0
        while not self.stopped.is_set():
            number += 1
            body = {"model": NAME, "prompt": [[5 + seed, 9, 12 + number % 50] * 20], "max_tokens": 48, "stream": True}
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            payload = json.dumps({**body, "ignore_eos": True})
            connection.request("POST", "/v1/completions", payload, {"content-type": "application/json"})
            last = None
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
            connection.close()


def chat_beside(port: int, seconds: float, clients: Sequence[Client], data: Sequence[list[int]]) -> dict[str, float]:
    """(p99 of the gaps in ms, tokens of training per second) of chat for a while."""
    chat = Chat(port)
    trained = [0] * len(clients)

    def train(index: int) -> None:
        while not chat.stopped.is_set():
            clients[index].learn(data)
            trained[index] += sum(len(each) - 1 for each in data)

    with concurrent.futures.ThreadPoolExecutor(4 + len(clients)) as pool:
        begin = time.perf_counter()
        jobs = [pool.submit(chat.stream, seed) for seed in range(4)]
        jobs += [pool.submit(train, index) for index in range(len(clients))]
        time.sleep(seconds)
        chat.stopped.set()
        for job in jobs:
            job.result()
        elapsed = time.perf_counter() - begin
    p99 = statistics.quantiles(chat.gaps, n=100)[98]
    return {"p50_ms": 1e3 * statistics.median(chat.gaps), "p99_ms": 1e3 * p99, "tokens_per_s": sum(trained) / elapsed}


def measure_chat(args: argparse.Namespace, vocab: int, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"settings": []}
    data = data_of(7, 8, vocab)
    for share, gap in SETTINGS:
        flags = ("--training-share", str(share), "--training-gap-ms", str(gap))
        with server(args.model, root / f"chat{share}", *flags) as port:
            clients = [Client(port, seed) for seed in range(2)]
            chat_beside(port, 2.0, clients, data)
            alone, beside = [], []
            for _ in range(args.rounds):
                alone.append(chat_beside(port, args.seconds, [], data))
                beside.append(chat_beside(port, args.seconds, clients, data))
            idle = time.perf_counter()
            for client in clients:
                client.learn(data)
            rate = 2 * sum(len(each) - 1 for each in data) / (time.perf_counter() - idle)
        ratios = [with_it["p99_ms"] / without["p99_ms"] for with_it, without in zip(beside, alone, strict=True)]
        tokens = [each["tokens_per_s"] for each in beside]
        result = {"share": share, "gap_ms": gap, "alone": alone, "beside": beside, "p99_ratio": spread(ratios)}
        result |= {"tokens_per_s": spread(tokens), "tokens_per_s_alone": rate}
        found["settings"].append(result)
        print(
            f"chat: share {share}, gap {gap:g} ms: p99 between tokens {shown(spread(ratios))} times that of chat alone;"
            f" training {shown(spread(tokens))} tokens/s, alone {rate:.0f}"
        )
    for limit in (1.25, 2.0):
        rates = [each["tokens_per_s"]["median"] for each in found["settings"] if each["p99_ratio"]["median"] <= limit]
        found[f"tokens_per_s_at_{limit:g}"] = max(rates, default=0.0)
        print(f"chat: training's rate within {limit:g} times the p99: {max(rates, default=0.0):.0f} tokens/s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model directory (default: the bundled model)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--loops", type=int, default=3, help="loops of each client in a round")
    parser.add_argument("--data", type=int, default=8, help="sequences of a supervised call")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; one before them is not counted")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of chat in a round")
    parser.add_argument("--parts", nargs="+", choices=("loops", "calls", "chat"), default=["loops", "calls", "chat"])
    parser.add_argument("--json", type=Path, help="file for the raw values")
    args = parser.parse_args()
    directory = args.model or str(Path(__file__).parents[1] / "chairlift" / "assets")
    vocab = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    result: dict[str, Any] = {
        "version": __version__,
        "machine": dataclasses.asdict(describe_machine()),
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if {"loops", "calls"} & set(args.parts):
            limits = ("--max-training-adapters-per-key", "64")
            with server(args.model, root / "runs", *limits) as port:
                if "loops" in args.parts:
                    result["loops"] = measure_loops(port, args, vocab)
                if "calls" in args.parts:
                    result["calls"] = measure_calls(port, args, vocab, directory)
        if "chat" in args.parts:
            result["chat"] = measure_chat(args, vocab, root)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
