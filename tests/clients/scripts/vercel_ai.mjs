// What users of Vercel's AI SDK do, by each of its providers for servers of this kind.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CHAT, EMBEDDER, KEY, PERSON, RESULT, URL_, V1, WEATHER, WHO, drain, run } from "./steps.mjs";

const compatible = createOpenAICompatible({ name: "paddock", baseURL: V1, apiKey: KEY, includeUsage: true });
const strict = createOpenAICompatible({
  name: "paddock", baseURL: V1, apiKey: KEY, supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: V1, apiKey: KEY });
const anthropic = createAnthropic({ baseURL: V1, apiKey: KEY });
const schema = z.object({ name: z.string(), age: z.number() });
const tools = {
  get_weather: tool({
    description: "Current weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => RESULT,
  }),
};

function steps(name, model) {
  const own = { model, maxRetries: 0 };
  return {
    async [`${name} chat`]() {
      await generateText({ ...own, system: "Be brief.", prompt: WHO, temperature: 0.5, maxOutputTokens: 60 });
    },
    async [`${name} streamed`]() {
      await drain(streamText({ ...own, prompt: WHO, topP: 0.9, seed: 3, stopSequences: ["\n\n"] }).textStream);
    },
    async [`${name} tools`]() {
      await generateText({ ...own, prompt: WEATHER, tools, stopWhen: stepCountIs(3) });
      await drain(streamText({ ...own, prompt: WEATHER, tools, toolChoice: "required" }).fullStream);
    },
    async [`${name} parsed`]() {
      await generateObject({ ...own, prompt: PERSON, schema });
    },
    async [`${name} parsed beside tools`]() {
      await generateText({ ...own, prompt: PERSON, tools, experimental_output: Output.object({ schema }) });
    },
  };
}

await run({
  ...steps("compatible", compatible(CHAT)),
  ...steps("strict", strict(CHAT)),
  ...steps("openai chat", openai.chat(CHAT)),
  ...steps("openai responses", openai(CHAT)),
  ...steps("anthropic", anthropic(CHAT)),
  async completions() {
    await generateText({ model: compatible.completionModel(CHAT), prompt: "In a small town", maxOutputTokens: 16 });
  },
  async settings() {
    const paddock = { user: "anna", reasoningEffort: "low", textVerbosity: "low" };
    await generateText({ model: compatible(CHAT), prompt: WHO, providerOptions: { paddock } });
    const own = { store: true, metadata: { page: "1" }, serviceTier: "auto", reasoningEffort: "low", user: "anna" };
    await generateText({ model: openai.chat(CHAT), prompt: WHO, providerOptions: { openai: own } });
  },
  async vectors() {
    await embedMany({ model: compatible.textEmbeddingModel(EMBEDDER), values: ["a fox", "a lamp"] });
  },
});
