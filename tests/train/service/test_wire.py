"""The endpoints of the training service over HTTP, with a fake trainer: results, order, retries and failures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_train.service.places import Places
from tests.server.harness import run, until
from tests.train.service.wire_client import MODEL, Bench, WireClient, gathered, pass_body

Scene = Callable[[Bench, WireClient], Awaitable[None]]


def play(directory: Path, scene: Scene, **settings: Any) -> Bench:
    """Run a scene with a server."""
    benches = []

    async def test() -> None:
        bench = Bench(directory, **settings)
        benches.append(bench)
        async with bench.serving() as client:
            await asyncio.wait_for(scene(bench, client), 60)

    run(test())
    return benches[0]


def test_a_client_trains_and_reads_its_results(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        assert (await client.post("client/config", sdk_version="0.38.0")).json() == {}
        models = (await client.get("get_server_capabilities")).json()["supported_models"]
        assert models == [{"model_name": MODEL, "max_context_length": 64, "trainable": True, "sampleable": True}]
        session = await client.session()
        assert (await client.post("session_heartbeat", session_id=session)).status == 200
        model = await client.model(session)
        assert model == f"{session}:train:0"
        info = (await client.post("get_info", model_id=model)).json()
        assert info["model_data"] == {"arch": "tiny", "model_name": MODEL, "tokenizer_id": MODEL}
        assert (info["is_lora"], info["lora_rank"]) == (True, 8)
        first = await client.result(await client.forward_backward(model, 1, [[1, 2, 3], [4]]))
        assert [len(each) for each in first["logprobs"]] == [3, 1]
        assert set(first["metrics"]) == {"loss:sum"}
        step = await client.result(await client.optim_step(model, 2))
        assert step["metrics"]["weight"] == bench.compute.trainer.adapters[model].weight
        again = await client.result(await client.forward_backward(model, 3, [[1, 2, 3], [4]], forward_only=True))
        assert again["logprobs"] != first["logprobs"]

    play(tmp_path, scene)


def test_calls_run_in_their_order_however_they_arrive(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        late = [await client.forward_backward(model, 2, [[2, 2]]), await client.optim_step(model, 3)]
        reply = await client.post("retrieve_future", request_id=f"{model}:2")
        assert reply.json()["type"] == "try_again"
        assert reply.json()["queue_state"] == "paused_capacity"
        assert reply.json()["queue_state_reason"] == "call 1 has not arrived"
        first = await client.forward_backward(model, 1, [[1, 1]])
        results = [await client.result(each) for each in (first, *late)]
        other = await client.model(await client.session())
        expected = [
            await client.result(await client.forward_backward(other, 1, [[1, 1]])),
            await client.result(await client.forward_backward(other, 2, [[2, 2]])),
            await client.result(await client.optim_step(other, 3)),
        ]
        assert results == expected

    import chairlift_train.service.wire.routes as routes

    patch = pytest.MonkeyPatch()
    patch.setattr(routes, "_POLL_SECONDS", 0.05)
    try:
        play(tmp_path, scene)
    finally:
        patch.undo()


def test_a_repeated_call_is_applied_once_and_another_with_its_id_is_refused(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        replies = await gathered(*(client.forward_backward(model, 1, [[1, 2]]) for _ in range(4)))
        assert len({each.json()["request_id"] for each in replies}) == 1
        await client.result(replies[0])
        assert bench.compute.trainer.adapters[model].num_added == 1
        step = await client.optim_step(model, 2)
        before = await client.result(step)
        assert (await client.optim_step(model, 2)).json() == step.json()
        assert await client.result(step) == before
        refused = await client.optim_step(model, 2, rate=0.5)
        assert refused.status == 422
        assert "was another call before" in refused.json()["error"]
        assert (await client.forward_backward(model, 1, [[1, 3]])).status == 422

    play(tmp_path, scene)


def fails(edit: Callable[[Any], None]) -> dict[str, Any]:
    return {"edit": edit}


def image(message: Any) -> None:
    message.data[0].model_input.add().image.format = "png"


def no_data(message: Any) -> None:
    del message.data[:]


def odd_bytes(message: Any) -> None:
    message.data[0].model_input[0].encoded_text.tokens = b"12345"


def wrong_shape(message: Any) -> None:
    message.data[0].loss_fn_inputs["weights"].shape[0] = 7


def bad_sparse(message: Any) -> None:
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.shape.append(2)
    tensor.sparse_csr.values = b"1234"


def short_targets(message: Any) -> None:
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.shape[0] = 1
    tensor.dense = tensor.dense[:8]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (fails(image), "datum 0 has an image, and this server trains on text only"),
        (fails(no_data), "the call has no data"),
        (fails(odd_bytes), "datum 0: its tokens have 5 bytes"),
        (fails(wrong_shape), r"datum 0: weights: its values do not fill the shape \[7\]"),
        (fails(bad_sparse), r"datum 0: weights: its values do not fill the shape \[2, 2\]"),
        (fails(short_targets), "datum 0: target_tokens has another length than the tokens"),
        ({"data": [[5, 99_999]]}, "datum 0: tokens has an unknown token id"),
        ({"weights": [1.0, float("nan")]}, "datum 0: the loss is NaN"),
    ],
)
def test_a_bad_call_fails_through_its_future_and_the_model_goes_on(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        data = more.pop("data", [[1, 2]])
        bad = await client.result(await client.forward_backward(model, 1, data, **more))
        assert bad["category"] == "user"
        assert re.search(message, bad["error"]), bad["error"]
        none = await client.result(await client.optim_step(model, 2))
        assert none == {"error": "there is no gradient; call forward_backward first", "category": "user"}
        good = await client.result(await client.forward_backward(model, 3, [[1, 2]]))
        assert "loss:sum" in good["metrics"]
        assert "weight" in (await client.result(await client.optim_step(model, 4)))["metrics"]

    play(tmp_path, scene)


def test_a_call_that_fails_in_a_later_pack_leaves_no_gradient(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())

        def nan_at_the_end(message: Any) -> None:
            tensor = message.data[-1].loss_fn_inputs["weights"]
            tensor.dense = tensor.dense[:-4] + b"\x00\x00\xc0\x7f"

        bad = await client.result(await client.forward_backward(model, 1, [[1] * 200] * 5, edit=nan_at_the_end))
        assert bad["error"] == "datum 4: the loss is NaN"
        assert (await client.result(await client.optim_step(model, 2)))["category"] == "user"

    play(tmp_path, scene)


def test_refused_adapters_fail_through_their_futures(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        fields = {"session_id": session, "base_model": MODEL}
        too_large = {"rank": 65, "seed": 1}
        bad = [
            (await client.post("create_model", **fields, model_seq_id=0, lora_config=too_large), "rank must be from 1"),
            (await client.post("create_model", **fields, model_seq_id=1, lora_config={"rank": 0}), "rank must be from"),
            (await client.post("create_model", **fields, model_seq_id=2), "full fine-tuning is not supported"),
        ]
        fields["base_model"] = "other"
        bad.append((await client.post("create_model", **fields, model_seq_id=3, lora_config={"rank": 8}), "it trains"))
        for reply, message in bad:
            result = await client.result(reply)
            assert message in result["error"] and result["category"] == "user"
        dimuon = {"type": "dimuon", "version": 1}
        fields |= {"base_model": MODEL, "lora_config": {"rank": 8}, "optimizer_config": dimuon}
        result = await client.result(await client.post("create_model", **fields, model_seq_id=4))
        assert "the optimiser 'dimuon' is not supported" in result["error"]
        await client.model(session, 5, rank=64)
        result = await client.result(
            await client.post(
                "create_model", session_id=session, base_model=MODEL, model_seq_id=6, lora_config={"rank": 64}
            )
        )
        assert "needs 6,400 bytes, and 3,600 of 10,000 are free" in result["error"]
        late = await client.optim_step(f"{session}:train:6", 1)
        assert "has ended" in (await client.result(late))["error"]

    play(tmp_path, scene, memory=10_000)


def test_checkpoints_are_saved_listed_loaded_and_deleted(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        await client.forward_backward(model, 1, [[1, 2]])
        await client.optim_step(model, 2)
        saved = await client.result(await client.post("save_weights", model_id=model, seq_id=3, path="one"))
        assert saved == {"type": "save_weights", "path": f"tinker://{model}/weights/one"}
        taken = await client.result(await client.post("save_weights", model_id=model, seq_id=4, path="one"))
        assert "the name 'one' is taken" in taken["error"]
        over = await client.post("save_weights", model_id=model, seq_id=5, path="one", overwrite=True)
        assert (await client.result(over))["path"] == saved["path"]
        listed = (await client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [each["checkpoint_id"] for each in listed] == ["weights/one"]
        assert listed[0]["checkpoint_type"] == "training" and listed[0]["size_bytes"] > 0
        assert (await client.get("checkpoints?limit=5")).json()["cursor"]["total_count"] == 1
        shape = (await client.post("weights_info", tinker_path=saved["path"])).json()
        assert (shape["lora_rank"], shape["train_unembed"]) == (8, True)
        runs = (await client.get("training_runs")).json()["training_runs"]
        assert runs[0]["training_run_id"] == model and runs[0]["last_checkpoint"]["tinker_path"] == saved["path"]
        copies = []
        for number in (1, 2):
            fields = {"session_id": session, "model_seq_id": number, "path": saved["path"], "optimizer": True}
            result = await client.result(await client.post("load_weights", **fields))
            assert result["model_id"] == f"{session}:train:{number}"
            copies.append(result["model_id"])
        await client.result(await client.forward_backward(copies[0], 1, [[3]]))
        await client.result(await client.optim_step(copies[0], 2))
        weights = [bench.compute.trainer.adapters[name].weight for name in (model, *copies)]
        assert weights[0] == weights[2] != weights[1], "the copies are independent"
        gone = await client.send("DELETE", f"training_runs/{model}/checkpoints/weights/one")
        assert gone.status == 200
        assert not bench.runs.places.checkpoint(model, "weights", "one").exists()
        missing = {"session_id": session, "model_seq_id": 3, "path": saved["path"], "optimizer": False}
        assert "there is no checkpoint" in (await client.result(await client.post("load_weights", **missing)))["error"]

    play(tmp_path, scene)


@pytest.mark.parametrize("name", ["../x", "a/b", "x" * 300, "", ".hidden", "a b", "ä"])
def test_names_that_could_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        for seq_id, call in enumerate(("save_weights", "save_weights_for_sampler"), start=1):
            result = await client.result(await client.post(call, model_id=model, seq_id=seq_id, path=name))
            assert "a checkpoint's name has 1 to 128" in result["error"] and result["category"] == "user"
        session = model.partition(":")[0]
        load = {"session_id": session, "model_seq_id": 1, "path": f"tinker://{name}", "optimizer": False}
        assert "error" in await client.result(await client.post("load_weights", **load))

    play(tmp_path, scene)
    assert not [each for each in tmp_path.rglob("*") if each.name == "checkpoints"]


def test_a_full_quota_fails_a_save_and_leaves_nothing(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        bench.runs.log.log.max_bytes = bench.runs.log.log.num_bytes() + 30_000
        bench.compute.trainer.save = large(bench.compute.trainer.save)  # type: ignore[method-assign]
        result = await client.result(await client.post("save_weights", model_id=model, seq_id=1, path="one"))
        assert "the checkpoint has" in result["error"] and "--max-training-dir-bytes" in result["error"]
        folder = bench.runs.places.checkpoint(model, "weights", "one").parent
        assert list(folder.iterdir()) == []
        assert (await client.get("checkpoints")).json()["checkpoints"] == []

    play(tmp_path, scene)


def test_states_and_snapshots_count_for_the_quota(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        bench.compute.trainer.save = large(bench.compute.trainer.save)  # type: ignore[method-assign]
        before = bench.runs.log.log.num_bytes()
        sampler = {"model_id": model, "sampling_session_seq_id": 0, "kind": "snapshot"}
        await client.result(await client.post("save_weights_for_sampler", **sampler, seq_id=1))
        assert bench.runs.log.log.num_bytes() > before + 100_000
        bench.runs.log.log.max_bytes = bench.runs.log.log.num_bytes() + 30_000
        full = await client.result(await client.post("save_weights_for_sampler", **sampler, seq_id=2))
        assert "the snapshot has" in full["error"] and "--max-training-dir-bytes" in full["error"]
        await client.result(await client.forward_backward(model, 3, [[1, 2]]))
        assert "weight" in (await client.result(await client.optim_step(model, 4)))["metrics"], "a step needs no room"
        folders = [each.parent.name for each in tmp_path.glob("*/*/[0-9]*")]
        assert len(folders) == 1 and not list(tmp_path.glob("states/*/*"))
        kept = bench.runs.places.num_bytes()
        assert Places(tmp_path).num_bytes() == kept > 100_000, "a new process counts what is there"
        await client.post(f"sessions/{session}/finish")
        assert bench.runs.places.num_bytes() == 0

    play(tmp_path, scene, state_seconds=-1.0)


def test_a_load_for_which_there_is_no_room_changes_nothing(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        bench.compute.trainer.save = large(bench.compute.trainer.save)  # type: ignore[method-assign]
        saved = await client.result(await client.post("save_weights", model_id=model, seq_id=1, path="one"))
        await client.result(await client.forward_backward(model, 2, [[1, 2]]))
        await client.result(await client.optim_step(model, 3))
        weight = bench.compute.trainer.adapters[model].weight
        bench.runs.log.log.max_bytes = bench.runs.log.log.num_bytes() + 30_000
        load = {"model_id": model, "seq_id": 4, "path": saved["path"], "optimizer": True}
        assert "the state after a load has" in (await client.result(await client.post("load_weights", **load)))["error"]
        assert bench.compute.trainer.adapters[model].weight == weight

    play(tmp_path, scene)


def test_a_key_has_room_for_some_checkpoints_and_adapters(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path / "runs", max_models=2, max_owner_bytes=250_000)
        keys = tmp_path / "keys"
        keys.write_text("ann tml-ann\nbob tml-bob\n")
        bench.compute.trainer.save = large(bench.compute.trainer.save)  # type: ignore[method-assign]
        async with bench.serving(api_key_file=str(keys)) as client:
            ann, bob = (WireClient(client.http, f"X-API-Key: tml-{name}") for name in ("ann", "bob"))
            sessions = [await ann.session(), await ann.session()]
            model, _ = [await ann.model(each) for each in sessions]
            fields = {"session_id": sessions[0], "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 8}}
            refused = await ann.result(await ann.post("create_model", **fields))
            assert "2 adapters are in training for this API key" in refused["error"]
            assert "--max-training-adapters-per-key" in refused["error"]
            other = await bob.model(await bob.session())
            saves = [("one", False), ("two", False), ("two", True), ("three", False)]
            for seq_id, (name, overwrite) in enumerate(saves, start=1):
                save = {"model_id": model, "seq_id": seq_id, "path": name, "overwrite": overwrite}
                result = await ann.result(await ann.post("save_weights", **save))
                assert ("path" in result) == (name != "three"), result
            assert "--max-training-bytes-per-key" in result["error"]
            assert "path" in await bob.result(await bob.post("save_weights", model_id=other, seq_id=1, path="one"))

    run(test())


def test_results_are_dropped_when_they_were_retrieved_or_are_too_old(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        calls = [await client.forward_backward(model, seq_id, [[seq_id, 2]]) for seq_id in (1, 2)]
        first = await client.result(calls[0])
        await until(lambda: bench.runs._runs[model].last_done == 2)

        async def after(seconds: float) -> list[dict[str, Any]]:
            bench.clock.seconds += seconds
            await client.post("session_heartbeat", session_id=session)
            await bench.service.tick()
            return [client.read(await client.http.post(*retrieve(each))) for each in calls]

        def retrieve(call: Any) -> tuple[str, bytes]:
            return "/api/v1/retrieve_future", json.dumps({"request_id": call.json()["request_id"]}).encode()

        assert (await after(299))[0] == first, "the client may ask again"
        found = await after(2)
        assert "is kept no longer" in found[0]["error"] and "loss:sum" in found[1]["metrics"]
        assert "is kept no longer" in (await after(100))[0]["error"]
        assert (await client.forward_backward(model, 1, [[1, 2]])).json() == calls[0].json(), "the call stays known"
        assert (await client.forward_backward(model, 1, [[1, 3]])).status == 422
        late = await client.forward_backward(model, 3, [[3, 2]])
        await until(lambda: bench.runs._runs[model].last_done == 3)
        calls.append(late)
        bench.clock.seconds += 900
        await bench.service.tick()
        assert "is kept no longer" in client.read(await client.retrieve(late.json()["request_id"]))["error"]

    play(tmp_path, scene, result_seconds=800.0, lease_seconds=1e9)


def test_an_ended_session_leaves_no_calls(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        accepted = await client.forward_backward(model, 1, [[1, 2]])
        await client.result(accepted)
        await client.post(f"sessions/{session}/finish")
        assert bench.runs.log.log.calls_after(model, -1) == []
        assert (await client.retrieve(accepted.json()["request_id"])).status == 404

    play(tmp_path, scene)


def large(save: Any) -> Any:
    def saved(model_id: str, directory: Path, optimizer: bool) -> None:
        save(model_id, directory, optimizer)
        (directory / "weights").write_bytes(bytes(100_000))

    return saved


def test_samples_come_from_the_weights_of_their_session(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        fields = {"model_id": model, "sampling_session_seq_id": 0, "kind": "snapshot"}
        saved = await client.result(await client.post("save_weights_for_sampler", **fields, seq_id=1))
        sampler = saved["sampling_session_id"]
        assert bench.engine.adapters.loaded.keys() == {f"training:{sampler}"}
        ask = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 3, "seed": 1},
        }
        reply = await client.post("asample", **ask)
        assert len(reply.json()["sample_sequence_ids"]) == 2
        assert (await client.post("asample", **ask)).json() == reply.json()
        assert (await client.post("asample", **{**ask, "num_samples": 3})).status == 422
        answer = await client.retrieve(reply.json()["request_id"])
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert bench.engine.asked == [([5, 6], f"training:{sampler}")]
        base = await client.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=1, base_model=MODEL
        )
        shown = (await client.get(f"samplers/{base.json()['sampling_session_id']}")).json()
        assert shown == {"sampler_id": f"{session}:sample:1", "base_model": MODEL, "model_path": None}
        refused = {**ask, "seq_id": 1, "prompt_alt_tokens_k": 2}
        result = await client.result(await client.post("asample", **refused))
        assert result == {"error": "prompt_alt_tokens_k is not supported; leave it out", "category": "user"}
        assert (await client.retrieve(f"{sampler}:77")).status == 410
        assert (await client.post("cancel_future", request_id=reply.json()["request_id"])).status == 200

    play(tmp_path, scene)


def test_samples_say_which_weights_drew_them(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        fields = {"model_id": model, "sampling_session_seq_id": 0, "kind": "inflight"}
        saved = await client.result(await client.post("save_weights_for_sampler", **fields, seq_id=1))
        ask = {
            "sampling_session_id": saved["sampling_session_id"],
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 3, "seed": 1},
        }
        for seq_id, version in ((0, 1), (1, 2)):
            name = (await client.post("asample", **ask, seq_id=seq_id)).json()["request_id"]
            assert (await client.retrieve(name)).status == 200
            shown = (await client.get(f"samples/{name}/versions")).json()
            assert shown == {"request_id": name, "versions": [[{"first_token": 0, "seq_id": version}]] * 2}
            again = {**fields, "sampling_session_seq_id": 1 + seq_id}
            await client.result(await client.post("save_weights_for_sampler", **again, seq_id=2 + seq_id))
        assert (await client.get(f"samples/{saved['sampling_session_id']}:77/versions")).status == 410
        assert (await client.get(f"samples/{session}:sample:9:0/versions")).status == 404

    play(tmp_path, scene)


def test_the_live_view_shows_who_trains_and_who_samples(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model, other = await client.model(session), await client.model(session, 1)
        await client.result(await client.forward_backward(model, 1, [[1, 2, 3], [4]]))
        loss = (await client.result(await client.forward_backward(other, 1, [[1] * 5], forward_only=True)))["metrics"]
        await client.result(await client.optim_step(model, 2))
        await client.result(await client.optim_step(other, 2))
        shown = (await client.http.get("/live/training")).json()
        runs = {each["run"]: each for each in shown["runs"]}
        assert [(runs[name]["tokens"], runs[name]["steps"]) for name in (model, other)] == [(4, 1), (5, 0)]
        assert runs[other]["loss"] == loss["loss:sum"] and runs[model]["owner"] == session
        packs = [each["tokens"] for each in shown["work"] if each["kind"] == "pass"]
        assert packs == [{model: 4}, {other: 5}]
        assert shown["samplers"] == []
        stats = bench.runs.progress.stats
        assert dict(stats.tokens) == {"backward": 4, "forward": 5}
        assert dict(stats.calls) == {"create": 2, "pass": 2, "optim_step": 2} and dict(stats.failed) == {"user": 1}
        await bench.service.tick()
        assert (stats.num_adapters, stats.adapter_bytes, stats.num_sessions) == (2, 1600, 1)
        assert stats.disk_bytes == bench.runs.log.log.num_bytes() > 0
        assert sum(stats.wait.counts) == 6, "each call began once"
        await client.post(f"sessions/{session}/finish")
        assert (await client.http.get("/live/training")).json()["runs"] == []

    play(tmp_path, scene)


def test_the_live_view_of_all_keys_needs_the_admins(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path / "runs")
        keys = tmp_path / "keys"
        keys.write_text("ann tml-ann\nadmin tml-admin\n")
        async with bench.serving(api_key_file=str(keys)) as client:
            for name, status in (("ann", 403), ("admin", 200)):
                assert (await client.http.get("/live/training", f"X-API-Key: tml-{name}")).status == status

    run(test())


def test_inflight_samplers_of_a_run_follow_its_newest_weights(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        directories = []
        for number in (0, 1):
            fields = {"model_id": model, "sampling_session_seq_id": number, "kind": "inflight", "seq_id": 1 + number}
            await client.result(await client.post("save_weights_for_sampler", **fields))
            directories.append(bench.engine.adapters.loaded[f"training:{model}"])
        assert len(bench.engine.adapters.loaded) == 1
        assert directories[0] != directories[1]

    play(tmp_path, scene)


def test_a_gap_holds_later_calls_and_fails_them_when_the_client_is_silent(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        waiting = await client.optim_step(model, 3)
        bench.clock.seconds += 299
        await bench.service.tick()
        assert bench.runs.queue_state(model, 3)[0] == "paused_capacity"
        bench.clock.seconds += 2
        await bench.service.tick()
        result = await client.result(waiting)
        assert "call 1 did not arrive within 300 s" in result["error"]
        assert (await client.forward_backward(model, 1, [[1]])).status == 422, "its place is taken"
        good = await client.result(await client.forward_backward(model, 4, [[1]]))
        assert "loss:sum" in good["metrics"]

    play(tmp_path, scene)


def test_a_silent_session_ends_and_its_models_leave_the_memory(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        model = await client.model(session)
        saved = await client.result(await client.post("save_weights", model_id=model, seq_id=1, path="one"))
        bench.clock.seconds += 899
        await bench.service.tick()
        assert (await client.post("session_heartbeat", session_id=session)).status == 200
        bench.clock.seconds += 899
        await bench.service.tick()
        assert model in bench.compute.trainer.adapters
        bench.clock.seconds += 2
        await bench.service.tick()
        assert (await client.post("session_heartbeat", session_id=session)).status == 410
        assert not bench.compute.trainer.adapters and bench.runs.scheduler.num_bytes == 0
        assert "has ended" in (await client.result(await client.optim_step(model, 2)))["error"]
        again = {"session_id": await client.session(), "model_seq_id": 0, "path": saved["path"], "optimizer": True}
        assert "model_id" in await client.result(await client.post("load_weights", **again))

    play(tmp_path, scene)


def test_a_finished_session_ends_at_once(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        session = await client.session()
        await client.model(session)
        assert (await client.get(f"sessions/{session}")).json()["training_run_ids"] == [f"{session}:train:0"]
        assert (await client.post(f"sessions/{session}/finish", reason={"type": "success"})).status == 200
        assert not bench.compute.trainer.adapters
        assert (await client.post("session_heartbeat", session_id=session)).status == 410

    play(tmp_path, scene)


def test_checkpoints_expire(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        for seq_id, (name, ttl) in enumerate((("soon", 3600), ("later", None)), start=1):
            fields = {"model_id": model, "seq_id": seq_id, "path": name, "ttl_seconds": ttl}
            await client.result(await client.post("save_weights", **fields))
        bad = await client.result(await client.post("save_weights", model_id=model, seq_id=3, path="x", ttl_seconds=60))
        assert "ttl_seconds must be from 3,600" in bad["error"]
        path = f"training_runs/{model}/checkpoints/weights/later"
        assert (await client.send("PUT", f"{path}/ttl", ttl_seconds=7200)).status == 200
        assert (await client.send("PUT", f"{path}/ttl", ttl_seconds=1)).status == 422
        assert (await client.send("POST", f"{path}/publish")).status == 422
        for seconds, left in ((3601, ["weights/later"]), (3600, [])):
            bench.clock.seconds += seconds
            await client.post("session_heartbeat", session_id=model.partition(":")[0])
            await bench.service.tick()
            listed = (await client.get("checkpoints")).json()["checkpoints"]
            assert [each["checkpoint_id"] for each in listed] == left

    play(tmp_path, scene, lease_seconds=1e9)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        for name in ("auth/token", "create_custom_loss", "save_weights_external", "retrieve_futures", "copy_weights"):
            reply = await client.post(name)
            assert reply.status == 422, name
            assert f"/api/v1/{name} is not supported" in reply.json()["error"]

    play(tmp_path, scene)


def test_keys_divide_tenants(tmp_path: Path) -> None:
    async def test() -> None:
        bench = Bench(tmp_path / "runs")
        keys = tmp_path / "keys"
        keys.write_text("ann tml-ann\nbob tml-bob\n")
        async with bench.serving(api_key_file=str(keys)) as client:
            ann, bob = (WireClient(client.http, f"X-API-Key: tml-{name}") for name in ("ann", "bob"))
            assert (await client.post("client/config")).status == 401
            session = await ann.session()
            model = await ann.model(session)
            saved = await ann.result(await ann.post("save_weights", model_id=model, seq_id=1, path="one"))
            assert (await bob.post("session_heartbeat", session_id=session)).status == 410
            assert (await bob.optim_step(model, 2)).status == 404
            assert (await bob.post("get_info", model_id=model)).status == 404
            assert (await bob.retrieve(f"{model}:1")).status == 404
            assert (await bob.post("weights_info", tinker_path=saved["path"])).status == 404
            assert (await bob.send("DELETE", f"training_runs/{model}/checkpoints/weights/one")).status == 404
            assert (await bob.get("checkpoints")).json()["checkpoints"] == []
            load = {"session_id": await bob.session(), "model_seq_id": 0, "path": saved["path"], "optimizer": False}
            assert "there is no checkpoint" in (await bob.result(await bob.post("load_weights", **load)))["error"]

    run(test())


def test_a_full_queue_is_answered_with_a_time_to_wait(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        model = await client.model(await client.session())
        bench.compute.go_on.clear()
        first = await client.forward_backward(model, 1, [[1] * 60] * 4)
        full = await client.forward_backward(model, 2, [[1] * 60] * 4)
        assert (full.status, full.headers["retry-after"]) == (429, "5")
        again = await client.forward_backward(model, 1, [[1] * 60] * 4)
        assert again.json() == first.json(), "a repeated call is known"
        bench.compute.go_on.set()
        await client.result(first)
        second = await client.forward_backward(model, 2, [[1] * 60] * 4)
        assert second.status == 200, "the refused id was not consumed"

    play(tmp_path, scene, max_queued_bytes=6000)


def test_clients_share_packs(tmp_path: Path) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        models = [await client.model(await client.session()) for _ in range(4)]
        bench.compute.go_on.clear()
        ahead = await client.forward_backward(models[0], 1, [[9]])
        await until(lambda: bool(bench.compute.orders and hasattr(bench.compute.orders[-1], "parts")))
        calls = [await client.forward_backward(name, 2 if name == models[0] else 1, [[1, 2]]) for name in models]
        bench.compute.go_on.set()
        for each in (ahead, *calls):
            await client.result(each)
        packs = [order for order in bench.compute.orders if hasattr(order, "parts")]
        assert [len(order.parts) for order in packs] == [1, 4]

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"\xff\xff", 422), (pass_body("nobody", 1, [[1]]), 404), (pass_body("x", 0, [[1]]), 404)],
    ids=["no message", "no model", "no number"],  # the bytes of a message differ between processes
)
def test_bodies_that_name_no_call_are_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async def scene(bench: Bench, client: WireClient) -> None:
        reply = await client.http.post("/api/v1/forward_backward", body, kind="application/x-protobuf")
        assert reply.status == status
        assert (await client.http.post("/api/v1/forward_backward", body)).status == 415
        assert (await client.post("optim_step", seq_id=1)).status == 422

    play(tmp_path, scene)
