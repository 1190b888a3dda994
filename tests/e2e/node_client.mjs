// The official Node client against the server at argv[2], with the key argv[3]. Prints one JSON object with what it saw.
import OpenAI from "openai";

const [, , baseURL, apiKey] = process.argv;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const settings = { model: "hashlm", messages, seed: 7, max_tokens: 24 };
const seen = {};

const chat = await client.chat.completions.create({ ...settings, n: 2, logprobs: true, top_logprobs: 1 });
seen.texts = chat.choices.map((choice) => choice.message.content);
seen.reasons = chat.choices.map((choice) => choice.finish_reason);
seen.logprobs = chat.choices.map((choice) => choice.logprobs.content.length);
seen.usage = chat.usage;

const stop = process.argv[4];
seen.stopped = (await client.chat.completions.create({ ...settings, stop: [stop] })).choices[0].message.content;

seen.streamed = "";
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...settings, ...options })) {
  seen.streamed += chunk.choices[0]?.delta?.content ?? "";
  seen.streamedUsage = chunk.usage;
}

seen.errors = [];
for (const wrong of [{ temperature: 1000 }, { model: "gpt-9" }, { max_tokens: 50000 }]) {
  try {
    await client.chat.completions.create({ ...settings, ...wrong });
  } catch (error) {
    seen.errors.push([error.constructor.name, error.status, error.code]);
  }
}
try {
  await new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 }).models.list();
} catch (error) {
  seen.errors.push([error.constructor.name, error.status, error.code]);
}

const long = await client.chat.completions.create({ ...settings, max_tokens: 3000, ignore_eos: true, stream: true });
let pieces = 0;
for await (const _ of long) {
  if (++pieces === 5) long.controller.abort();
}
seen.pieces = pieces;
console.log(JSON.stringify(seen));
