// What users of Cline's command do: ask, with and without thinking, by its provider for servers of this kind.

import { join } from "node:path";
import { command } from "./commands.mjs";
import { CHAT, KEY, V1, WHO, run } from "./steps.mjs";

const cline = join(process.env.PLACE, "node_modules/.bin/cline");

function asked(provider, base, ...more) {
  command(cline, ["auth", provider, "-k", KEY, "-m", CHAT, "-b", base]);
  command(cline, ["-P", provider, "-m", CHAT, "--retries", "1", "-t", "60", ...more, WHO]);
}

await run({
  async compatible() {
    asked("openai-compatible", V1);
  },
  async thinking() {
    asked("openai-compatible", V1, "--thinking", "low");
  },
  async planned() {
    asked("openai-compatible", V1, "--plan");
  },
  // It leaves a server of its own behind.
  async stopped() {
    command(cline, ["hub", "stop"]);
  },
});
