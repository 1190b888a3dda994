"""Files that start several replicas: their command lines are accepted, and their parts fit together."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from tests.deploy.test_services import COMPOSE, REST_OF_THE_STOP, settings, text

KUBERNETES: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all(text("kubernetes.yaml"))}
RAY: dict[str, Any] = {each["kind"]: each for each in yaml.safe_load_all(text("kuberay.yaml"))}


def words_of_the_ray_head() -> list[str]:
    (script,) = container(RAY["RayCluster"]["spec"]["headGroupSpec"]["template"])["args"]
    _, _, command = script.replace("\\\n", " ").partition("exec chairlift ")
    return shlex.split(command)


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    found: dict[str, Any] = only
    return found


def test_the_second_composition_changes_the_number_of_replicas_only(capsys: pytest.CaptureFixture[str]) -> None:
    more = yaml.safe_load(text("compose.replicas.yaml"))
    assert more["services"].keys() == {"chairlift"} and more["services"]["chairlift"].keys() == {"command"}
    command = more["services"]["chairlift"]["command"]
    assert command == [*COMPOSE["services"]["chairlift"]["command"], "--replicas=2"]
    assert settings(command, capsys)["replicas"] == 2


def test_the_pod_has_the_flags_and_the_stopping_time_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    template = KUBERNETES["Deployment"]["spec"]["template"]
    server = container(template)
    found = settings(server["args"], capsys)
    assert found["replicas"] == 2 and found["api_key_file"] == "/run/secrets/chairlift/keys"
    assert template["spec"]["terminationGracePeriodSeconds"] >= found["shutdown_timeout"] + REST_OF_THE_STOP
    assert [port["containerPort"] for port in server["ports"]] == [found["port"]]
    assert KUBERNETES["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    assert {"chairlift.yaml"} == set(yaml.safe_load(text("kustomization.yaml"))["configMapGenerator"][0]["files"])
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in server["volumeMounts"]} == volumes


def test_each_worker_has_room_for_one_replica(capsys: pytest.CaptureFixture[str]) -> None:
    spec = RAY["RayCluster"]["spec"]
    found = settings(words_of_the_ray_head(), capsys)
    (group,) = spec["workerGroupSpecs"]
    worker = container(group["template"])
    assert group["replicas"] == found["replicas"] == 2 and found["ray_address"] == "auto"
    assert worker["resources"]["limits"]["cpu"] == worker["resources"]["requests"]["cpu"] == str(found["threads"])
    assert spec["authOptions"] == {"mode": "token"} and spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for template in (spec["headGroupSpec"]["template"], group["template"]):
        environment = {each["name"]: each["value"] for each in container(template)["env"]}
        assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container(template)["volumeMounts"]} == volumes
    grace = spec["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= found["shutdown_timeout"] + REST_OF_THE_STOP
    assert RAY["Service"]["spec"]["selector"]["ray.io/cluster"] == RAY["RayCluster"]["metadata"]["name"]
