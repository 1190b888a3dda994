"""Two people fine-tune the same model at the same time. The one who is done first samples while the other goes on.

    python tools/with_server.py --enable-training --training-dir /tmp/training \
        -- python examples/train_together.py '$URL'

The script sends the requests of the ``tinker`` client itself, so it needs no other package than Chairlift. Each person
is a thread with a session of its own. When both have calls waiting, the server may pack their data into one forward
pass.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from chairlift_train.service.wire.proto import (
    ForwardBackwardOutputMessage,
    ForwardBackwardRequestMessage,
    SampleResponseMessage,
)

PROTO = "application/x-protobuf"
TEXTS = {
    "alice": "The lift runs all day. Riders step on and off.",
    "bob": "Snow falls at night. The top is near in the morning.",
}
STEPS = {"alice": 6, "bob": 12}


class Person:
    """A client with one session, one adapter and its own data."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.model = self.get("/api/v1/get_server_capabilities")["supported_models"][0]["model_name"]
        session = self.post("create_session")["session_id"]
        address = {"session_id": session, "model_seq_id": 0, "base_model": self.model}
        created = self.post("create_model", **address, lora_config={"rank": 8, "seed": 1})
        self.run = self.result(created)["model_id"]
        self.calls = 0

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path) as reply:
            return json.load(reply)

    def post(self, call: str, **fields: Any) -> Any:
        return self.send(f"/api/v1/{call}", json.dumps(fields).encode(), "application/json")

    def send(self, path: str, body: bytes, kind: str) -> Any:
        """The answer: JSON as a dictionary, protobuf as bytes."""
        request = urllib.request.Request(self.url + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request) as reply:
            answer = reply.read()
            return answer if reply.headers["content-type"] == PROTO else json.loads(answer)

    def result(self, accepted: dict[str, Any]) -> Any:
        """The result of a call. Every call is answered with a future at once."""
        while True:
            found = self.post("retrieve_future", request_id=accepted["request_id"])
            if isinstance(found, bytes) or found.get("type") != "try_again":
                break
        if isinstance(found, dict) and "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found

    def next_call(self) -> dict[str, Any]:
        """The address of the next call. The server computes calls in this order."""
        self.calls += 1
        return {"model_id": self.run, "seq_id": self.calls}

    def tokens(self, text: str) -> list[int]:
        body = json.dumps({"model": self.model, "prompt": text}).encode()
        found: list[int] = self.send("/tokenize", body, "application/json")["tokens"]
        return found

    def train(self, tokens: list[int], steps: int) -> list[float]:
        """Take optimiser steps on a sequence. Returns the loss before each, summed over the tokens.

        All calls are sent at once. The server computes them in order, and never waits for this client.
        """
        passes = []
        for _ in range(steps):
            passes.append(self.forward_backward(tokens))
            last = self.post("optim_step", adam_params={"learning_rate": 5e-3}, **self.next_call())
        self.result(last)
        losses = []
        for each in passes:
            output = ForwardBackwardOutputMessage()
            output.ParseFromString(self.result(each))
            losses.append(float(output.metrics["loss:sum"]))
        return losses

    def forward_backward(self, tokens: list[int]) -> dict[str, Any]:
        """Ask for the loss of a sequence and its gradient. Returns the future."""
        message = ForwardBackwardRequestMessage(loss_fn="cross_entropy", **self.next_call())
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], "<i4").tobytes()
        for name, dtype, values in (
            ("target_tokens", 2, np.asarray(tokens[1:], "<i8")),
            ("weights", 1, np.ones(len(tokens) - 1, "<f4")),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = dtype
            tensor.shape.append(len(values))
            tensor.dense = values.tobytes()
        accepted: dict[str, Any] = self.send("/api/v1/forward_backward", message.SerializeToString(), PROTO)
        return accepted

    def sample(self, tokens: list[int], count: int) -> str:
        """The most probable continuation of ``tokens`` with the weights of now."""
        saved = self.post("save_weights_for_sampler", sampling_session_seq_id=0, kind="snapshot", **self.next_call())
        drawn = self.post(
            "asample",
            sampling_session_id=self.result(saved)["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            sampling_params={"max_tokens": count, "temperature": 0.0},
        )
        message = SampleResponseMessage()
        message.ParseFromString(self.result(drawn))
        found = np.frombuffer(message.sequences[0].tokens, "<i4").tolist()
        body = json.dumps({"model": self.model, "tokens": found}).encode()
        text: str = self.send("/detokenize", body, "application/json")["prompt"]
        return text


def fine_tune(url: str, name: str) -> str:
    """One person's work."""
    person = Person(url, name)
    tokens = person.tokens(TEXTS[name])
    losses = person.train(tokens, STEPS[name])
    if losses[-1] >= losses[0]:
        raise RuntimeError(f"{name}: the loss did not fall: {losses}")
    drawn = person.sample(tokens[:4], len(tokens) - 4)
    return f"{name}: loss {losses[0]:.1f} -> {losses[-1]:.1f}; the sample goes on with {drawn!r}"


def main(url: str) -> None:
    with ThreadPoolExecutor(len(TEXTS)) as people:
        for line in people.map(lambda name: fine_tune(url, name), TEXTS):
            print(line)
    with urllib.request.urlopen(f"{url}/live/training") as reply:
        passes = [each for each in json.load(reply)["work"] if each["kind"] == "pass"]
    print(f"{sum(len(each['runs']) > 1 for each in passes)} of the last {len(passes)} passes had data of both")


if __name__ == "__main__":
    main(*sys.argv[1:])
