"""Each cache has a decision: its keys contain the caller's salt, or its content does not depend on callers.

A cache that callers with different API keys share shows one caller, by its response times, what another one has sent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import modules, tree

PACKAGES = (
    *("base.workers", "core.kv_cache", "core.spec_decode", "engine", "executor", "fleet", "models.vision", "server"),
    "text",
)
_DICTS = {"BlockIndex", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary", "defaultdict", "dict"}
_DECORATORS = {"cache", "cached_property", "lru_cache"}

KEYED = {
    "engine.grammars": "_kept _jobs",
    "engine.images": "_sizes _tiles _unused _seconds _worth _users _queue",
    "executor.image_bank": "rows",
    "text.grammar.checker": "_good",
    "core.kv_cache.prefix_cache": "_nodes",
    "core.kv_cache.swap": "_kept",
    "engine.kv_store.index": "_spare",
    "engine.kv_store.store": "_index _namespaces _others _own _pending",
    "core.spec_decode.suffix": "_answers _ends _texts",
    "fleet.routing": "_keys _sessions",
}
"""Caches that outlive requests. Their keys come from :func:`chairlift.base.cache_key.cache_key` (or, for blocks and
tiles, stand for things with such keys)."""

OWNED = {"engine.mask_limits": "_accounts", "server.openai.response_store": "_stored _bytes _of_items"}
"""Caches whose first key is the holder itself, and whose entries are found by random ids or are sums of the holder's
own requests."""

OF_REQUESTS = {
    "fleet.door": "_keys _requests _at _pinned _newest",
    "fleet.fleet_adapters": "_loads _loading",
    "fleet.jobs": "_jobs _answers _ended_at",
    "fleet.door_forecast": "_loading",
    "fleet.member": "guests loading",
    "fleet.moves": "_drained _moves",
    "fleet.ray": "_claims",
    "fleet.routing": "unstarted small",
    "engine.adapters": "_of",
    "engine.async_engine": "_streams",
    "engine.causes": "_accounts _hanging",
    "engine.core_statistics": "_rows_by_class _of_cache",
    "engine.grammars": "_rows",
    "engine.images": "_waiting _of _requests",
    "engine.kv_blocks": "_waiting",
    "engine.kv_moves": "_leaving _coming _paused",
    "engine.intake": "_waiting _loading _starts _unforeseen _lane_ends",
    "engine.mask_limits": "of",
    "engine.output_processor": "_states _answers",
    "engine.process.process_client": "_asides",
    "engine.served_adapters": "_loads",
    "engine.step_export": "requests rows _rows _resting",
    "engine.step_recorder": "_numbers _started _flights _leaving",
    "engine.fair_queue": "_waiting _spent",
    "executor.drafters.draft_model": "_preempted",
    "executor.drafters.drafting": "known",
    "executor.input_batch": "images _axes",
    "executor.drafters.kept_blocks": "_tables",
    "text.grammar.lark": "_bodies _done _lines",
    "text.grammar.structural_tag": "_without",
    "core.kv_cache.manager": "swapped",
    "server.openai.batches.worker": "_works",
    "server.models.hosts": "_waiting",
    "server.openai.completions": "_offsets",
    "server.pages.live_feed": "_names",
    "server.anthropic.messages_input": "places",
    "server.openai.responses_input": "places",
    "server.operations.tracing": "_under_way",
    "server.operations.traffic": "_numbers",
    "server.openai.translation": "places namespaces",
    "core.spec_decode.acceptance": "requests",
    "core.spec_decode.adaptive": "_texts _sources",
    "core.spec_decode.ngram": "_ends _indexes",
    "core.spec_decode.predicted": "_ends",
    "core.spec_decode.suffix": "_own",
    "text.tokenizer.shield": "_symbol_of",
}
"""State of requests in progress: an entry is found by the id of its own request or row, and leaves with it."""

OF_ADAPTERS = {
    "engine.adapter_names": "_by_name _by_int_id",
    "engine.adapters": "_content _digests _known _resident sizes",
    "executor.parallel.parallel_runner": "held",
    "fleet.fleet_adapters": "digests",
}
"""Adapters that the operator has loaded, by name. All callers use the same adapters."""

OF_THE_PROGRAM = {
    "engine.core": "_NO_ERRORS",
    "fleet.models.policy": "_models",
    "server.models.engine": "_sizes",
    "fleet.models.turnstile.shared": "_lives",
    "engine.events": "subscribers _missed",
    "engine.kv_store.disk": "_locks",
    "engine.kv_store.files": "_followed _opened",
    "engine.mask_work": "_threads",
    "executor.drafters.medusa": "_batches",
    "executor.backends.native.native_kv": "states parts",
    "executor.backends.native.sampling_rows": "storing columns",
    "executor.backends.triton.step_shares": "_buffers",
    "executor.backends.triton.triton_runner": "_decodes _shared_decodes _bodies",
    "server.pages.live": "_made live_page",
    "server.pages.pages": "assemble _headers",
    "server.openai.protocol": "_field_names _type_info _whole_numbers _entry_type",
    "text.tokenizer.chat_template": "_environment _forms _tree _template",
    "text.tokenizer.late_messages": "_known",
    "text.tokenizer.template_forms": "_alone _content _developers",
    "text.tokenizer.tokenizer": "_bytes _texts _neighbour",
    "text.tool_calls.scan": "markers_of",
}
"""Things that follow from the program, its settings or the model's files: pages, types, forms of the chat template,
texts of token ids, marks of tool calls, shapes of kernels."""

DECISIONS = (KEYED, OWNED, OF_REQUESTS, OF_ADAPTERS, OF_THE_PROGRAM)


def _name(node: ast.AST) -> str:
    """Last part of a dotted name, also of one that is called or has parameters."""
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_empty_dict(value: ast.AST) -> bool:
    if isinstance(value, ast.Tuple):
        return any(map(_is_empty_dict, value.elts))
    if isinstance(value, (ast.List, ast.ListComp)):
        return any(_name(each) == "OrderedDict" for each in ast.walk(value) if isinstance(each, ast.Call))
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and _name(value) in _DICTS and (not value.args or _name(value) == "defaultdict")


def _names_in(target: ast.AST, at_top: bool) -> Iterator[str]:
    """Names of attributes, and at the top of a module of variables, that an assignment sets."""
    for each in ast.walk(target):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr
        elif isinstance(each, ast.Name) and at_top and each.id != "self":
            yield each.id


def caches_of(module: ast.Module) -> set[str]:
    """Names of the caches and growing mappings of a module: functions with a cache, and mappings that begin empty."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found |= {node.name for each in node.decorator_list if _name(each) in _DECORATORS}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_empty_dict(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name for target in targets for name in _names_in(target, node in module.body)}
    return found


def decided(module: str) -> set[str]:
    return {name for table in DECISIONS for name in table.get(module, "").split()}


NAMES = sorted(
    name.removeprefix("chairlift.")
    for name in modules()
    if name.removeprefix("chairlift.").partition(".")[0] in PACKAGES
)


def test_every_cache_has_a_decision_about_its_key() -> None:
    missing = {name: caches_of(tree(f"chairlift.{name}")) - decided(name) for name in NAMES}
    assert not {name: caches for name, caches in missing.items() if caches}, (
        "make the key with chairlift.base.cache_key and add it to KEYED, or say in another table why callers may"
        " share it"
    )


def test_no_decision_is_about_a_cache_that_is_gone() -> None:
    gone = {name: decided(name) - caches_of(tree(f"chairlift.{name}")) for table in DECISIONS for name in table}
    assert not {name: caches for name, caches in gone.items() if caches}


@pytest.mark.parametrize(
    "module",
    [
        *("engine.grammars", "text.grammar.checker", "core.kv_cache.prefix_cache", "models.vision.processor"),
        "base.prefix_keys",
        *("core.spec_decode.suffix", "fleet.routing", "server.http.auth"),
    ],
)
def test_keys_are_made_by_one_function(module: str) -> None:
    calls = {_name(node) for node in ast.walk(tree(f"chairlift.{module}")) if isinstance(node, ast.Call)}
    assert calls & {"cache_key", "key_material", "root_content"}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import functools\n@functools.lru_cache(maxsize=9)\ndef f(): pass", {"f"}),
        ("class A:\n    def __init__(self):\n        self._kept: OrderedDict[bytes, int] = OrderedDict()", {"_kept"}),
        ("class A:\n    def __init__(self):\n        self.a, self.b = {}, 1", {"a", "b"}),
        ("class A:\n    def __init__(self):\n        self.a = collections.defaultdict(list)", {"a"}),
        ("class A:\n    def __init__(self):\n        self.a = [OrderedDict() for _ in range(2)]", {"a"}),
        ("_made: dict[str, bytes] = {}", {"_made"}),
        ("def f():\n    own = {}", set()),
        ("class A:\n    def __init__(self, given):\n        self.a = dict(given)", set()),
    ],
)
def test_the_sweep_finds_caches(code: str, found: set[str]) -> None:
    assert caches_of(ast.parse(code)) == found
