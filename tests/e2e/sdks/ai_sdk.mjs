// The AI SDK in a tool loop, with each of its providers. argv[2] is the server. Prints one JSON object:
// provider -> loop -> what the SDK gave to its caller.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "unused" });
const compatible = { name: "chairlift", baseURL, includeUsage: true, supportsStructuredOutputs: true };
const models = {
  chat: openai.chat("fake"),
  responses: openai.responses("fake"),
  anthropic: createAnthropic({ baseURL, apiKey: "unused" })("fake"),
  compatible: createOpenAICompatible(compatible)("fake"),
};
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
const weather = tool({
  description: "The weather at a place",
  inputSchema: z.object({ city: z.string(), days: z.number().int().optional() }),
  execute: async ({ city }) => {
    if (city === "Nowhere") throw new Error("no such place");
    return `rain at ${city}`;
  },
});
const schema = z.object({ city: z.string(), degrees: z.number().int(), note: z.string().optional() });

async function loop(model, asked, stream) {
  const settings = { model, tools: { weather }, stopWhen: stepCountIs(5), maxRetries: 0, maxOutputTokens: 5000 };
  const messages = typeof asked === "string" ? [{ role: "user", content: asked }] : asked;
  const ask = { ...settings, providerOptions: thinking, system: "Be brief.", messages };
  const errors = [];
  const result = stream
    ? streamText({ ...ask, onError: ({ error }) => errors.push(String(error)) })
    : await generateText(ask);
  if (stream) for await (const part of result.fullStream) if (part.type === "error") errors.push(String(part.error));
  const steps = await result.steps;
  const response = await result.response;
  return {
    text: await result.text,
    calls: steps.map((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
    failed: steps.flatMap((step) => step.content.filter((part) => part.type === "tool-error").map((p) => String(p.error))),
    reasoning: steps.map((step) => step.reasoningText ?? null),
    reasons: steps.map((step) => step.finishReason),
    usage: steps.every((step) => step.usage.inputTokens > 0 && step.usage.outputTokens > 0),
    warnings: steps.flatMap((step) => step.warnings ?? []),
    errors,
    messages: [...messages, ...response.messages],
  };
}

const seen = {};
for (const [name, model] of Object.entries(models)) {
  seen[name] = {};
  for (const stream of [false, true]) {
    const loops = {};
    loops.one = await loop(model, "What is it like in Ulm?", stream);
    loops.two = await loop(model, "What is it like in Ulm and Bern?", stream);
    loops.chain = await loop(model, "What is it like first in Ulm then in Bern?", stream);
    loops.error = await loop(model, "What is it like in Nowhere?", stream);
    loops.again = await loop(model, [...loops.chain.messages, { role: "user", content: "And now?" }], stream);
    const ask = { model, schema, prompt: "Give me an object.", maxRetries: 0, maxOutputTokens: 5000 };
    if (stream) {
      const result = streamObject(ask);
      let last;
      for await (const part of result.partialObjectStream) last = part;
      loops.object = { streamed: last, object: await result.object };
    } else {
      loops.object = { object: (await generateObject(ask)).object };
    }
    for (const each of Object.values(loops)) delete each.messages;
    seen[name][stream ? "streamed" : "whole"] = loops;
  }
}
console.log(JSON.stringify(seen));
