"""A model that follows a script: it calls ``weather`` for each place in the question, then repeats the results.

The question is the last message of the user. What it contains decides the answer:

=========================  ======================================================================================
``in A and B``             one call of ``weather`` for each place, both in one answer
``first in A then in B``   a call for A, and after its result a call for B
``object``                 an object with a city and degrees: through a tool made for it, or else as JSON
any other text             the number of the user's messages and the texts of the model's earlier answers
=========================  ======================================================================================
"""

from __future__ import annotations

import json
import re
from typing import Any

from chairlift.base.sampling_params import SamplingParams
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import EOS, FakeEngine, FakeStream, byte_tokenizer

__all__ = ["THOUGHT", "TOOL", "ScriptedEngine", "script_of"]

TOOL = "weather"
THOUGHT = "Which places? é😀"
_TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>tools\n{{ t | tojson }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_PLACE = re.compile(r"\b(?:in|and) ([A-Z]\w+)")
_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_ANSWER = {"city": "Ulm", "degrees": 21}


class ScriptedEngine(FakeEngine):
    """A fake engine whose answers depend on the conversation, as :func:`script_of` says."""

    def __init__(self) -> None:
        super().__init__()
        own = byte_tokenizer()
        self.prompts.tokenizer = Tokenizer(own.backend, own.named_tokens, _TEMPLATE)
        self.prompts.follows_grammars = True
        self.says_whole_script = True
        self.conversations: list[str] = []
        """Text of each prompt, in order."""

    async def submit(self, prompt: list[int], params: SamplingParams, **how: Any) -> FakeStream:
        text = byte_tokenizer().decode(prompt, False)
        self.conversations.append(text)
        self.script = [*byte_tokenizer().encode(script_of(text), False), EOS]
        return await super().submit(prompt, params, **how)


def script_of(prompt: str) -> str:
    """The answer of the model to a prompt."""
    turns = _TURN.findall(prompt)
    last = max(at for at, (role, _) in enumerate(turns) if role == "user")
    question = turns[last][1]
    results = [text for role, text in turns[last:] if role == "tool"]
    thought = "" if prompt.endswith("</think>\n\n") else f"<think>\n{THOUGHT}\n</think>\n\n"
    places = _PLACE.findall(question)
    if "object" in question:
        tools = [json.loads(text)["function"]["name"] for role, text in turns if role == "tools"]
        made = [name for name in tools if name != TOOL]
        return thought + (_call(made[-1], _ANSWER) if made else json.dumps(_ANSWER))
    if "then" in question and len(results) < len(places):
        return f"{thought}I look.\n{_call(TOOL, {'city': places[len(results)]})}"
    if places and not results:
        return f"{thought}I look.\n" + "\n".join(_call(TOOL, {"city": place}) for place in places)
    if results:
        return f"{thought}I heard: {' | '.join(results)}"
    questions = sum(role == "user" for role, _ in turns)
    said = [_CALL.sub("", text).rpartition("</think>")[2].strip() for role, text in turns if role == "assistant"]
    return f"{thought}{questions} questions; I said: {' / '.join(said)}"


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
