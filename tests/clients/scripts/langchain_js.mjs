// What users of LangChain do, in JavaScript.

import { tool } from "@langchain/core/tools";
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { z } from "zod";
import { CHAT, EMBEDDER, KEY, PERSON, RESULT, V1, WEATHER, WHO, drain, run } from "./steps.mjs";

const own = { apiKey: KEY, configuration: { baseURL: V1 }, maxRetries: 0 };
const model = new ChatOpenAI({ model: CHAT, ...own });
const schema = z.object({ name: z.string(), age: z.number() });
const weather = tool(() => RESULT, {
  name: "get_weather", description: "Current weather of a city", schema: z.object({ city: z.string() }),
});

await run({
  async chat() {
    await model.invoke([["system", "Be brief."], ["human", WHO]]);
  },
  async chatStreamed() {
    await drain(await model.stream(WHO));
  },
  async settings() {
    const known = new ChatOpenAI({
      model: CHAT, temperature: 0.5, maxTokens: 40, topP: 0.9, frequencyPenalty: 0.1, presencePenalty: 0.1, n: 1,
      stop: ["\n\n"], user: "anna", streamUsage: true, ...own,
    });
    await known.invoke(WHO);
  },
  async tools() {
    await model.bindTools([weather]).invoke(WEATHER);
    await model.bindTools([weather], { tool_choice: "get_weather" }).invoke(WEATHER);
    await drain(await model.bindTools([weather]).stream(WEATHER));
  },
  async parsed() {
    for (const method of ["jsonSchema", "functionCalling", "jsonMode"]) {
      await model.withStructuredOutput(schema, { method, name: "person" }).invoke(PERSON);
    }
  },
  async responses() {
    await new ChatOpenAI({ model: CHAT, useResponsesApi: true, ...own }).invoke(WHO);
  },
  async completions() {
    await new OpenAI({ model: CHAT, maxTokens: 16, ...own }).invoke("In a small town");
  },
  async vectors() {
    await new OpenAIEmbeddings({ model: EMBEDDER, ...own }).embedDocuments(["a fox", "a lamp"]);
  },
});
