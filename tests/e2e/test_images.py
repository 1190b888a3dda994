"""Images through a server: OpenAI's client, streams, and requests that are refused."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.e2e.server_process import ServerProcess
from tests.models.vision.attacks import ATTACKS
from tests.models.vision.test_image_worker import memory_of
from tests.models.vision.tiny import Reference, picture, tiny_tokenizer, tiny_vlm
from tests.native import needs_kernels

pytestmark = needs_kernels
KEY = "sk-of-the-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    (folder / "images").mkdir()
    picture(1, 70, 50).save(folder / "images" / "one.png")
    flags = ("--allowed-local-media-path", str(folder / "images"), "--allowed-media-domains", "127.0.0.1")
    flags += ("--api-key", KEY, "--num-kv-blocks", "80", "--threads", "1", "--dtype", "float32")
    with ServerProcess(str(folder), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def url_of(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def attack(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode(ATTACKS[name]()).decode()


def ask(client: openai.OpenAI, *parts: dict[str, Any], **more: Any) -> Any:
    model = client.models.list().data[0].id
    extra = {"ignore_eos": True, "return_token_ids": True}
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=6, extra_body=extra, **more
    )


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_images_of_a_chat_are_read(client: openai.OpenAI, folder: Path) -> None:
    one, two = picture(1, 70, 50), picture(2, 20, 30)
    text = "<|im_start|>User:<image>or<image><end_of_utterance>\nAssistant:"
    prompt, tokens, _ = Reference(folder).answer(text, [one, two], 6)
    content = part(url_of(one)), {"type": "text", "text": "or"}, part(url_of(two))
    reply = ask(client, *content)
    assert reply.prompt_token_ids == prompt and reply.choices[0].token_ids == tokens
    named = part(f"file://{folder}/images/one.png"), *content[1:]
    assert ask(client, *named).choices[0].token_ids == tokens
    streamed = [chunk for chunk in ask(client, *content, stream=True) if chunk.choices]
    assert [token for chunk in streamed for token in getattr(chunk.choices[0], "token_ids", ())] == tokens


def test_responses_and_messages_read_images(client: openai.OpenAI, folder: Path) -> None:
    image = picture(1, 70, 50)
    text = "<|im_start|>User:<image>or?<end_of_utterance>\nAssistant:"
    prompt, tokens, _ = Reference(folder).answer(text, [image], 6)
    assert 257 not in tokens, "the answer ends early"
    wanted = tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    model, url = client.models.list().data[0].id, url_of(image)
    parts: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "or?"}]
    how: dict[str, Any] = {"model": model, "temperature": 0}
    first = client.responses.create(input=[{"role": "user", "content": parts}], max_output_tokens=6, store=True, **how)
    assert (first.usage.input_tokens if first.usage else 0, first.output_text) == (len(prompt), wanted)
    again = client.responses.create(input="more", previous_response_id=first.id, max_output_tokens=2, **how)
    assert again.usage and again.usage.input_tokens > len(prompt), "the stored image was left out"
    block = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "image", "source": block}, {"type": "text", "text": "or?"}]
    body = {"model": model, "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    reply = client.post("/messages", body=body, cast_to=dict[str, Any])
    used = reply["usage"]
    assert reply["content"][0]["text"] == wanted
    assert used["input_tokens"] + used["cache_read_input_tokens"] == len(prompt)
    content[0]["source"] = {"type": "url", "url": "ftp://127.0.0.1:1/x.png"}
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source must be a data URL"):
        client.post("/messages", body=body, cast_to=dict[str, Any])
    parts[0]["image_url"] = "ftp://example.com/x.png"
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[0\]\.image_url must be a data URL"):
        client.responses.create(input=[{"role": "user", "content": parts}], **how)


def test_a_breakpoint_behind_images_covers_them(client: openai.OpenAI, folder: Path) -> None:
    images = [picture(17, 90, 40), picture(18, 90, 40)]
    texts = [f"<|im_start|>User:<image><image>{text}<end_of_utterance>\nAssistant:" for text in ("or?", "no!")]
    prompt, other = (Reference(folder).answer(text, images, 1)[0] for text in texts)
    place = next(at for at, (one, two) in enumerate(zip(prompt, other, strict=True)) if one != two)
    whole = place // 16 * 16
    assert whole > place - len(prompt) / 4, "the last whole block ends within the second image"
    parts: list[dict[str, Any]] = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": url_of(each).partition(",")[2]},
        }
        for each in images
    ]
    parts[1]["cache_control"] = {"type": "ephemeral"}
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "or?"}]}]
    body = {"model": client.models.list().data[0].id, "max_tokens": 2, "messages": messages}
    used = client.post("/messages", body=body, cast_to=dict[str, Any])["usage"]
    kept = used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert (kept, used["input_tokens"]) == (whole, len(prompt) - whole)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((part("http://127.0.0.1:1/cat.png"),), "has a private address, which is not read"),
        ((part("https://example.com/cat.png"),), r"images are read from 127\.0\.0\.1 only"),
        ((part("file:///etc/passwd"),), "names no image file in the server's folder"),
        ((part("ftp://example.com/cat.png"),), "must be a data URL"),
        ((part("data:image/png;base64,AAAA"),), "is no image that can be read"),
        ((part(attack("line")),), "one side may be 200 times as long as the other"),
        ((part(attack("tile")),), "has tiles of 16,384 x 16,384 pixels for an image of 16 x 16"),
        ((part(attack("webp, huge canvas")),), "an image may have 1 to 40,000,000"),
        (({"type": "image"},), "must be an image of Pillow"),
        (({"type": "input_audio", "input_audio": {}},), "no model reads audio here: send a transcript as text"),
        (({"type": "video_url", "video_url": {}},), "no model reads video here: send frames as images to a model of"),
        ((part(url_of(picture(1))), {"type": "text", "text": "<image>"}), "has 2 places for images"),
        ((*[part(url_of(picture(1, 70, 50)))] * 20,), "positions of the prompt, and the model has at most 512"),
        ((part("data:image/png;base64,AAAA"),) * 65, "have 65 images; at most 64 are read"),
    ],
    ids=[
        "private",
        "host",
        "file",
        "address",
        "broken",
        "line",
        "tile",
        "canvas",
        "no image",
        "audio",
        "video",
        "marker in a text",
        "too long",
        "too many",
    ],
)
def test_images_are_refused_with_the_reason(client: openai.OpenAI, content: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(client, *content)
    assert ask(client, {"type": "text", "text": "still there"}).choices[0].token_ids


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_attacks_at_once_leave_the_server_small_and_awake(client: openai.OpenAI, server: ServerProcess) -> None:
    """Each attack is a valid image or a 400. A chat without images is answered while they run."""
    attacks = [attack(name) for name in ("large", "webp", "many chunks", "scans", "line", "tile", "strips", "long")]
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the largest resident size begins again
    before = memory_of(server.pid, "VmRSS")

    def outcome(url: str) -> bool:
        try:
            return bool(ask(client, part(url)).choices)
        except openai.BadRequestError:
            return False

    with ThreadPoolExecutor(16) as threads:
        running = [threads.submit(outcome, url) for url in attacks * 2]
        assert ask(client, {"type": "text", "text": "still there"}).choices
        assert not all(each.done() for each in running), "the chat waited for all images"
        assert [each.result() for each in running] == [True, True, False, True, False, False, True, True] * 2
    assert memory_of(server.pid) - before < 600 << 20
