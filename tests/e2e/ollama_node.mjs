// The ollama package for Node against the server at argv[2]. Prints one JSON object with what it saw.
// argv[3] is what the server has: a model of texts, a model that reads images, or one of embeddings.
import { Ollama } from "ollama";

const [, , host, kind, image] = process.argv;
const client = new Ollama({ host });
const model = (await client.list()).models[0].name;
const options = { num_predict: 12, temperature: 0 };
const messages = [{ role: "user", content: "What is a KV cache?" }];
const seen = { model };

if (kind === "embed") {
  const whole = await client.embed({ model, input: ["A chair", "lift"] });
  seen.lengths = whole.embeddings.map((vector) => vector.length);
  seen.norms = whole.embeddings.map((vector) => Math.hypot(...vector));
  seen.older = (await client.embeddings({ model, prompt: "A chair" })).embedding.length;
  seen.count = whole.prompt_eval_count;
} else if (kind === "images") {
  const asked = [{ role: "user", content: "What is it?", images: [image] }];
  const with_image = await client.chat({ model, messages: asked, options });
  const without = await client.chat({ model, messages: [{ role: "user", content: "What is it?" }], options });
  seen.counts = [with_image.prompt_eval_count, without.prompt_eval_count];
  seen.capabilities = (await client.show({ model })).capabilities;
} else {
  seen.whole = (await client.chat({ model, messages, options })).message.content;
  seen.streamed = "";
  for await (const part of await client.chat({ model, messages, options, stream: true })) {
    seen.streamed += part.message.content;
    seen.last = part.done_reason;
  }
  seen.generated = "";
  for await (const part of await client.generate({ model, prompt: messages[0].content, options, stream: true })) {
    seen.generated += part.response;
  }
  const format = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
  seen.formed = JSON.parse((await client.chat({ model, messages, format, options: { num_predict: 64 } })).message.content);
  seen.shown = (await client.show({ model })).details.family;
  seen.running = (await client.ps()).models.map((each) => each.name);
  seen.version = (await client.version()).version;
  seen.pulled = (await client.pull({ model })).status;
  try {
    await client.chat({ model: "nothing", messages });
  } catch (error) {
    seen.error = [error.status_code, error.message];
  }
}
console.log(JSON.stringify(seen));
