from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift.cli.main import main
from chairlift.config import ServerConfig
from chairlift.server.http.app import make_app
from chairlift.server.http.lifecycle import ExitCode
from tests.server.harness import StateOnlyEngine, make_state, run, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONFIG = "/etc/chairlift/chairlift.yaml"
"""Where the unit and the container have deploy/chairlift.yaml."""
KNOWN_INSTRUCTIONS = "ARG|FROM|RUN|ENV|WORKDIR|COPY|USER|EXPOSE|HEALTHCHECK|ENTRYPOINT|CMD"
REST_OF_THE_STOP = 10.0
"""Seconds that a server needs at most after its drain: last words, the engine's end, unsent bytes."""


def text(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


COMPOSE: dict[str, Any] = yaml.safe_load(text("compose.yaml"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load(text("prometheus.yml"))


def unit() -> dict[str, dict[str, list[str]]]:
    """Sections of the unit: key -> its values, in order. Fails on what systemd would not take as it is meant."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in text("chairlift.service").splitlines():
        if not line or line.startswith("#"):
            continue
        if heading := re.fullmatch(r"\[(Unit|Service|Install)\]", line):
            assert heading[1] not in sections
            section = sections[heading[1]] = {}
        else:
            pair = re.fullmatch(r"([A-Z][A-Za-z]+)=(\S.*\S|\S|)", line)
            assert pair is not None, line
            section.setdefault(pair[1], []).append(pair[2])
    return sections


def one(key: str) -> str:
    (value,) = unit()["Service"][key]
    return value


def seconds(span: str) -> float:
    match = re.fullmatch(r"(\d+)s?", span)
    assert match is not None, span
    return float(match[1])


def settings(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Settings that ``chairlift`` reads from a command line, by its own --dry-run."""
    words = [word.replace(CONFIG, str(DEPLOY / "chairlift.yaml")) for word in arguments]
    assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return found


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, continued lines joined."""
    lines = "\n".join(line for line in text("Dockerfile").splitlines() if line and not line.startswith("#"))
    pairs = []
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        word, _, rest = line.partition(" ")
        assert re.fullmatch(KNOWN_INSTRUCTIONS, word), word
        pairs.append((word, rest.strip()))
    return pairs


def image_command() -> tuple[list[str], list[str]]:
    found = dict(instructions())
    return json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])


def probe() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    command: list[str] = json.loads(dict(instructions())["HEALTHCHECK"].partition(" CMD ")[2])
    return command


# --- systemd ---------------------------------------------------------------------------------------------------------


def test_the_unit_starts_what_the_command_line_takes(capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(one("ExecStart"))
    assert program.startswith("/") and program.endswith("/bin/chairlift")
    found = settings(arguments, capsys)
    assert found["host"] == "127.0.0.1"
    assert found["api_key_file"] == "%d/keys"
    assert [line.partition(":")[0] for line in unit()["Service"]["LoadCredential"]] == ["keys"]


def test_the_unit_waits_for_the_drain(capsys: pytest.CaptureFixture[str]) -> None:
    drain = settings(shlex.split(one("ExecStart"))[1:], capsys)["shutdown_timeout"]
    assert seconds(one("TimeoutStopSec")) >= drain + REST_OF_THE_STOP
    assert one("KillMode") == "mixed"
    assert one("SuccessExitStatus") == str(128 + signal.SIGTERM), "what it ends with before it is a server"


def test_the_unit_restarts_what_may_get_better() -> None:
    assert one("Restart") == "on-failure"
    assert one("RestartPreventExitStatus") == str(ExitCode.UNUSABLE.value)
    assert one("OOMPolicy") == "continue"
    assert int(one("LimitNOFILE")) >= ServerConfig().max_connections + 256
    assert {"StartLimitIntervalSec", "StartLimitBurst"} <= set(unit()["Unit"])


def test_the_unit_is_locked_up() -> None:
    service = unit()["Service"]
    for key in ("NoNewPrivileges", "DynamicUser", "PrivateTmp", "ProtectHome", "RestrictNamespaces", "LockPersonality"):
        assert service[key] == ["yes"]
    assert one("ProtectSystem") == "strict"
    assert one("CapabilityBoundingSet") == ""
    assert one("SystemCallFilter") == "@system-service"
    assert set(one("RestrictAddressFamilies").split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}
    assert one("WorkingDirectory") == f"%S/{one('StateDirectory')}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on the PATH")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "chairlift.service"
    program = shlex.split(one("ExecStart"))[0]
    copy.write_text(text("chairlift.service").replace(program, sys.executable))  # it looks whether that is there
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=300)
    complaints = [line for line in done.stderr.splitlines() if copy.name in line]
    assert (done.returncode, complaints) == (0, [])


# --- the image -------------------------------------------------------------------------------------------------------


def test_the_image_is_built_in_two_stages_and_runs_as_nobody_special() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "ARG" and words.count("FROM") == 2
    last_stage = instructions()[len(words) - words[::-1].index("FROM") :]
    assert not any(word == "RUN" and "apt-get" in rest for word, rest in last_stage)
    (user,) = [rest for word, rest in last_stage if word == "USER"]
    (made,) = [rest for word, rest in last_stage if word == "RUN" and "useradd" in rest]
    assert user.split(":")[0] != "0" and f"--uid {user.split(':')[0]} " in made


def test_the_image_has_what_the_package_is_built_from() -> None:
    stages, copied = set(), set()
    for word, rest in instructions():
        if word == "FROM" and " AS " in rest:
            stages.add(rest.split(" AS ")[1])
        elif word == "COPY" and rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages
        elif word == "COPY":
            copied |= set(rest.split()[:-1])
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    licences = {name for name in project["license-files"] if not name.startswith("chairlift/")}
    assert {
        "pyproject.toml",
        "setup.py",
        "chairlift",
        "chairlift_lab",
        "chairlift_train",
        "csrc",
        project["readme"],
        *licences,
    } <= copied
    let_through = {line[1:] for line in text("Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    assert let_through == copied


def test_the_python_of_the_image_is_a_supported_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    match = re.match(r"PYTHON=python:(\d+)\.(\d+)-slim", dict(reversed(instructions()))["ARG"])
    assert match is not None
    least = project["requires-python"].removeprefix(">=").split(".")
    assert (int(match[1]), int(match[2])) >= (int(least[0]), int(least[1]))


def test_the_image_serves_where_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    entry, command = image_command()
    assert entry == ["chairlift"]
    found = settings(command, capsys)
    assert found["host"] == "0.0.0.0"
    assert str(found["port"]) == dict(instructions())["EXPOSE"]
    assert f"'127.0.0.1', {found['port']}," in probe()[-1]


@pytest.mark.parametrize(("trouble", "code"), [("", 0), ("it is stuck", 1)])
def test_the_probe_tells_a_healthy_server_from_a_stuck_one(trouble: str, code: int) -> None:
    engine = StateOnlyEngine()
    engine.trouble = trouble

    async def check() -> None:
        async with serving(make_app(make_state(engine, api_key=("secret",)))) as client:
            script = probe()[-1].replace("8000", str(client.port))
            process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", script)
            assert await process.wait() == code

    run(check())


# --- compose ---------------------------------------------------------------------------------------------------------


def mounts(service: str) -> dict[str, str]:
    """Place in the container -> the file, folder or volume that is there."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        source, target, *_ = re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", volume).split(":")
        found[target] = source
    return found


def test_the_composition_starts_what_the_command_line_takes(capsys: pytest.CaptureFixture[str]) -> None:
    service = SERVICES["chairlift"]
    found = settings(service["command"], capsys)
    assert service["ports"] == [f"127.0.0.1:8000:{found['port']}"]
    assert found["host"] == "0.0.0.0"
    assert found["api_key_file"] == "/run/secrets/chairlift_keys"
    assert settings(image_command()[1], capsys)["api_key_file"] == found["api_key_file"]
    assert seconds(service["stop_grace_period"]) >= found["shutdown_timeout"] + REST_OF_THE_STOP
    assert mounts("chairlift")[CONFIG] == "./chairlift.yaml"


def test_the_server_in_the_composition_is_locked_up() -> None:
    service = SERVICES["chairlift"]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    assert service["ulimits"]["nofile"] >= ServerConfig().max_connections + 256
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_everything_that_is_mounted_is_there() -> None:
    assert set(SERVICES) == {"chairlift", "prometheus", "grafana"}
    named = set()
    for name in SERVICES:
        for source in mounts(name).values():
            if not source.startswith("./"):
                named.add(source)
            elif source != "./models":  # whoever has models, has a folder for them
                assert (DEPLOY / source).is_file(), source
    assert named == set(COMPOSE["volumes"])


def test_secrets_are_declared_used_and_not_in_the_repository() -> None:
    used = [secret for service in SERVICES.values() for secret in service["secrets"]]
    assert sorted(used) == sorted(COMPOSE["secrets"])
    ignored = text(".gitignore").split()
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/") and "secrets/" in ignored
        assert secret["file"].removeprefix("./") in text("README.md")
    read = {path for service in SERVICES.values() for path in re.findall(r"/run/secrets/(\w+)", json.dumps(service))}
    (scrape,) = PROMETHEUS["scrape_configs"]
    read.add(scrape["authorization"]["credentials_file"].removeprefix("/run/secrets/"))
    assert read == set(used)


def test_only_this_machine_reaches_the_ports() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_finds_the_server_and_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    (scrape,) = PROMETHEUS["scrape_configs"]
    port = settings(SERVICES["chairlift"]["command"], capsys)["port"]
    assert scrape["job_name"] == "chairlift"
    assert scrape["static_configs"] == [{"targets": [f"chairlift:{port}"]}]
    folder = "/etc/prometheus"
    assert f"--config.file={folder}/prometheus.yml" in SERVICES["prometheus"]["command"]
    for name in ("prometheus.yml", *PROMETHEUS["rule_files"]):
        assert mounts("prometheus")[f"{folder}/{name}"] == f"./{name}"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = yaml.safe_load(text("grafana/datasource.yml"))["datasources"]
    (port,) = [port.split(":")[-1] for port in SERVICES["prometheus"]["ports"]]
    assert source["type"] == "prometheus" and source["url"] == f"http://prometheus:{port}"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    (provider,) = yaml.safe_load(text("grafana/dashboards.yml"))["providers"]
    places = mounts("grafana")
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert places[home] == "./grafana-dashboard.json"
    assert Path(home).parent == Path(provider["options"]["path"])
    for kind, name in (("datasources", "datasource"), ("dashboards", "dashboards")):
        assert places[f"/etc/grafana/provisioning/{kind}/chairlift.yml"] == f"./grafana/{name}.yml"


def test_images_have_versions() -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"])
