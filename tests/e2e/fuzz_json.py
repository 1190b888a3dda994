"""Almost valid requests: every field with every kind of value, pairs of fields, and broken JSON."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from chairlift.models.hashlm_served import HASHLM_VOCAB_SIZE
from chairlift.server.openai.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

__all__ = ["ENDPOINTS", "VALUES", "Body", "Raw", "grid_size", "make_body"]

ENDPOINTS: Final[dict[str, tuple[type[msgspec.Struct], dict[str, Any]]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        {"model": "hashlm", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "seed": 1},
    ),
    "/v1/completions": (CompletionRequest, {"model": "hashlm", "prompt": "Hello", "max_tokens": 3, "seed": 1}),
    "/tokenize": (TokenizeRequest, {"model": "hashlm", "prompt": "Hello"}),
    "/detokenize": (DetokenizeRequest, {"model": "hashlm", "tokens": [72, 105]}),
}
_PATHS: Final = tuple(ENDPOINTS)
_OTHER_FIELDS: Final = (
    *REFUSED,
    *("user", "metadata", "request_id", "session_id", "nobody_knows_this", "__class__", "", "input", "file", "url"),
    *("block_hashes", "token_hashes", "hidden_states", "tensor", "model_path", "adapter", "callback_url"),
)


class Raw(str):
    """JSON text that is sent unchanged, valid or not."""

    __slots__ = ()


def _nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * depth + "1" + closing * depth)


VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 16, 17, 64, 65, 4096, 4097, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1),
    *(2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**39, 10**40, -(10**40)),
    *(0.0, -0.0, 1.0, 1.5, -2.0001, 100.5, 5e-324, 1e-9, 1e300, 1e308, -1e308, Raw("1e999"), Raw("-1e999")),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("9" * 5000), Raw("1" + "0" * 400 + ".5"), Raw("1e-99999")),
    *("", " ", "1", "0", "null", "true", "x", "none", "auto", "text", "a" * 256, "a" * 257, "a" * 5000, "\u00e9" * 300),
    *("\x00", "a\x00b", "\r\nX-Injected: 1", "\x1b[31m", "\u2028\u202e", "\ufeff", "\ufffd", "\U0001f600" * 20),
    *("<|im_start|>", "<|im_end|>" * 50, "{{ 7*7 }}", "{% for i in range(9**9) %}", "../../etc/passwd", "%2e%2e%2f"),
    *("http://127.0.0.1:1/x", "file:///etc/passwd", "data:text/plain;base64,eA==", "gASVAAAA", "a" * 70000),
    *(Raw('"\\ud800"'), Raw('"\\udc00x"'), Raw('"\\u0000"'), Raw('"\\x"'), Raw('"\n"'), Raw("'x'"), Raw("undefined")),
    *([], {}, [[]], [{}], {"": ""}, [None], [1, "a"], ["a", "b"], ["a"] * 17, [""], [" "], ["\u00e9"], [[1, 2], [3]]),
    *([0], [HASHLM_VOCAB_SIZE - 1], [HASHLM_VOCAB_SIZE], [-1], [2**31], [2**63], [1.5], [True], ["1"], [1] * 130),
    *([1] * 5000, ["x"] * 64, ["x"] * 65, [[1]] * 65, [[]] * 3, ["x", None], [["x"]], {"1": 1}, {"a": 1}),
    *({"0": 100}, {"0": 101}, {"258": -100}, {"259": 0}, {"-1": 0}, {"1": None}, {"1": Raw("NaN")}, {"\x00": 1}),
    *({str(i): 1 for i in range(count)} for count in (300, 301)),
    *({"type": "text"}, {"type": "json_object"}, {"include_usage": True}, {"include_usage": 1}, {"role": "user"}),
    *({"enable_thinking": True}, {"messages": []}, {"tools": [1]}, {"x": [1]}, {"x": {"y": 1}}, {"x": "a" * 4097}),
    *([{"role": "user", "content": "x"}], [{"role": "user"}], [{"content": "x"}], [{"role": None, "content": "x"}]),
    *([{"role": "tool", "content": "x"}], [{"role": "user", "content": []}], [{"role": "\x00", "content": "x"}]),
    *(
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "developer", "content": "z"}],
    *([{"role": "user", "content": "x"}] * count for count in (1024, 1025)),
    *(_nested(depth) for depth in (2, 61, 62, 63, 64, 65, 500, 20_000)),
    *(_nested(depth, '{"a":', "}") for depth in (62, 63, 64, 5_000)),
    Raw("[" * 10_000),
)


class Body:
    """A body for one endpoint, how it was created, and whether the server must refuse it."""

    def __init__(self, path: str, data: bytes, how: str, wrong: bool = False) -> None:
        self.path, self.data, self.how, self.wrong = path, data, how, wrong

    def asked(self) -> dict[str, Any]:
        """Fields of the body if it is a JSON object, otherwise an empty mapping."""
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(self.data)
            return fields if isinstance(fields, dict) else {}
        return {}


def grid_size() -> int:
    """Number of bodies in the grid: each has one field with one of the test values."""
    return len(_grid())


def make_body(rng: random.Random, number: int) -> Body:
    """Create body number ``number``. Two in five come from the grid, spread over all numbers; the others are random."""
    if number % 5 < 2:
        grid = _grid()
        step = number // 5 * 2 + number % 5
        path, field, value = grid[step * 7919 % len(grid)]
        return _with_fields(path, {field: value})
    path = rng.choices(_PATHS, (4, 4, 1, 1))[0]
    if number % 5 == 2:
        names = rng.sample(_field_names(path), 2)
        return _with_fields(path, {name: _likely(rng, path, name) for name in names})
    hows = (_many_fields, _inside, _corrupted, _doubled, _several)
    return rng.choices(hows, (4, 2, 2, 1, 1))[0](rng, path)


@functools.cache
def _grid() -> list[tuple[str, str, Any]]:
    cells: list[tuple[str, str, Any]] = []
    for path, (kind, _) in ENDPOINTS.items():
        for field in kind.__struct_fields__:
            cells += [(path, field, value) for value in (*VALUES, *_bounds(path).get(field, ()))]
        others = [name for name in _OTHER_FIELDS if name not in kind.__struct_fields__]
        cells += [(path, field, value) for field in others for value in VALUES[::9]]
    return cells


@functools.cache
def _field_names(path: str) -> tuple[str, ...]:
    return (*ENDPOINTS[path][0].__struct_fields__, "tools", "suffix", "user", "nobody_knows_this")


@functools.cache
def _bounds(path: str) -> dict[str, tuple[Any, ...]]:
    """Field of a request body -> test values: each bound of the field, and the values just below and above the
    bound."""
    kind = ENDPOINTS[path][0]
    _, schemas = msgspec.json.schema_components([kind], ref_template="#/{name}")
    found: dict[str, tuple[Any, ...]] = {}
    for name, schema in schemas[kind.__name__]["properties"].items():
        found[name] = tuple(itertools.chain.from_iterable(map(_edges, schema.get("anyOf", [schema]))))
    return found


def _edges(schema: dict[str, Any]) -> Iterator[Any]:
    for key in ("minimum", "maximum", "exclusiveMinimum"):
        if key in schema:
            yield from (schema[key] - 1, schema[key], schema[key] + 1)
    for key in ("minLength", "maxLength"):
        if key in schema:
            yield from ("a" * max(0, schema[key] + more) for more in (-1, 0, 1))
    for key in ("minItems", "maxItems"):
        if schema.get(key, 10_000) < 10_000:
            yield from (["a"] * max(0, schema[key] + more) for more in (-1, 0, 1))


_GOOD: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {}),
    "messages": (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [{"role": "user", "content": [{"type": "text", "text": "\u00e9"}]}],
        [{"role": "user", "content": ""}],
    ),
    "prompt": ("x", [1, 2, 3], ["a", "b"], [[1], [2, 3]], " ", [258], "\u00e9\U0001f600"),
    "temperature": (0, 0.5, 2),
    "top_p": (0.1, 1),
    "top_k": (-1, 0, 1, 5),
    "n": (1, 2, 4),
    "best_of": (1, 3),
    "stop": ("e", ["a", "\u00e9"], ["<|im_end|>"]),
    "logprobs": (True, 0, 2),
    "top_logprobs": (0, 3),
    "max_tokens": (1, 7, 0),
    "min_tokens": (0, 2, 7),
    "logit_bias": ({"5": 1.5}, {"258": -100}),
    "echo": (True,),
    "prompt_logprobs": (0, 2),
    "cache_salt": ("a", ""),
    "truncate_prompt_tokens": (1, -1, 3),
    "allowed_token_ids": ([1], [5, 6]),
    "stop_token_ids": ([1, 2],),
    "bad_words": (["x"],),
    "continue_final_message": (True,),
    "add_generation_prompt": (True, False),
    "tokens": ([], [0, 258]),
    "seed": (0, -1, 2**63 - 1),
}


def _likely(rng: random.Random, path: str, name: str) -> Any:
    """A value for the field ``name`` that usually passes the first check."""
    pools = (_GOOD.get(name, ()), _bounds(path).get(name, ()), VALUES)
    return rng.choice(rng.choices([pool for pool in pools if pool], (5, 2, 2)[-sum(map(bool, pools)) :])[0])


def _with_fields(path: str, fields: dict[str, Any], how: str = "") -> Body:
    body = ENDPOINTS[path][1] | fields
    described = ", ".join(f"{name}={str(value)[:60]!r}" for name, value in fields.items())
    return Body(path, _dump(body).encode("utf-8", "surrogatepass"), how or described)


def _many_fields(rng: random.Random, path: str) -> Body:
    names = rng.sample(_field_names(path), min(len(_field_names(path)), rng.randint(3, 8)))
    good = {name: rng.choice(_GOOD[name]) for name in names if name in _GOOD}
    spoilt = {rng.choice(names): rng.choice(VALUES)} if rng.random() < 0.3 else {}
    return _with_fields(path, good | spoilt)


def _inside(rng: random.Random, path: str) -> Body:
    """A body with many fields, in which one nested value is replaced."""
    base = copy.deepcopy(ENDPOINTS[path][1])
    for name in rng.sample(sorted(_GOOD), 4):
        if name in ENDPOINTS[path][0].__struct_fields__:
            base[name] = copy.deepcopy(rng.choice(_GOOD[name]))
    places = list(_places(base))
    holder, key = rng.choice(places)
    value = rng.choice(VALUES)
    if isinstance(holder, dict) and rng.random() < 0.2:
        holder[rng.choice(("", "\x00", "type", "text", "role", "nobody", "a" * 300))] = value
    else:
        holder[key] = value
    return Body(path, _dump(base).encode("utf-8", "surrogatepass"), f"[...{key!r}]={str(value)[:60]!r}")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield value, key
        yield from _places(item)


def _corrupted(rng: random.Random, path: str) -> Body:
    """A body in which some bytes are changed, lost, doubled or inserted."""
    data = bytearray(_many_fields(rng, path).data[:5000])
    hows: list[Callable[[int], None]] = [
        lambda at: data.__setitem__(slice(at, at + 1), [rng.randrange(256)]),
        lambda at: data.__delitem__(slice(at, at + rng.randint(1, 20))),
        lambda at: data.__setitem__(slice(at, at), data[at : at + rng.randint(1, 40)]),
        lambda at: data.__setitem__(slice(at, at), rng.choice((b"\x00", b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"}"))),
        lambda at: data.__delitem__(slice(at, None)),
        lambda at: data.__setitem__(slice(at, at), rng.choice((b'"', b"\\", b"\\u", b",", b"[", b"{}", b"NaN", b"//"))),
    ]
    for _ in range(rng.randint(1, 4)):
        rng.choice(hows)(rng.randrange(len(data)) if data else 0)
    return Body(path, bytes(data), "corrupted bytes")


def _doubled(rng: random.Random, path: str) -> Body:
    """A body in which a key occurs twice, with equal or different spelling."""
    name = rng.choice(_field_names(path))
    first, second = (_dump(_likely(rng, path, name)) for _ in range(2))
    spelt = "".join(f"\\u{ord(c):04x}" for c in name) if rng.random() < 0.5 else name
    rest = _dump(ENDPOINTS[path][1])[1:]
    data = f'{{"{name}":{first},"{spelt}":{second},{rest}'.encode("utf-8", "surrogatepass")
    return Body(path, data, f"{name} twice", wrong=True)


def _several(rng: random.Random, path: str) -> Body:
    """Text that is not a single JSON object."""
    good = _dump(ENDPOINTS[path][1])
    text = rng.choice(
        (good + good, good + "\x00", f"[{good}]", "\ufeff" + good, good[:-1], "", "null", "[]", '"x"', "1")
    )
    if rng.random() < 0.2:
        return Body(path, text.encode(rng.choice(("utf-16", "utf-32", "utf-7"))), "another encoding", wrong=True)
    return Body(path, text.encode(), "not one object", wrong=True)


def _dump(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_dump(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
