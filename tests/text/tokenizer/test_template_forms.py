"""Each template gets messages in the form it prints, and nothing of them vanishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

import chairlift
from chairlift.errors import RequestError, TemplateError
from chairlift.text.tokenizer import ChatTemplate
from chairlift.text.tokenizer.template_forms import TemplateForms, loops_over_content
from tests.text.tokenizer import tiny

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"

# As in Llama Guard's vision models, SmolVLM and Idefics: a string has no parts to loop over.
ONLY_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}<|end|>{% endfor %}" + END
)
# As in LLaVA-NeXT: the user's parts in a loop, and one part of everybody else.
ONE_PART = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% else %}{{ m['content'][0]['text'] }}{% endif %}<|end|>{% endfor %}" + END
)
# As in Qwen3.5, GLM and many others.
BOTH = (
    "{% macro words(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ words(m.content) }}<|end|>{% endfor %}" + END
)
# As in Gemma 3 and Devstral: of the system's parts only the first is printed.
FIRST_OF_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content if messages[0].content is string else "
    "messages[0].content[0].text }}{% set chat = messages[1:] %}{% else %}{% set chat = messages %}{% endif %}"
    "{% for m in chat %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|end|>{% endfor %}" + END
)
# As in Llama 3: a list is printed as Python prints it. As in Qwen 2.5: adding one to a text is an error.
PRINTS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + END
ADDS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}" + END
# As in Qwen3: what is no string counts as empty.
STRING_OR_NOTHING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is string else '' }}<|end|>{% endfor %}" + END
)
# As in GLM-4.6: a part of a tool's result is a result of its own, printed as Python prints it.
TOOL_RESULTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}"
    "{% for part in m.content %}<result>{{ part }}</result>{% endfor %}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}<|end|>{% endfor %}" + END
)
TEMPLATES = {
    "only parts": ONLY_PARTS,
    "one part": ONE_PART,
    "both": BOTH,
    "first of system": FIRST_OF_SYSTEM,
    "prints": PRINTS,
    "adds": ADDS,
    "string or nothing": STRING_OR_NOTHING,
    "tool results": TOOL_RESULTS,
}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def as_text(*texts: str) -> str:
    return "\n".join(texts)


def as_one_part(*texts: str) -> list[dict[str, str]]:
    return parts("\n".join(texts))


# What transformers must be given so that its text is ours, of a string and of two parts.
FORMS: dict[str, dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "only parts": dict.fromkeys(("system", "user", "assistant"), (parts, parts)),
    "one part": {"user": (parts, parts), "system": (parts, as_one_part), "assistant": (parts, as_one_part)},
    "both": dict.fromkeys(("system", "user", "assistant", "tool"), (as_text, parts)),
    "first of system": {"system": (as_text, as_text), "user": (as_text, parts), "assistant": (as_text, parts)},
    "prints": dict.fromkeys(("system", "user", "assistant", "tool"), (as_text, as_text)),
    "adds": dict.fromkeys(("system", "user", "assistant"), (as_text, as_text)),
    "string or nothing": dict.fromkeys(("system", "user", "assistant", "tool"), (as_text, as_text)),
    "tool results": {"user": (as_text, parts), "tool": (as_text, as_text)},
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' tokenizer, whose ``apply_chat_template`` is the truth."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.library("byte_level"), **NAMED)


def chat_with(role: str, content: Any, other: Callable[[str], Any]) -> list[dict[str, Any]]:
    message = {"role": role, "content": content}
    before = {"system": [], "user": []}.get(role, [{"role": "user", "content": other("Hi")}])
    after = [] if role == "user" else [{"role": "user", "content": other("Go on.")}]
    return [*before, message, *after]


@pytest.mark.parametrize(("name", "role"), [(name, role) for name, roles in FORMS.items() for role in roles])
def test_content_comes_in_the_form_that_the_template_prints(reference: Any, name: str, role: str) -> None:
    template = ChatTemplate(TEMPLATES[name], NAMED)
    user = FORMS[name]["user"][0]
    for texts, given, form in (
        (("One.",), "One.", FORMS[name][role][0]),
        (("One.",), parts("One."), parts if FORMS[name][role][1] is not as_text else None),
        (("One.", " Two."), parts("One.", " Two."), FORMS[name][role][1]),
    ):
        text = template.render(chat_with(role, given, str))
        assert all(each in text for each in texts) and "{" not in text
        if form is not None:
            expected = chat_with(role, form(*texts), user)
            assert text == reference.apply_chat_template(
                expected, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
            )


def test_a_part_keeps_what_else_it_has_but_nulls() -> None:
    """Parquet gives every part the fields of all kinds, and Qwen's templates ask whether a part has an image."""
    template = ChatTemplate(
        "{% for m in messages %}{% for part in m.content %}{% if 'image' in part or part.type == 'image' %}<image>"
        "{% else %}{{ part.text }}{% if part.cache_control %}({{ part.cache_control.type }}){% endif %}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    part = {"type": "text", "text": "Hi", "image": None, "cache_control": {"type": "ephemeral"}}
    assert template.render([{"role": "user", "content": [part]}]) == "Hi(ephemeral)"


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if loop.first %}{{ m.content }}{% endif %}"
    "{% elif m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([("user", "Hi"), ("tool", "4")], r"messages\[1\]\.role is 'tool', but .* prints nothing of such a message"),
        ([("user", "Hi"), ("pilot", "4")], r"messages\[1\]\.role must be one of system, .* got 'pilot'"),
    ],
)
def test_a_message_that_the_template_does_not_print_is_refused(messages: Any, complaint: str) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    with pytest.raises(RequestError, match=complaint):
        ChatTemplate(ALTERNATING).render(chat)
    assert ChatTemplate(ALTERNATING).render([{"role": "system", "content": "a"}, *chat[-1:]][:1]) == "a"


def test_a_template_that_prints_no_messages_at_all_gets_them_all_the_same() -> None:
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "tool", "user")]
    assert ChatTemplate("{{ messages | length }}").render(chat) == "5"


def test_a_role_that_the_template_names_is_known() -> None:
    named = "{% for m in messages %}{% if m.role == 'critic' %}C{% else %}O{% endif %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(named).render([{"role": "critic", "content": "x"}, {"role": "user", "content": "y"}]) == "CxOy"


def test_the_developer_is_the_system_where_the_template_does_not_know_it() -> None:
    chat = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(PRINTS).render(chat, False) == "<|system|>a<|end|><|user|>b<|end|>"
    knows = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(knows).render(chat) == "Dauserb"
    names = (
        "{% for m in messages %}{% if m.role == 'developer' %}{% elif m.role == 'system' %}S{{ m.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(names).render(chat) == "Sab"
    assert ChatTemplate(names).render([chat[1], chat[0]]) == "bSa"


@pytest.mark.parametrize("knows", ["user", "user or developer"])
def test_a_developer_is_refused_like_a_system_that_the_template_does_not_print(knows: str) -> None:
    chat = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% elif m.role == 'system' %}{% endif %}"
        + ("{% if m.role == 'developer' %}{% endif %}" if "developer" in knows else "")
        + "{% endfor %}"
    )
    for role in ("developer", "system"):
        with pytest.raises(RequestError, match=rf"messages\[0\]\.role is '{role}', but .* prints nothing of such"):
            template.render([{**chat[0], "role": role}, chat[1]])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_bundled_template_prints_instructions_before_the_question(role: str) -> None:
    settings = json.loads((Path(chairlift.__file__).parent / "assets" / "tokenizer_config.json").read_text())
    template = ChatTemplate(settings["chat_template"], {"bos_token": "<b>"})
    told, asked = {"role": role, "content": " Be brief. "}, {"role": "user", "content": "What is a batch?"}
    end = "<|end|><|assistant|>\n"
    assert template.render([told, asked]) == f"<b><|user|> be brief. what is a batch?{end}"
    assert template.render([told]) == f"<b><|user|> be brief.{end}"
    assert template.render([told, asked, {"role": "assistant", "content": "A."}, asked]) == template.render(
        [told, asked]
    )


def test_a_template_tries_the_developer_once() -> None:
    rendered: list[int] = []

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        rendered.append(len(messages))
        return "".join(m["content"] for m in messages if isinstance(m["content"], str) and m["role"] != "developer")

    forms = TemplateForms(jinja2.Environment().parse("{{ 'developer' }}"), render)
    chat = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert forms.fit(chat)[0] == {"role": "system", "content": "a"}
    before = len(rendered)
    assert forms.fit(chat)[0] == {"role": "system", "content": "a"}
    assert len(rendered) == before < 20


def test_instructions_that_are_printed_only_beside_a_question_are_refused_alone() -> None:
    """As in Mistral Nemo."""
    template = ChatTemplate(
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set chat = messages[1:] %}"
        "{% else %}{% set chat = messages %}{% endif %}{% for m in chat %}{{ system }}{{ m.content }}{% endfor %}"
    )
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}
    assert template.render([system, user]) == "ab"
    with pytest.raises(RequestError, match=r"messages\[0\]\.role is 'system', but .* prints nothing of such"):
        template.render([system])


# As in Qwen3.5: instructions come first, or not at all.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + END
)
# As in Mistral: after the optional instructions, the user and the assistant alternate. Calls and results do not count.
ONE_BY_ONE = (
    "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'system' and loop.first %}"
    "{% elif m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% elif m.role not in ('tool', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}" + END
)
SYSTEM, DEVELOPER, USER, SECOND_USER, ANSWER = (
    {"role": role, "content": text}
    for role, text in (("system", "s"), ("developer", "d"), ("user", "u"), ("user", "v"), ("assistant", "a"))
)
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "look", "arguments": {"k": 1}}}],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "r"}


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (STRICT, [USER, ANSWER, SYSTEM, SECOND_USER], "<|system|>s<|user|>u<|assistant|>a<|user|>v"),
        (STRICT, [SYSTEM, USER, ANSWER, DEVELOPER], "<|system|>s\n\nd<|user|>u<|assistant|>a"),
        (STRICT, [SYSTEM, DEVELOPER, USER, SYSTEM], "<|system|>s\n\nd\n\ns<|user|>u"),
        (STRICT, [USER, SECOND_USER], "<|user|>u<|user|>v"),
        (ONE_BY_ONE, [USER, SYSTEM, SECOND_USER], "<|system|>s<|user|>u\n\nv"),
        (ONE_BY_ONE, [USER, SECOND_USER, ANSWER, USER], "<|user|>u\n\nv<|assistant|>a<|user|>u"),
        (ONE_BY_ONE, [USER, CALLING, RESULT, USER], '<|user|>u<|assistant|>{"k": 1}<|tool|>r\n\nu'),
        (ONE_BY_ONE, [USER, CALLING, RESULT, SYSTEM], '<|system|>s<|user|>u<|assistant|>{"k": 1}<|tool|>r'),
        (ONE_BY_ONE, [USER, CALLING, SECOND_USER, RESULT], '<|user|>u<|assistant|>{"k": 1}<|tool|>r\n\nv'),
        (
            ONE_BY_ONE,
            [USER, CALLING, RESULT, SECOND_USER, RESULT],
            '<|user|>u<|assistant|>{"k": 1}<|tool|>r<|tool|>r\n\nv',
        ),
        (STRICT, [USER, CALLING, SECOND_USER, RESULT], "<|user|>u<|assistant|><|user|>v<|tool|>r"),
        (ALTERNATING, [USER, SYSTEM, SECOND_USER], "s<|user|>u<|user|>v"),
        (ALTERNATING, [SYSTEM, DEVELOPER, USER], "s\n\nd<|user|>u"),
        (PRINTS, [USER, SYSTEM, SECOND_USER], "<|user|>u<|system|>s<|user|>v"),
        (PRINTS, [SYSTEM, DEVELOPER, USER], "<|system|>s<|system|>d<|user|>u"),
    ],
)
def test_late_messages_are_moved_or_joined_where_the_template_refuses_them(
    template: str, chat: list[Any], expected: str
) -> None:
    assert ChatTemplate(template).render(chat, False).replace("<|end|>", "") == expected


def test_late_parts_are_joined_with_all_their_texts() -> None:
    parts = {"role": "system", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]}
    assert ChatTemplate(STRICT).render([SYSTEM, USER, parts], False) == "<|system|>s\np\nq<|end|><|user|>u<|end|>"


def test_a_late_instruction_that_the_template_leaves_out_moves_to_the_front() -> None:
    """As in gpt-oss, which prints nothing of an instruction after the first."""
    template = (
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    assert ChatTemplate(template).render([USER, ANSWER, SYSTEM], False) == "<|system|>s<|user|>u<|assistant|>a"


def test_a_template_without_instructions_refuses_late_ones_in_its_own_words() -> None:
    """As in Gemma 2."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="no system role"):
        ChatTemplate(template).render([USER, SYSTEM])


def test_an_error_names_the_place_that_a_late_message_had() -> None:
    broken = {**CALLING, "tool_calls": [{"function": {"name": "look", "arguments": "[1]"}}]}
    with pytest.raises(RequestError, match=r"^messages\[1\]\.tool_calls\[0\]"):
        ChatTemplate(STRICT).render([USER, broken, SYSTEM])


def test_the_places_of_instructions_are_tried_once() -> None:
    rendered: list[int] = []
    template = ChatTemplate(STRICT)
    chat = [USER, ANSWER, SYSTEM, SECOND_USER]
    template.render(chat)
    forms = template._forms
    render = forms._render
    forms._render = lambda *given: rendered.append(1) or render(*given)  # type: ignore[func-returns-value]
    forms.fit(chat)
    assert not rendered


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_each_of_its_names(reference: Any, key: str) -> None:
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", key: "Easy.", "content": "2"},
        {"role": "user", "content": "Sure?"},
    ]
    text = ChatTemplate(THINKS, NAMED).render(chat)
    assert text == reference.apply_chat_template(chat, chat_template=THINKS, tokenize=False)
    assert "<think>Easy.</think>(Easy.)2" in text


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["m.reasoning_content", "m.thinking", "m.reasoning", "m['reasoning']"])
def test_a_template_that_reads_one_name_of_reasoning_gets_each(key: str, read: str) -> None:
    """As Solar-Open, which reads ``reasoning`` only."""
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", key: "Easy.", "content": "2"}]
    template = "{% for m in messages %}{{ " + read + " or '' }}{{ m.content }}|{% endfor %}"
    assert ChatTemplate(template).render(chat) == "1 + 1?|Easy.2|"


def test_every_key_of_a_message_reaches_the_template(reference: Any) -> None:
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    chat = [
        {"role": "user", "content": "Hi", "name": "Ann", "mood": {"good": [1, 2.5, True, None, "é"]}, "none": None},
        {"role": "assistant", "content": "Hm", "reasoning_content": "?", "prefix": True, "empty": [], "tool_plan": ""},
        {"role": "tool", "content": "4", "tool_call_id": "call12345", "name": "look"},
    ]
    text = ChatTemplate(template, NAMED).render(chat)
    assert text == reference.apply_chat_template(chat, chat_template=template, tokenize=False)


CALLS = (
    "{%% for m in messages %%}<|{{ m.role }}|>{{ m.content }}{%% for call in m.tool_calls or [] %%}"
    "{%% set f = call.function or call %%}<call>{{ f.name }}%s</call>{%% endfor %%}{%% endfor %%}"
)
ARGUMENTS = {"city": "Ulm", "é": [1, None]}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{{ f.arguments | tojson }}", json.dumps(ARGUMENTS, ensure_ascii=False)),
        ("{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "city=Ulm;é=[1, None];"),
        ("{{ '' + f.arguments }}", json.dumps(ARGUMENTS, ensure_ascii=False)),  # as DeepSeek-V3's first template
        ("{{ f.arguments }}", json.dumps(ARGUMENTS, ensure_ascii=False)),
        (
            "{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
            json.dumps(ARGUMENTS, ensure_ascii=False),
        ),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_arguments_of_tool_calls_are_neither_quoted_twice_nor_printed_as_python(
    written: str, shown: str, flat: bool
) -> None:
    template = ChatTemplate(CALLS % written)
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)):
        function = {"name": "look", "arguments": arguments}
        call = function if flat else {"id": "call12345", "type": "function", "function": function}
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert template.render(chat).endswith(f"<call>look{shown}</call>")


@pytest.mark.parametrize(
    ("shows", "expected"),
    [("{{ m.content + '.' }}", "."), ("{{ m.content if m.content is defined else 'none' }}", "none")],
)
def test_a_message_of_tool_calls_only_needs_no_content(shows: str, expected: str) -> None:
    """OpenAI's clients send null with tool calls. transformers leaves null out, and some templates fail then."""
    template = "{% for m in messages %}<|{{ m.role }}|>" + shows + "{{ m.tool_calls | length }}{% endfor %}"
    call = {"function": {"name": "look", "arguments": "{}"}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(template).render(chat).endswith(f"<|assistant|>{expected}1")


@pytest.mark.parametrize("arguments", ["{", "3", "[]", [], 3, '"x"', '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_arguments_that_are_no_clear_object_are_refused(arguments: Any) -> None:
    call = {"function": {"name": "look", "arguments": arguments}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    where = r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be a JSON object"
    with pytest.raises(RequestError, match=where):
        ChatTemplate(CALLS % "{{ f.arguments | tojson }}").render(chat)


def test_a_template_that_fails_for_every_small_chat_is_judged_by_its_syntax_tree() -> None:
    needs = "{{ raise_exception('no topic') if not topic else '' }}"
    assert (
        ChatTemplate(needs + ONLY_PARTS).render([{"role": "user", "content": parts("a", "b")}], topic="x")
        == "<|user|>ab<|end|><|assistant|>"
    )
    chat = [{"role": "user", "content": parts("a", "b")}]
    assert ChatTemplate(needs + PRINTS).render(chat, topic="x") == "<|user|>a\nb<|end|><|assistant|>"
    with pytest.raises(TemplateError, match="no topic"):
        ChatTemplate(needs + PRINTS).render(chat)


def each(shown: str) -> str:
    return "{% for m in messages %}<|{{ m.role }}|>" + shown + "<|end|>{% endfor %}"


CONTINUED = {
    "as it is": each("{{ m.content }}"),
    "trimmed": each("{{ m.content | trim }}"),
    "thoughts cut off": each("{{ m.content.split('</think>')[-1] }}"),
    "parts": ONLY_PARTS,
    "both": BOTH,
    "in a summary, too": "{{ messages[-1].content }}\n" + each("{{ m.content }}"),
    "trimmed in a summary": "{{ messages[-1].content | trim }}\n" + each("{{ m.content }}"),
    "after its length": each("{{ m.content | length }}: {{ m.content }}"),
    "first": "{% for m in messages | reverse %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "not at all": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
    "lower": each("{{ m.content | lower }}"),
}
# Whether ours is transformers' text, both refuse, only we refuse, or transformers leaves its mark in the text.
OUTCOMES = dict.fromkeys(CONTINUED, "same") | {
    "thoughts cut off": "both refuse",
    "parts": "same, of parts",
    "in a summary, too": "no mark",
    "trimmed in a summary": "no mark",
    "after its length": "we refuse",
    "first": "we refuse",
    "not at all": "both refuse",
    "lower": "both refuse",
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("end", ["", " ", "\n\n"])
def test_a_final_message_is_continued_as_in_transformers_or_refused(reference: Any, name: str, end: str) -> None:
    template, words = CONTINUED[name], "<think>a</think>Well, I"
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": words + end}]
    given = [{**m, "content": parts(m["content"])} for m in chat] if OUTCOMES[name] == "same, of parts" else chat

    def ours() -> str:
        return ChatTemplate(template, NAMED).render(chat, continue_final_message=True)

    def theirs() -> str:
        text: str = reference.apply_chat_template(
            given, chat_template=template, continue_final_message=True, tokenize=False
        )
        return text

    trims_the_copy = name == "trimmed in a summary" and bool(end)  # the mark keeps what would have been trimmed there
    if "refuse" in OUTCOMES[name] or trims_the_copy:
        with pytest.raises(TemplateError, match=r"^continue_final_message is not possible: .*; leave it out$"):
            ours()
        if OUTCOMES[name] == "both refuse":
            with pytest.raises(ValueError, match="final message"):
                theirs()
    elif OUTCOMES[name] == "no mark":
        assert ours() == f"{words}{end}\n<|user|>Hi<|end|><|assistant|>{words}{end}"
        assert "TAG" in theirs()
    else:
        assert ours() == theirs()


def test_the_last_part_is_continued(reference: Any) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts("One.", " Two ")}]
    text = ChatTemplate(BOTH, NAMED).render(chat, continue_final_message=True)
    assert text == "<|user|>Hi<|end|><|assistant|>One. Two "
    assert text == reference.apply_chat_template(chat, chat_template=BOTH, continue_final_message=True, tokenize=False)
    assert ChatTemplate(ADDS).render(chat, continue_final_message=True).endswith("One.\n Two ")


@pytest.mark.parametrize("more", [{"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"reasoning": "x"}])
def test_a_final_message_with_calls_or_without_content_is_not_continued(more: dict[str, Any]) -> None:
    content = {} if "reasoning" in more else {"content": "Well"}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", **content, **more}]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    with pytest.raises((RequestError, TemplateError), match=r"^continue_final_message is not possible"):
        ChatTemplate(template).render(chat, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "loops"),
    [
        (ONLY_PARTS, True),
        (BOTH, True),
        (PRINTS, False),
        (ADDS, False),
        ("{% for m in messages %}{% set words = m.content %}{% for w in words | list %}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
            False,
        ),
    ],
)
def test_the_syntax_tree_tells_loops_over_content(source: str, loops: bool) -> None:
    assert loops_over_content(jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)) is loops


def test_a_role_is_tried_once() -> None:
    """Later chats cost one rendering."""
    rendered: list[int] = []

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        rendered.append(len(messages))
        return "".join(message["content"] for message in messages if isinstance(message["content"], str))

    forms = TemplateForms(jinja2.Environment().parse(PRINTS), render)
    chat = [{"role": "user", "content": parts("a", "b")}]
    for _ in range(3):
        assert forms.fit(chat) == [{"role": "user", "content": "a\nb"}]
        assert 1 < len(rendered) < 20
