// A chat, a stream and an error with the openai package of npm; prints what came as JSON.
//
//   node openai_client.mjs BASE_URL MODEL

import { createRequire } from "node:module";
import process from "node:process";

const require = createRequire(`${process.cwd()}/`);
const { OpenAI } = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "I want to book a table for two in San Jose." }];
const body = { model, messages, temperature: 0, max_tokens: 24 };
const whole = await client.chat.completions.create(body);
const stream = await client.chat.completions.create({
  ...body,
  stream: true,
  stream_options: { include_usage: true },
});
let text = "";
let numPieces = 0;
let usage = null;
for await (const piece of stream) {
  text += piece.choices[0]?.delta.content ?? "";
  numPieces += 1;
  usage = piece.usage ?? usage;
}
let refusal = null;
try {
  await client.chat.completions.create({ ...body, model: "no-such-model" });
} catch (error) {
  refusal = { status: error.status, code: error.code, message: error.message };
}
console.log(
  JSON.stringify({
    chat: whole.choices[0].message.content,
    chat_tokens: whole.usage.completion_tokens,
    stream: text,
    stream_tokens: usage.completion_tokens,
    num_pieces: numPieces,
    error: refusal,
  }),
);
