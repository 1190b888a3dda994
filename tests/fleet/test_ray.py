"""Replicas in a Ray cluster of this machine, where Ray is installed; and what is refused without a cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import LLM
from chairlift.base.outputs import OutputKind
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.async_engine import AsyncEngine
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.fleet.node import NodeFacts, addresses_of, is_open, listening_addresses
from chairlift.fleet.ray import RayCluster, _Actor, ray_replicas
from chairlift.loading.sizes import needed_bytes
from chairlift.server.http.lifecycle import start_engine
from chairlift.version import __version__
from tests.e2e.oracle import expected_hashlm
from tests.e2e.server_process import ServerProcess
from tests.fleet.storm import parent_of, storm
from tests.fleet.test_local import bounded, until

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
CONFIG = EngineConfig.from_flat({"model": "hashlm:2ms", "max_num_seqs": 4, "num_kv_blocks": 500})


_tokens: list[str] = []
"""Token of this process's first cluster. Ray reads the token once in a process, so a second cluster needs the same."""


@pytest.fixture
def environment(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[pytest.MonkeyPatch]:
    """An environment without settings of Ray, in which the home directory has no token."""
    names = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"
    for name in (*names, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if _tokens and "local" in request.node.name:
        monkeypatch.setenv("RAY_AUTH_TOKEN", _tokens[0])
    yield monkeypatch
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
        _tokens.append(os.environ.get("RAY_AUTH_TOKEN", ""))


def test_a_replica_without_room_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The cluster never finds processors for it."""

    class Full:
        def room(self, memory: int | None) -> str:
            assert memory is None
            return "0 of 4 processors are free"

        def future(self) -> concurrent.futures.Future[Any]:
            return concurrent.futures.Future()

    async def wait() -> None:
        monkeypatch.setattr("chairlift.fleet.ray._WAIT_SECONDS", 0.001)
        monkeypatch.setattr("chairlift.fleet.ray._ROOM_SECONDS", 0.02)
        with pytest.raises(EngineDeadError, match=r"had no room for the replica for 0\.02 s: 0 of 4 processors"):
            await _Actor(Full(), 3, False)._place(Full())  # type: ignore[arg-type]

    asyncio.run(wait())
    assert "replica 3 waits for room" in caplog.text


def test_a_cluster_without_a_token_is_refused(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token is missing.*\.ray/auth_token"):
        ray_replicas(CONFIG, 2, "auto")
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    environment.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ConfigError, match=f"chmod 600 {token}"):
        ray_replicas(CONFIG, 2, "auto")
    environment.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is 'disabled'"):
        ray_replicas(CONFIG, 2, "local")


def test_a_model_on_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'; start a server for each GPU"):
        ray_replicas(EngineConfig.from_flat({"device": "cuda"}), 2, "local")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_package_is_named(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[ray\]'"):
        ray_replicas(CONFIG, 2, "local")


def start(**settings: Any) -> AsyncEngine:
    config = ServerConfig(replicas=2, ray_address="local", **settings)
    return start_engine(CONFIG, config, lambda label, share: None)


@needs_ray
@pytest.mark.nightly
def test_streams_of_a_local_cluster_survive_lost_engines_actors_and_restarts(environment: pytest.MonkeyPatch) -> None:
    """An engine is killed, then an actor, then both replicas are drained and restarted: no stream is harmed."""

    async def test() -> None:
        engine = start()
        try:
            await engine.wait_ready()
            assert not (Path.home() / ".ray").exists(), "the token was written to a file"
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
            pids = [each.pid for each in engine.replicas.shown() if each.pid is not None]
            assert len(set(pids)) == 2
            if len(os.sched_getaffinity(0)) > 1:
                assert not os.sched_getaffinity(pids[0]) & os.sched_getaffinity(pids[1])
            names = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
            assert not any(b"RAY_AUTH_TOKEN" in each for each in names), "the engine knows the token"
            params = SamplingParams(max_tokens=150, ignore_eos=True, seed=3)
            for turn, harm in enumerate(("engine", "actor", "restart")):
                told = engine.stats.generation_tokens
                prompts = [[7, turn + 1, number] for number in range(1, 13)]
                streams = [await engine.submit(prompt, params, kind=OutputKind.FINAL) for prompt in prompts]
                await until(lambda told=told: engine.stats.generation_tokens > told + 100)
                victim = engine.replicas.shown()[turn % 2].pid
                assert victim is not None
                if harm == "engine":
                    os.kill(victim, signal.SIGKILL)
                elif harm == "actor":
                    os.kill(parent_of(victim), signal.SIGKILL)
                else:
                    await engine.replicas.restart(30.0)
                for prompt, stream in zip(prompts, streams, strict=True):
                    (output,) = [each async for each in stream]
                    assert output.outputs[0].token_ids == expected_hashlm(prompt, params).token_ids
                await until(lambda: all(each.state == "ready" for each in engine.replicas.shown()))
                await until(lambda victim=victim: not Path(f"/proc/{victim}").exists())
            assert [each.restarts for each in engine.replicas.shown()] == [2, 2]
            assert engine.stats.num_lost == 0
        finally:
            await engine.shutdown()

    bounded(test)


@needs_ray
@pytest.mark.nightly
def test_every_request_to_a_local_cluster_is_answered_right_or_told(environment: pytest.MonkeyPatch) -> None:
    """2,000 requests while engines, actors and both replicas end, stop and restart at random times."""

    async def test() -> None:
        engine = start(health_timeout=3.0, max_num_queued_reqs=4000)
        try:
            await engine.wait_ready()
            ends, harms = await storm(engine, 2000, 1, ("kill", "actor", "stop", "restart"))
            assert set(ends) <= {"answered", "told", "left"} and ends["answered"] > 0.9 * ends.total(), ends
            assert harms.total() >= 3, harms
        finally:
            await engine.shutdown()

    bounded(test, 500.0)


def refusal(*flags: str) -> str:
    """What a server with these flags says when it refuses to start."""
    command = [sys.executable, "-m", "chairlift", "serve", "hashlm", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (2, 3), done.stderr
    return done.stderr


@needs_ray
@pytest.mark.nightly
def test_too_many_replicas_are_refused(environment: pytest.MonkeyPatch) -> None:
    assert "fewer than 64 replicas; start fewer" in refusal("--replicas", "64", "--ray-address", "local")


@needs_ray
@pytest.mark.nightly
def test_a_cluster_that_asks_for_no_token_is_refused(environment: pytest.MonkeyPatch) -> None:
    command = Path(sys.executable).with_name("ray")
    free = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    started = [command, "start", "--head", "--port=0", "--num-cpus=2", "--include-dashboard=false"]
    subprocess.run([*started, "--object-store-memory=80000000"], env=free, check=True, capture_output=True)
    environment.setenv("RAY_AUTH_TOKEN", "0" * 64)
    try:
        assert "RAY_AUTH_MODE=token" in refusal("--replicas", "2", "--ray-address", "auto")
    finally:
        subprocess.run([command, "stop", "--force"], env=free, check=True, capture_output=True)


def engines_of_actors() -> set[int]:
    """Process ids of the engines that actors of this machine have started."""
    found = set()
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(each.parent.name)
            if (
                b"engine_process" in each.read_bytes()
                and b"ray::" in Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes()
            ):
                found.add(pid)
    return found


MODELS = "models: {a: 'hashlm:2ms', b: {model: 'hashlm:2ms:seed=2'}, c: {model: 'hashlm:2ms:seed=3'}}"


@needs_ray
@pytest.mark.nightly
def test_models_are_loaded_in_a_local_cluster_and_leave_it(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is memory for two of three models, and an actor is lost."""
    (tmp_path / "models.yaml").write_text(MODELS)
    each = needed_bytes(CONFIG)
    flags = f"--models={tmp_path / 'models.yaml'}", "--models-memory-bytes", str(2 * each), "--num-kv-blocks", "500"
    prompt = [7, 8, 9]

    def ask(server: ServerProcess, model: str) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": 20, "seed": 1, "ignore_eos": True}
        reply = httpx.post(
            f"http://127.0.0.1:{server.port}/v1/completions", json=body | {"return_token_ids": True}, timeout=100
        )
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    with ServerProcess(*flags, "--ray-address", "local") as server:
        answers = [ask(server, model) for model in ("a", "b", "c", "a")]
        pids = engines_of_actors()
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        asyncio.run(until(lambda: not engines_of_actors() & pids))
        answers += [ask(server, model) for model in ("a", "b")]
    seeds = "", ":seed=2", ":seed=3", "", "", ":seed=2"
    assert answers == [LLM(f"hashlm{seed}").generate([prompt], params)[0].outputs[0].token_ids for seed in seeds]


@needs_ray
@pytest.mark.nightly
def test_actors_of_a_local_cluster_follow_the_traffic(environment: pytest.MonkeyPatch) -> None:
    """A burst adds an actor of Ray, and a calm time removes one. Every answer is right."""

    async def test() -> None:
        settings = {"min_replicas": 1, "max_replicas": 2, "autoscale_wait": 0.2, "autoscale_delay": 2.0}
        server = ServerConfig(ray_address="local", **settings)
        engine = start_engine(CONFIG, server, lambda label, share: None)
        params = SamplingParams(max_tokens=150, ignore_eos=True, seed=3)

        async def one(number: int) -> None:
            prompt = [7, number % 200 + 1]
            (output,) = [each async for each in await engine.submit(prompt, params, kind=OutputKind.FINAL)]
            assert output.outputs[0].token_ids == expected_hashlm(prompt, params).token_ids

        try:
            await engine.wait_ready()
            assert [each.state for each in engine.replicas.shown()] == ["ready", "off"]
            for _ in range(20):  # until the second actor serves
                await asyncio.gather(*map(one, range(60)))
                if engine.replicas.shown()[1].sent:
                    break
            assert engine.replicas.shown()[1].sent
            await until(lambda: sorted(each.state for each in engine.replicas.shown()) == ["off", "ready"])
            await asyncio.gather(*map(one, range(4)))
            state = engine.replicas.autoscaling()
            assert state is not None and (state.num_added, state.num_removed) == (1, 1) and state.start_seconds > 0.5
            assert engine.stats.num_lost == 0
        finally:
            await engine.shutdown()

    bounded(test, 200.0)


@needs_ray
@pytest.mark.nightly
def test_a_local_cluster_listens_on_this_machine_only(environment: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = start()
        try:
            await engine.wait_ready()
            found = [*listening_addresses(), *addresses_of(os.getpid())]
            assert len(found) > 5 and not list(filter(is_open, found))
        finally:
            await engine.shutdown()

    bounded(test)


@needs_ray
@pytest.mark.nightly
def test_a_local_cluster_that_others_could_reach_is_refused(environment: pytest.MonkeyPatch) -> None:
    """Ray reads the variable when it is imported, here by the caller's own program."""
    program = (
        "import asyncio, ray\n"
        "from chairlift.fleet.ray import RayCluster\n"
        "asyncio.run(RayCluster('local', 1, 1).join())\n"
    )
    known = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    known.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=120, check=False)
    assert "because Ray was imported before; set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in done.stderr


def test_addresses_that_other_machines_can_reach_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster = RayCluster.__new__(RayCluster)
    cluster._reported = set()
    local = {"127.0.0.1:1": "raylet", "[::ffff:127.0.0.1]:2": "gcs_server"}
    opened = {"[::]:3": "raylet", "0.0.0.0:44217": "metrics"}
    for node, listening in (("a", local), ("b", local | opened), ("b", local | opened)):
        facts = NodeFacts(
            address=("192.0.2.7", 9),
            version=__version__,
            processors=[],
            memory=0,
            authenticated=True,
            listening=listening,
        )
        cluster.check(node, facts)
    (record,) = caplog.records
    shown = "[::]:3 (raylet), 0.0.0.0:44217 (metrics)"
    assert record.getMessage().endswith(f"commands need the token, metrics do not: {shown}")
