"""The lines of batches: what is a request, and what the reason says where a line is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.server.openai.batches import BadLine, answer_line, error_line, read_line

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"n": 1}}


def line(**changes: Any) -> bytes:
    fields = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    return json.dumps(fields).encode()


def test_the_body_reaches_the_endpoint_as_it_stands() -> None:
    found = read_line(
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x":1, "x":2.50}}\n',
        "/v1/completions",
    )
    assert (found.custom_id, found.body) == ("a", b'{"x":1, "x":2.50}')
    assert read_line(b"\xef\xbb\xbf" + line(), CHAT).custom_id == "a"


@pytest.mark.parametrize(
    ("content", "code", "param", "custom_id"),
    [
        (b"{nothing", "invalid_json_line", None, None),
        (b"[1]", "invalid_json_line", None, None),
        (b'{"custom_id": "\xff"}', "invalid_type", "custom_id", None),
        (line(custom_id=...), "missing_field", "custom_id", None),
        (line(custom_id=3), "invalid_type", "custom_id", None),
        (line(custom_id=""), "invalid_value", "custom_id", None),
        (line(custom_id="x" * 513), "invalid_value", "custom_id", None),
        (line(method="GET"), "invalid_method", "method", "a"),
        (line(method=...), "missing_field", "method", "a"),
        (line(url="/v1/completions"), "mismatched_url", "url", "a"),
        (line(body=...), "invalid_value", "body", "a"),
        (line(body="text"), "invalid_value", "body", "a"),
        (line(headers={}), "unknown_field", "headers", "a"),
    ],
)
def test_a_line_that_is_no_request_says_why(
    content: bytes, code: str, param: str | None, custom_id: str | None
) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(content, CHAT)
    assert (caught.value.code, caught.value.param, caught.value.custom_id) == (code, param, custom_id)
    assert len(str(caught.value)) < 600


def test_answers_become_lines_of_the_output_file() -> None:
    good = json.loads(answer_line("a", 200, "req-1", b'{"id":"x"}'))
    assert good["response"] == {"status_code": 200, "request_id": "req-1", "body": {"id": "x"}}
    assert good["custom_id"] == "a" and good["error"] is None and good["id"].startswith("batch_req_")
    text = "a\u0085b\u2028c\u2029d"
    split = answer_line(text, 200, "q", json.dumps({"x": text}, ensure_ascii=False).encode()).decode()
    assert len(split.splitlines()) == 1 and json.loads(split)["response"]["body"]["x"] == text
    bad = json.loads(error_line(None, "invalid_value", "why", line=7, param="url"))
    assert bad["error"] == {"code": "invalid_value", "message": "why", "param": "url", "line": 7}
    assert bad["response"] is None and bad["custom_id"] is None
