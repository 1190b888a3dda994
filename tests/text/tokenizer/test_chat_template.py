from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import RequestError, TemplateError, TemplateFailedError
from chairlift.text.tokenizer import ChatTemplate
from tests.text.tokenizer import tiny

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{%- if not (messages and messages[0].role == 'system') %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
ODDS_AND_ENDS = """  {% for m in messages %}
    {% if loop.index0 > 2 %}{% break %}{% endif %}
  {{ m | tojson }} {{ {"b": 1, "a": "<é>"} | tojson(indent=2, sort_keys=True) }}
    {% generation %}{{ m.content }}{% endgeneration %}
{% endfor %}
{{ unknown }}{{ dict(a=1, **{'b': 2}) }}{{ messages | map(attribute='role') | join(',') }}{{ '-' * 3 }}
{{ documents is none }}{{ enable_thinking is defined and enable_thinking }}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "odds and ends": ODDS_AND_ENDS}
CHAT = st.tuples(
    st.lists(st.just("system"), max_size=1),
    st.integers(2, 6),
    st.lists(st.text(max_size=12), min_size=6, max_size=6),
).map(
    lambda drawn: [
        {"role": role, "content": text}
        for role, text in zip((drawn[0] + ["user", "assistant"] * 3)[: drawn[1]], drawn[2], strict=False)
    ]
)


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' tokenizer, whose ``apply_chat_template`` is the truth."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.library("byte_level"), **NAMED)


@settings(max_examples=60, deadline=None)
@given(chat=CHAT, add=st.booleans(), name=st.sampled_from(sorted(TEMPLATES)))
def test_templates_render_as_in_transformers(reference: Any, chat: list[dict[str, str]], add: bool, name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], NAMED)
    expected = reference.apply_chat_template(
        chat, chat_template=TEMPLATES[name], add_generation_prompt=add, tokenize=False, enable_thinking=True
    )
    assert template.render(chat, add_generation_prompt=add, enable_thinking=True) == expected


@settings(max_examples=60, deadline=None)
@given(chat=CHAT, name=st.sampled_from(sorted(TEMPLATES)))
def test_final_messages_are_continued_as_in_transformers(reference: Any, chat: list[dict[str, str]], name: str) -> None:
    try:
        expected = reference.apply_chat_template(
            chat, chat_template=TEMPLATES[name], continue_final_message=True, tokenize=False
        )
    except ValueError:  # it is stricter: the message must also stand in the text word by word
        return
    if "CONTINUE_FINAL_MESSAGE_TAG" in expected:  # a template that shows it twice gets its mark into the text
        return
    assert ChatTemplate(TEMPLATES[name], NAMED).render(chat, continue_final_message=True) == expected


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="does not print the end of the final message"):
        ChatTemplate("{{ messages[0].role }}").render([{"role": "user", "content": "x"}], continue_final_message=True)


def test_a_text_may_be_as_long_as_it_may() -> None:
    template = ChatTemplate("{{ messages[0].content }}", max_chars=10)
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(TemplateError, match="more than 10 characters"):
        template.render([{"role": "user", "content": "x" * 11}])


def test_a_rendered_chat_encodes_as_in_transformers(reference: Any) -> None:
    chat = [{"role": "user", "content": "Grüß dich"}]
    expected = reference.apply_chat_template(chat, chat_template=CHATML, add_generation_prompt=True)["input_ids"]
    text = ChatTemplate(CHATML, NAMED).render(chat)
    assert tiny.make("byte_level").encode(text, add_special_tokens=False) == expected


def test_the_date_is_todays() -> None:
    pattern = "%Y-%m"
    before = datetime.datetime.now().strftime(pattern)
    text = ChatTemplate("{{ strftime_now('%Y-%m') }}").render([{"role": "user", "content": "x"}])
    assert text in (before, datetime.datetime.now().strftime(pattern))


def test_text_parts_are_joined_and_variables_reach_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}|{{ messages[0].name }}|{{ level }}|{{ bos_token }}", NAMED)
    chat = [{"role": "user", "content": parts, "name": "Ann"}]
    assert template.render(chat, level=3) == "one\ntwo|Ann|3|<s>"
    assert template.render(chat, level=None, bos_token="<b>") == "one\ntwo|Ann|None|<b>"


def test_null_fields_are_left_out_of_messages() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}{{ tools }}")
    nothing = {"name": None, "refusal": None, "tool_calls": [], "function_call": None, "audio": None}
    shown = template.render(
        [{"role": "user", "content": "", **nothing}], tools=None, documents=None, chat_template=None
    )
    assert shown == '{"role": "user", "content": ""}None'


class _Sneaky(str):
    secret = "unreachable"


@pytest.mark.parametrize("key", ["content", "name", "mood", "tags[0]", "nested.inner", "content[0].text"])
def test_only_plain_data_reaches_the_template(key: str) -> None:
    shown = "{% for part in messages[0].content %}{{ part.text.secret }}{% endfor %}"
    template = ChatTemplate("[" + (shown if "[0].text" in key else "{{ messages[0]." + key + ".secret }}") + "]")
    sneaky = {"name": _Sneaky("x"), "mood": _Sneaky("x"), "tags": [_Sneaky("x")], "nested": {"inner": _Sneaky("x")}}
    content = [{"type": "text", "text": _Sneaky("x")}] if key.startswith("content[") else _Sneaky("x")
    assert template.render([{"role": "user", "content": content, **sneaky}]) == "[]"


def test_a_message_may_be_as_deep_as_a_body() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    with pytest.raises(RequestError, match="at most 64 deep"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "Hi", "deep": deep}])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("Hi", "must be a list"),
        ({"role": "user", "content": "Hi"}, "must be a list"),
        (5, "must be a list"),
        ([], "empty"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\]\.role is missing; it is required"),
        ([{"role": "", "content": "Hi"}], "non-empty string"),
        ([{"role": 1, "content": "Hi"}], "non-empty string, got 1$"),
        ([{"role": "user", "content": []}], r"at least one .*, got an empty list$"),
        ([{"role": "user"}], r"messages\[0\]\.content must be"),
        ([{"role": "user", "content": None}], "content must be"),
        ([{"role": "user", "content": []}], "content must be"),
        ([{"role": "user", "content": b"Hi"}], "content must be"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "smolvlm on the native CPU kernels read images, as {'type'",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "got type 'input_audio'; no model reads audio here"),
        ([{"role": "user", "content": [{"type": "video_url"}]}], "no model reads video here: send frames as images"),
        ([{"role": "user", "content": [{"type": "file"}]}], "files are not read: send their text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\] must be .* got no text"),
        ([{"role": "user", "content": [{"type": "input_image", "text": "a cat"}]}], "got type 'input_image'"),
        ([{"role": "user", "content": ["Hi"]}], r"messages\[0\]\.content\[0\] must be a text part .* got 'Hi'"),
        (
            [{"role": "user", "content": "Hi", "tool_calls": [3]}],
            r"messages\[0\]\.tool_calls must be a list of objects",
        ),
        ([{"role": "assistant", "refusal": "No"}], r"messages\[0\]\.content must be .* it is missing"),
        ([{"role": "user", "content": None, "reasoning": "x"}], "only an assistant's message"),
        (
            [{"role": "user", "content": "Hi", "when": datetime.date(2024, 1, 1)}],
            r"messages\[0\]\.when must be .* got date",
        ),
        ([{"role": "user", "content": "Hi", "ids": [1, 2**64]}], r"messages\[0\]\.ids\[1\] must be"),
        ([{"role": "user", "content": "Hi", "map": {1: 2}}], r"messages\[0\]\.map must be"),
        ([{"role": "user", "content": "Hi", 3: 4}], r"messages\[0\] has a key that is no text"),
        ([{"role": "pilot", "content": "Hi"}], r"messages\[0\]\.role must be one of system, .* got 'pilot'"),
        ([{"role": "user", "content": "Hi", "name": ""}], r"messages\[0\]\.name"),
        ([{"role": "user", "content": "Hi"}, 3], r"messages\[1\]"),
    ],
)
def test_other_messages_are_refused(messages: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        ChatTemplate(CHATML).render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [{"messages": None}, {"tools": "x"}, {"chat_template": "{{ 1 }}"}, {"x": [1]}, {"x": _Sneaky("s")}, {"x": print}],
)
def test_other_variables_are_refused(variables: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="chat template variable"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}], **variables)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, r"no chat template.*generate"),
        ("{% for %}", "invalid at line 1"),
        ("\n\n{{ x", "invalid at line 3"),
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[0].content.x.y }}", "no attribute 'x'"),
        ("{{ unknown.x }}", "'unknown' is undefined"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "powers"),
        ("{{ range(1000000000) | list }}", "Range too big"),
        ("{{ 'x' * 1000000000 }}", "more than"),
        ("{{ 1000000000 * [1] }}", "more than"),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "more than"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{% include 'x' %}", "TypeError|loader|refused"),
    ],
)
def test_a_failing_template_says_so_in_one_line(template: str | None, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint) as caught:
        ChatTemplate(template).render([{"role": "user", "content": "Hi"}])
    assert "\n" not in str(caught.value)
    refuses = template is not None and "raise_exception" in template
    assert ("refused the messages" in str(caught.value)) is refuses
    if isinstance(caught.value, TemplateFailedError):
        assert "failed with" in str(caught.value) and "--chat-template" in str(caught.value)
    else:
        assert refuses or "more than" in complaint or "no chat template" in complaint or "invalid" in complaint


_ROOTS = ["''", "[]", "{}", "messages", "messages[0]", "range", "dict", "namespace()", "namespace", "cycler('a')"]
_ROOTS += ["raise_exception", "strftime_now", "joiner()", "self", "1", "(1,)", "loop", "caller"]
_CHAINS = (
    ".__class__",
    "['__class__']",
    "|attr('__class__')",
    "|attr('__' + 'class__')",
    ".__init__.__globals__",
    ".__call__.__self__",
    ".__globals__['__builtins__']",
    "|map(attribute='__class__')|list",
    ".__class__.__mro__[-1].__subclasses__()",
    ".gi_frame.f_globals",
    ".func_globals",
    "._TemplateReference__context",
    ".__reduce_ex__(2)",
)
PAYLOADS = [root + chain for root, chain in itertools.product(_ROOTS, _CHAINS)] + [
    "'{0.__class__}'.format(messages)",
    "'{0.__class__.__mro__}'.format(messages)",
    "'%s'|format(self)|string|attr('__class__')",
    "('{0.__' ~ 'class__}').format(1)",
    "'{x.__class__}'.format_map({'x': 1})",
    "messages.append(1)",
    "messages[0].update({'role': 'x'})",
    "messages[0].pop('role')",
    "messages.clear()",
    "messages.sort()",
    "lipsum.__globals__",
    "lipsum(n=10**9)",
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_templates_cannot_leave_the_sandbox(payload: str) -> None:
    """A payload fails or renders nothing that only Python's inside could have given it."""
    assert len(PAYLOADS) >= 200
    chat = [{"role": "user", "content": "Hi"}]
    try:
        text = ChatTemplate("{% for m in messages %}{{ " + payload + " }}{% endfor %}").render(chat)
    except TemplateError:
        text = ""
    assert not any(word in text for word in ("class", "object", "builtin", "function", "globals", "frame", "module"))
    assert chat == [{"role": "user", "content": "Hi"}]


def test_rendering_leaves_the_messages_alone() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    ChatTemplate(CHATML).render(chat)
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]


def test_json_in_a_template_escapes_half_of_a_surrogate_pair() -> None:
    chat = [{"role": "user", "content": "Hi", "more": {"a": "\ud83d é", "b\ude00": "😀"}}]
    text = ChatTemplate("{{ messages[0].more | tojson }}").render(chat)
    assert text == '{"a": "\\ud83d é", "b\\ude00": "😀"}'
