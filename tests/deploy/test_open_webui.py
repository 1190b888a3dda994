"""The composition with Open WebUI: it fits the server's composition, and the server takes its key and its requests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from chairlift.server.http.app import make_app
from tests.deploy.test_services import SERVICES, settings, text
from tests.server.fake_engine import FakeEngine, make_state
from tests.server.harness import run, serving

MORE: dict[str, Any] = yaml.safe_load(text("compose.openwebui.yaml"))
OPEN_WEBUI: dict[str, Any] = MORE["services"]["open-webui"]
URL = urlsplit(OPEN_WEBUI["environment"]["OPENAI_API_BASE_URL"])


def secrets_of_the_readme(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Run the README's commands that make secrets in ``folder``.

    Returns (name of a key -> key, variables of Open WebUI).
    """
    blocks = [block for block in re.findall(r"```text\n(.*?)```", text("README.md"), re.DOTALL) if "secrets" in block]
    lines = [line for block in blocks for line in block.splitlines()]
    made = [line for line in lines if re.match(r"mkdir|key=|chmod|printf|openssl", line)]
    subprocess.run(["sh", "-ec", "\n".join(made)], cwd=folder, check=True, timeout=60)
    keys = dict(line.split() for line in (folder / "secrets" / "keys").read_text().splitlines())
    (file,) = OPEN_WEBUI["env_file"]
    variables = dict(line.split("=", 1) for line in (folder / file).read_text().splitlines())
    return keys, variables


def test_the_composition_adds_one_service_to_that_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(MORE["services"]) == {"open-webui"} and "open-webui" not in SERVICES
    assert OPEN_WEBUI["depends_on"] == {"chairlift": {"condition": "service_healthy"}}
    port = settings(SERVICES["chairlift"]["command"], capsys)["port"]
    assert (URL.scheme, URL.hostname, URL.port) == ("http", "chairlift", port)
    assert URL.hostname in SERVICES
    assert re.search(r":v\d+\.\d+\.\d+$", OPEN_WEBUI["image"])
    published = [port for service in (*SERVICES.values(), OPEN_WEBUI) for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert len({port.rpartition(":")[0] for port in published}) == len(published)
    assert [volume.split(":")[0] for volume in OPEN_WEBUI["volumes"]] == list(MORE["volumes"])
    command = "docker compose -f compose.yaml -f compose.openwebui.yaml up --build --detach chairlift open-webui"
    assert command in text("README.md").splitlines()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on the PATH to make the secrets")
def test_the_server_takes_the_key_that_the_readme_gives_to_open_webui(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = settings(SERVICES["chairlift"]["command"], capsys)["host"]
    keys, variables = secrets_of_the_readme(tmp_path)
    assert set(keys) == {"admin", "prometheus", "open-webui"} and len(set(keys.values())) == 3
    assert set(variables) == {"OPENAI_API_KEY", "WEBUI_SECRET_KEY"}
    assert variables["OPENAI_API_KEY"] == keys["open-webui"] != variables["WEBUI_SECRET_KEY"]

    async def test() -> None:
        state = make_state(FakeEngine(), host=host, api_key_file=str(tmp_path / "secrets" / "keys"))
        async with serving(make_app(state)) as client:
            key = f"Authorization: Bearer {variables['OPENAI_API_KEY']}"
            assert (await client.get(f"{URL.path}/models", host=URL.netloc)).status == 401
            listed = await client.get(f"{URL.path}/models", key, host=URL.netloc)
            assert listed.status == 200
            model = json.loads(listed.body)["data"][0]["id"]
            asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
            answer = await client.post(f"{URL.path}/chat/completions", json.dumps(asked).encode(), key)
            assert answer.status == 200 and b"data: [DONE]" in answer.body

    run(test())
