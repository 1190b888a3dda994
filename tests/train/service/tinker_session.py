"""A session of the official tinker client with a server: ``python tinker_session.py URL MODEL``. It prints ``done`` at
its end, and fails if anything is not as it should be.

It runs in an environment of its own, because the client's dependencies are other versions than those of the tests.
"""

from __future__ import annotations

import sys

import tinker
import torch
from tinker import types


def datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def fails(call: object, message: str) -> None:
    why = ""
    try:
        call.result()
    except tinker.RequestFailedError as error:
        why = str(error)
    assert message in why, f"{message}: {why or 'the call did not fail'}"


DATA = [datum([1, 2, 3, 4]), datum([5, 6, 7])]


def train(training: tinker.TrainingClient) -> None:
    first = training.forward_backward(DATA, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    outputs = first.result().loss_fn_outputs
    assert [len(each["logprobs"].data) for each in outputs] == [3, 2]
    assert step.result().metrics
    assert training.forward(DATA, "cross_entropy").result().metrics["loss:sum"] != first.result().metrics["loss:sum"]
    custom = training.forward_backward_custom(DATA, lambda data, logprobs: (-torch.cat(logprobs).sum(), {}))
    assert "surrogate_loss:sum" in custom.result().metrics
    fails(training.forward_backward([datum([1, 10_000_000, 2])], "cross_entropy"), "datum 0")
    training.optim_step(types.AdamParams()).result()
    fails(training.optim_step(types.AdamParams()), "gradient")


def chunks(training: tinker.TrainingClient) -> None:
    """A call that the client divides, and whose first part it sends last."""
    training.holder._client_config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    whole = training.forward([DATA[0]] * 8, "cross_entropy").result()
    assert len(whole.loss_fn_outputs) == 8
    one = training.forward([DATA[0]], "cross_entropy").result()
    assert abs(whole.metrics["loss:sum"] - 8 * one.metrics["loss:sum"]) < 1e-3


def sample(sampler: tinker.SamplingClient) -> list[list[int]]:
    prompt = types.ModelInput.from_ints([5, 6, 7])
    found = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4, seed=3)).result()
    assert all(len(each.tokens) == len(each.logprobs) for each in found.sequences)
    scores = sampler.compute_logprobs(prompt).result()
    assert scores[0] is None and len(scores) == 3
    return [list(each.tokens) for each in found.sequences]


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    assert tinker.RestClient(base_url=url, api_key="tml-test").get_server_capabilities().result().supported_models
    training = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
    assert training.get_info().lora_rank == 8
    train(training)
    chunks(training)
    path = training.save_state("one").result().path
    named = training.save_weights_for_sampler("s1").result().path
    fails(training.save_state("../x"), "a checkpoint's name")
    snapshot = sample(training.save_weights_and_get_sampling_client().result())
    assert sample(service.create_sampling_client(model_path=named).result()) == snapshot
    sample(training.save_weights_and_get_sampling_client(kind="inflight").result())
    sample(service.create_sampling_client(base_model=model).result())
    copy = service.create_training_client_from_state_with_optimizer(path).result()
    losses = [each.forward(DATA, "cross_entropy").result().metrics for each in (training, copy)]
    assert losses[0] == losses[1]
    fails(service.create_lora_training_client(base_model=model, rank=500), "rank")
    rest = tinker.RestClient(base_url=url, api_key="tml-test")
    assert {each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints} >= {path, named}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    rest.delete_checkpoint_from_tinker_path(path).result()
    service.close("success").result()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
