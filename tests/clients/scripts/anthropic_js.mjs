// What users of Anthropic's SDK do, in JavaScript.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { CHAT, KEY, PERSON, RESULT, URL_, WEATHER, WHO, drain, run } from "./steps.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: WHO }];
const weather = [{ role: "user", content: WEATHER }];
const tool = {
  name: "get_weather",
  description: "Current weather of a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

await run({
  async message() {
    await client.messages.create({ model: CHAT, max_tokens: 60, messages, system: "Be brief." });
  },
  async messageStreamed() {
    await client.messages.stream({ model: CHAT, max_tokens: 60, messages }).finalMessage();
    await drain(await client.messages.create({ model: CHAT, max_tokens: 60, messages, stream: true }));
  },
  async thinking() {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    await client.messages.create({ model: CHAT, max_tokens: 2048, messages, thinking });
    await client.messages.create({
      model: CHAT, max_tokens: 200, messages, thinking: { type: "adaptive" }, output_config: { effort: "low" },
    });
  },
  async tools() {
    const first = await client.messages.create({ model: CHAT, max_tokens: 80, messages: weather, tools: [tool] });
    const content = first.content
      .filter((block) => block.type === "tool_use")
      .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: RESULT }));
    const further = [...weather, { role: "assistant", content: first.content }, { role: "user", content }];
    if (content.length) await client.messages.create({ model: CHAT, max_tokens: 80, messages: further, tools: [tool] });
  },
  async oneTool() {
    const tool_choice = { type: "tool", name: "get_weather" };
    await client.messages.create({ model: CHAT, max_tokens: 80, messages: weather, tools: [tool], tool_choice });
  },
  async toolsThatAreRun() {
    const inputSchema = z.object({ city: z.string() });
    const own = betaZodTool({ name: "get_weather", description: "Weather", inputSchema, run: () => RESULT });
    await client.beta.messages.toolRunner({
      model: CHAT, max_tokens: 80, messages: weather, tools: [own], max_iterations: 3,
    });
  },
  async parsed() {
    const format = zodOutputFormat(z.object({ name: z.string(), age: z.number() }));
    const asked = [{ role: "user", content: PERSON }];
    await client.messages.parse({ model: CHAT, max_tokens: 80, messages: asked, output_config: { format } });
  },
  async counted() {
    await client.messages.countTokens({ model: CHAT, messages, tools: [tool] });
  },
  async models() {
    await client.models.list();
  },
});
