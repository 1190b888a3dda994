"""Agent libraries for Python in a tool loop: ``python python_sdks.py LIBRARY URL``.

Prints one JSON object: API -> ``whole`` or ``streamed`` -> loop -> what the library gave to its caller. Each library is
imported only where it is used, because each comes from a folder of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

QUESTIONS = {
    "one": "What is it like in Ulm?",
    "two": "What is it like in Ulm and Bern?",
    "chain": "What is it like first in Ulm then in Bern?",
    "error": "What is it like in Nowhere?",
}
AGAIN = "And now?"
OBJECT = "Give me an object."
KEY = "unused"


class Place(BaseModel):
    """A place and its temperature."""

    city: str
    degrees: int


def look(city: str) -> str:
    """The weather at a place."""
    if city == "Nowhere":
        raise ValueError("no such place")
    return f"rain at {city}"


# --- openai-agents ----------------------------------------------------------------------------------------------------


async def openai_agents(url: str) -> dict[str, Any]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    weather = function_tool(look, name_override="weather")
    settings = ModelSettings(include_usage=True)

    async def ask(model: Any, asked: Any, stream: bool, output: Any = None) -> Any:
        agent = Agent("a", instructions="Be brief.", model=model, model_settings=settings, tools=[weather])
        agent.output_type = output
        if not stream:
            return await Runner.run(agent, asked)
        running = Runner.run_streamed(agent, asked)
        async for _ in running.stream_events():
            pass
        return running

    async def loops(model: Any, stream: bool) -> dict[str, Any]:
        found = {name: await ask(model, question, stream) for name, question in QUESTIONS.items()}
        history = [*found["chain"].to_input_list(), {"role": "user", "content": AGAIN}]
        found["again"] = await ask(model, history, stream)
        seen = {name: {"text": run.final_output, "calls": agent_calls(run)} for name, run in found.items()}
        made = await ask(model, OBJECT, stream, Place)
        return {**seen, "object": {"object": made.final_output.model_dump()}}

    models = {"chat": OpenAIChatCompletionsModel("fake", client), "responses": OpenAIResponsesModel("fake", client)}
    return {
        name: {"whole": await loops(model, False), "streamed": await loops(model, True)}
        for name, model in models.items()
    }


def agent_calls(run: Any) -> list[Any]:
    return [
        [json.loads(item.arguments) for item in reply.output if item.type == "function_call"]
        for reply in run.raw_responses
    ]


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


async def pydantic_ai(url: str) -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
    from pydantic_ai.messages import ModelResponse, ToolCallPart
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    anthropic = AnthropicProvider(base_url=url, api_key=KEY)
    tools = [Tool(safely(look), name="weather", description="The weather at a place")]

    async def ask(model: Any, asked: str, stream: bool, output: Any = str, history: Any = None) -> Any:
        agent = Agent(model, instructions="Be brief.", tools=tools, output_type=output)
        handler = drain if stream else None
        return await agent.run(asked, message_history=history, event_stream_handler=handler)

    async def drain(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    def calls_of(run: Any) -> list[Any]:
        replies = [message for message in run.new_messages() if isinstance(message, ModelResponse)]
        return [[part.args_as_dict() for part in reply.parts if isinstance(part, ToolCallPart)] for reply in replies]

    async def loops(model: Any, stream: bool) -> dict[str, Any]:
        found = {name: await ask(model, question, stream) for name, question in QUESTIONS.items()}
        found["again"] = await ask(model, AGAIN, stream, history=found["chain"].all_messages())
        seen = {name: {"text": run.output, "calls": calls_of(run)} for name, run in found.items()}
        for name, output in {"object": ToolOutput(Place), "native": NativeOutput(Place)}.items():
            if name == "object" or not isinstance(model, AnthropicModel):
                made = await ask(model, OBJECT, stream, output)
                seen[name] = {"object": made.output.model_dump()}
        return seen

    models = {
        "chat": OpenAIChatModel("fake", provider=openai),
        "responses": OpenAIResponsesModel("fake", provider=openai),
        "messages": AnthropicModel("fake", provider=anthropic),
    }
    return {
        name: {"whole": await loops(model, False), "streamed": await loops(model, True)}
        for name, model in models.items()
    }


def safely(tool: Callable[[str], str]) -> Callable[[str], str]:
    """The tool, with an error's text as its result."""

    def result(city: str) -> str:
        try:
            return tool(city)
        except ValueError as error:
            return str(error)

    return result


# --- langchain --------------------------------------------------------------------------------------------------------


async def langchain(url: str) -> dict[str, Any]:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import AIMessage
    from langchain_openai import ChatOpenAI

    weather = tool("weather", description="The weather at a place")(safely(look))

    async def ask(model: Any, messages: list[Any], stream: bool) -> list[Any]:
        agent = create_agent(model, [weather], system_prompt="Be brief.")
        if not stream:
            return list((await agent.ainvoke({"messages": messages}))["messages"])
        state: Any = None
        async for kind, part in agent.astream({"messages": messages}, stream_mode=["messages", "values"]):
            state = part if kind == "values" else state
        return list(state["messages"])

    def shown(messages: list[Any], start: int) -> dict[str, Any]:
        calls = [[call["args"] for call in each.tool_calls] for each in messages[start:] if isinstance(each, AIMessage)]
        return {"text": str(messages[-1].text), "calls": calls}

    async def loops(model: Any, stream: bool) -> dict[str, Any]:
        found = {name: await ask(model, [("user", text)], stream) for name, text in QUESTIONS.items()}
        seen = {name: shown(messages, 0) for name, messages in found.items()}
        history = [*found["chain"], ("user", AGAIN)]
        seen["again"] = shown(await ask(model, history, stream), len(history))
        for method in ("json_schema", "function_calling"):
            typed = model.with_structured_output(Place, method=method)
            made = [part async for part in typed.astream(OBJECT)][-1] if stream else await typed.ainvoke(OBJECT)
            seen[method] = {"object": made.model_dump()}
        return seen

    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY, "max_retries": 0, "model": "fake"}
    claude: dict[str, Any] = {**where, "base_url": url, "max_tokens": 5000}
    models = {
        "chat": ChatOpenAI(**where),
        "responses": ChatOpenAI(**where, use_responses_api=True),
        "messages": ChatAnthropic(**claude),
    }
    return {
        name: {"whole": await loops(model, False), "streamed": await loops(model, True)}
        for name, model in models.items()
    }


# --- instructor -------------------------------------------------------------------------------------------------------


async def instructor(url: str) -> dict[str, Any]:
    import instructor
    from anthropic import Anthropic
    from openai import OpenAI

    openai = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    anthropic = Anthropic(base_url=url, api_key=KEY, max_retries=0)
    modes = instructor.Mode
    clients: dict[str, Any] = {
        mode.name: instructor.from_openai(openai, mode=mode)
        for mode in (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS)
    }
    clients |= {
        mode.name: instructor.from_anthropic(anthropic, mode=mode)
        for mode in (modes.ANTHROPIC_TOOLS, modes.ANTHROPIC_JSON)
    }
    seen: dict[str, Any] = {}
    ask: Any = {"model": "fake", "messages": [{"role": "user", "content": OBJECT}], "max_retries": 0}
    for name, client in clients.items():
        most = {"max_tokens": 5000} if name.startswith("ANTHROPIC") else {}
        made = client.chat.completions.create(response_model=Place, **ask, **most)
        seen[name] = {"whole": {"object": {"object": made.model_dump()}}}
        if name != "RESPONSES_TOOLS":
            parts = list(client.chat.completions.create_partial(response_model=Place, **ask, **most))
            seen[name]["streamed"] = {"object": {"object": parts[-1].model_dump()}}
    return seen


if __name__ == "__main__":
    libraries = {each.__name__: each for each in (openai_agents, pydantic_ai, langchain, instructor)}
    print(json.dumps(asyncio.run(libraries[sys.argv[1]](sys.argv[2]))))
