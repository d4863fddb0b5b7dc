// What users of Continue do: ask its command, and have its tools called. Its editors' extensions ask for what is being
// typed and for vectors by the same package that the command asks by.

import { mkdirSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { constructLlmApi } from "@continuedev/openai-adapters";
import { command } from "./commands.mjs";
import { CHAT, EMBEDDER, KEY, V1, WHO, drain, run } from "./steps.mjs";

const config = join(homedir(), "config.yaml");
const cn = join(process.env.PLACE, "node_modules/.bin/cn");

function configured(more) {
  mkdirSync(homedir(), { recursive: true });
  const model = { name: CHAT, provider: "openai", model: CHAT, apiBase: V1, apiKey: KEY, roles: ["chat"], ...more };
  writeFileSync(config, JSON.stringify({ name: "Paddock", version: "0.0.1", schema: "v1", models: [model] }));
}

const env = { ...process.env, CONTINUE_TELEMETRY_ENABLED: "0" };

const api = constructLlmApi({ provider: "openai", apiKey: KEY, apiBase: `${V1}/` });
const { signal } = new AbortController();
const chat = { model: CHAT, messages: [{ role: "user", content: WHO }], max_tokens: 20 };

await run({
  async asked() {
    configured({});
    command("node", [cn, "--config", config, "-p", WHO], { env });
  },
  async readOnly() {
    configured({ defaultCompletionOptions: { temperature: 0.2, maxTokens: 60 } });
    command("node", [cn, "--config", config, "--readonly", "-p", "Which files are here?"], { env });
  },
  async streamed() {
    await drain(api.chatCompletionStream({ ...chat, stream: true }, signal));
  },
  async whole() {
    await api.chatCompletionNonStream({ ...chat, stream: false }, signal);
  },
  async typed() {
    const body = { model: CHAT, prompt: "def add(a, b):\n    return", max_tokens: 16, stop: ["\n\n"], stream: true };
    await drain(api.completionStream(body, signal));
  },
  async vectors() {
    await api.embed({ model: EMBEDDER, input: ["a boat", "a sheep"] });
  },
  async models() {
    await api.list();
  },
});
