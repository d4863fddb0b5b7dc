// What users of Continue's command do: ask, and have its tools called.

import { mkdirSync, writeFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { command } from "./commands.mjs";
import { CHAT, KEY, V1, WHO, run } from "./steps.mjs";

const config = join(homedir(), "config.yaml");
const cn = join(process.env.PLACE, "node_modules/.bin/cn");

function configured(more) {
  mkdirSync(homedir(), { recursive: true });
  const model = { name: CHAT, provider: "openai", model: CHAT, apiBase: V1, apiKey: KEY, roles: ["chat"], ...more };
  writeFileSync(config, JSON.stringify({ name: "Paddock", version: "0.0.1", schema: "v1", models: [model] }));
}

const env = { ...process.env, CONTINUE_TELEMETRY_ENABLED: "0" };

await run({
  async asked() {
    configured({});
    command("node", [cn, "--config", config, "-p", WHO], { env });
  },
  async readOnly() {
    configured({ defaultCompletionOptions: { temperature: 0.2, maxTokens: 60 } });
    command("node", [cn, "--config", config, "--readonly", "-p", "Which files are here?"], { env });
  },
});
