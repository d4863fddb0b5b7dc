// What LibreChat does for its users, by the package that its server asks models with.

import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { Providers, Run } from "@librechat/agents";
import { z } from "zod";
import { CHAT, KEY, RESULT, V1, WEATHER, WHO, run } from "./steps.mjs";

const weather = tool(() => RESULT, {
  name: "get_weather", description: "Current weather of a city", schema: z.object({ city: z.string() }),
});

async function asked(text, more = {}, tools = []) {
  const llmConfig = {
    provider: Providers.OPENAI, model: CHAT, apiKey: KEY, streaming: true, streamUsage: true, user: "anna",
    maxRetries: 0, configuration: { baseURL: V1 }, ...more,
  };
  const graphConfig = { type: "standard", instructions: "Be brief.", llmConfig, tools };
  const graph = await Run.create({ runId: "1", graphConfig, returnContent: true, customHandlers: {} });
  const config = { configurable: { thread_id: "1", user_id: "anna" }, runId: "1", streamMode: "values", version: "v2" };
  await graph.processStream({ messages: [new HumanMessage(text)] }, config);
  return graph;
}

await run({
  async chat() {
    await asked(WHO);
  },
  async settings() {
    await asked(WHO, { temperature: 0.5, topP: 0.9, frequencyPenalty: 0.1, presencePenalty: 0.1, maxTokens: 60 });
  },
  async thinking() {
    await asked(WHO, { reasoning_effort: "low", modelKwargs: { verbosity: "low" } });
  },
  async tools() {
    await asked(WEATHER, { temperature: 0 }, [weather]);
  },
  async responses() {
    await asked(WHO, { useResponsesApi: true, reasoning: { effort: "low", summary: "auto" } });
  },
  async title() {
    const graph = await asked(WHO);
    await graph.generateTitle({
      provider: Providers.OPENAI, inputText: WHO, contentParts: [{ type: "text", text: "I am Paddock." }],
      clientOptions: { model: CHAT, apiKey: KEY, configuration: { baseURL: V1 }, streaming: false },
    });
  },
});
