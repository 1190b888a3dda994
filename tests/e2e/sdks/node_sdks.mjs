// The Node SDKs of OpenAI and Anthropic in a tool loop. argv[2] is the server. Prints one JSON object:
// API -> whole or streamed -> loop -> what the SDK gave to its caller.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const server = process.argv[2];
const openai = new OpenAI({ baseURL: `${server}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: server, apiKey: "unused", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "weather", description: "The weather at a place" };
const Place = z.object({ city: z.string(), degrees: z.number().int() });
const OBJECT = "Give me an object.";

function look({ city }) {
  if (city === "Nowhere") throw new Error("no such place");
  return `rain at ${city}`;
}

/** The result of the tool, or the error's text: OpenAI's SDK ends the loop where a tool throws. */
function result(given) {
  try {
    return look(given);
  } catch (error) {
    return error.message;
  }
}

const apis = {
  async chat(messages, stream) {
    if (messages.at(-1).content === OBJECT) {
      const ask = { model: "fake", messages, response_format: zodResponseFormat(Place, "place") };
      const reply = stream
        ? await openai.chat.completions.stream(ask).finalChatCompletion()
        : await openai.chat.completions.parse(ask);
      return { object: reply.choices[0].message.parsed };
    }
    const tool = { ...described, parameters, parse: JSON.parse, function: result };
    const runner = openai.chat.completions.runTools({ model: "fake", messages, tools: [{ type: "function", function: tool }], stream });
    const calls = [];
    runner.on("message", (message) => {
      if (message.role === "assistant") calls.push((message.tool_calls ?? []).map((call) => JSON.parse(call.function.arguments)));
    });
    const text = await runner.finalContent();
    return { text, calls, messages: runner.messages };
  },

  async responses(items, stream) {
    const create = async (ask) => {
      if (!stream) return "text" in ask ? openai.responses.parse(ask) : openai.responses.create(ask);
      return openai.responses.stream(ask).finalResponse();
    };
    if (items.at(-1).content === OBJECT) {
      const reply = await create({ model: "fake", input: items, text: { format: zodTextFormat(Place, "place") } });
      return { object: reply.output_parsed };
    }
    const input = [...items];
    const calls = [];
    const tools = [{ type: "function", strict: false, ...described, parameters }];
    for (;;) {
      const reply = await create({ model: "fake", input, tools });
      const asked = reply.output.filter((item) => item.type === "function_call");
      calls.push(asked.map((call) => JSON.parse(call.arguments)));
      input.push(...reply.output);
      if (!asked.length) return { text: reply.output_text, calls, messages: input };
      for (const { call_id, arguments: given } of asked) {
        const output = result(JSON.parse(given));
        input.push({ type: "function_call_output", call_id, output });
      }
    }
  },

  async messages(messages, stream) {
    const run = betaTool({ ...described, inputSchema: parameters, run: look });
    const settings = { model: "fake", max_tokens: 5000, messages };
    if (messages.at(-1).content === OBJECT) {
      const schema = { ...z.toJSONSchema(Place), additionalProperties: false };
      const ask = { ...settings, output_config: { format: { type: "json_schema", schema } } };
      const reply = stream ? await anthropic.messages.stream(ask).finalMessage() : await anthropic.messages.create(ask);
      return { object: JSON.parse(reply.content.at(-1).text) };
    }
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const runner = anthropic.beta.messages.toolRunner({ ...settings, tools: [run], thinking, stream });
    const calls = [];
    const seen = [...messages];
    let last;
    for await (const step of runner) {
      last = stream ? await step.finalMessage() : step;
      calls.push(last.content.filter((block) => block.type === "tool_use").map((block) => block.input));
    }
    const text = last.content.filter((block) => block.type === "text").map((block) => block.text).join("");
    return { text, calls, messages: [...runner.params.messages] };
  },
};

const seen = {};
for (const [name, ask] of Object.entries(apis)) {
  seen[name] = {};
  for (const stream of [false, true]) {
    const user = (content) => ({ role: "user", content });
    const loops = {
      one: await ask([user("What is it like in Ulm?")], stream),
      two: await ask([user("What is it like in Ulm and Bern?")], stream),
      chain: await ask([user("What is it like first in Ulm then in Bern?")], stream),
      error: await ask([user("What is it like in Nowhere?")], stream),
    };
    loops.again = await ask([...loops.chain.messages, user("And now?")], stream);
    loops.object = await ask([user(OBJECT)], stream);
    for (const each of Object.values(loops)) delete each.messages;
    seen[name][stream ? "streamed" : "whole"] = loops;
  }
}
console.log(JSON.stringify(seen));
