// The AI SDK's providers ask about an image. argv[2] is the server, argv[3] a base64 PNG. Prints provider -> texts of
// the whole and the streamed answer.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [, , server, image] = process.argv;
const settings = { baseURL: `${server}/v1`, apiKey: "sk-of-the-tests" };
const models = {
  chat: createOpenAI(settings).chat("tiny"),
  responses: createOpenAI(settings).responses("tiny"),
  messages: createAnthropic(settings)("tiny"),
  compatible: createOpenAICompatible({ name: "chairlift", ...settings })("tiny"),
};
const content = [
  { type: "text", text: "What is it?" },
  { type: "image", image, mediaType: "image/png" },
];
const seen = {};
for (const [name, model] of Object.entries(models)) {
  const ask = { model, messages: [{ role: "user", content }], maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
  const whole = await generateText(ask);
  seen[name] = [whole.text, await streamText(ask).text];
}
console.log(JSON.stringify(seen));
