// What users of OpenAI's SDK do, in JavaScript.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CHAT, EMBEDDER, KEY, PERSON, RESULT, V1, WEATHER, WHO, drain, run } from "./steps.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const ask = client.chat.completions;
const messages = [{ role: "user", content: WHO }];
const weather = [{ role: "user", content: WEATHER }];
const Person = z.object({ name: z.string(), age: z.number() });
const tool = zodFunction({
  name: "get_weather",
  description: "Current weather of a city",
  parameters: z.object({ city: z.string() }),
  function: () => RESULT,
});

await run({
  async chat() {
    await ask.create({ model: CHAT, messages, temperature: 0.7, max_tokens: 60, user: "anna" });
  },
  async chatStreamed() {
    await drain(await ask.create({ model: CHAT, messages, stream: true, stream_options: { include_usage: true } }));
    await ask.stream({ model: CHAT, messages }).finalChatCompletion();
  },
  async settings() {
    await ask.create({
      model: CHAT, messages, store: true, metadata: { page: "1" }, service_tier: "auto", verbosity: "low",
      reasoning_effort: "low", max_completion_tokens: 40, seed: 3, n: 1, logprobs: true, top_logprobs: 1,
    });
  },
  async tools() {
    await ask.runTools({ model: CHAT, messages: weather, tools: [tool], temperature: 0 }).finalContent();
  },
  async toolsStreamed() {
    await ask.runTools({ model: CHAT, messages: weather, tools: [tool], temperature: 0, stream: true }).finalContent();
  },
  async oneTool() {
    await ask.create({ model: CHAT, messages: weather, tools: [tool], tool_choice: "required" });
  },
  async parsed() {
    const asked = [{ role: "user", content: PERSON }];
    await ask.parse({ model: CHAT, messages: asked, response_format: zodResponseFormat(Person, "person") });
  },
  async completions() {
    await client.completions.create({ model: CHAT, prompt: "In a small town", max_tokens: 16 });
  },
  async vectors() {
    await client.embeddings.create({ model: EMBEDDER, input: ["a fox", "a lamp"] });
  },
  async models() {
    await client.models.list();
  },
  async responses() {
    const first = await client.responses.create({ model: CHAT, input: WHO, instructions: "Be brief." });
    await client.responses.create({ model: CHAT, input: "What is 4 + 5?", previous_response_id: first.id });
    await client.responses.stream({ model: CHAT, input: WHO, reasoning: { effort: "low" } }).finalResponse();
  },
});
