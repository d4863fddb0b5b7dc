// What SillyTavern's server sends when its page asks: by chat and by llama.cpp's completions, with the page's own
// settings, as its first start has them.

import { spawn } from "node:child_process";
import { homedir } from "node:os";
import { join } from "node:path";
import { CHAT, EMBEDDER, KEY, PERSON, URL_, V1, WHO, run } from "./steps.mjs";

const PORT = 10000 + Math.floor(Math.random() * 20000);
const folder = join(process.env.PLACE, "node_modules/sillytavern");
const flags = [
  "server.js", "--port", PORT, "--dataRoot", join(homedir(), "data"), "--configPath", join(homedir(), "config.yaml"),
  "--disableCsrf", "--listen", "false", "--browserLaunchEnabled", "false",
];
const server = spawn("node", flags.map(String), { cwd: folder, stdio: ["ignore", "ignore", "inherit"] });

async function post(path, body) {
  const answer = await fetch(`http://127.0.0.1:${PORT}/api/${path}`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  const text = await answer.text();
  if (!answer.ok || text.includes('"error"')) throw new Error(`${answer.status} ${text}`);
  return text;
}

async function started() {
  for (let tries = 0; tries < 600; tries += 1) {
    try {
      return await fetch(`http://127.0.0.1:${PORT}/`);
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 500));
    }
  }
  throw new Error("it did not start");
}

const chat = {
  chat_completion_source: "custom", custom_url: V1, custom_include_body: "", custom_exclude_body: "",
  custom_include_headers: "", type: "normal", model: CHAT, temperature: 1, frequency_penalty: 0, presence_penalty: 0,
  top_p: 1, max_tokens: 300, logit_bias: {}, user_name: "Anna", char_name: "Paddock", group_names: [],
  include_reasoning: true, reasoning_effort: "auto", enable_web_search: false, request_images: false,
  custom_prompt_post_processing: "", verbosity: "auto",
};
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: WHO }];
const BREAKERS = ["\n", ":", '"', "*"];
const SAMPLERS = [
  "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p",
];
const stops = ["\nAnna:", "\nPaddock:", ...Array.from({ length: 18 }, (_, number) => `\nOther ${number}:`)];
const text = {
  api_type: "llamacpp", api_server: URL_, prompt: "Anna: Who are you?\nPaddock:", model: CHAT, max_new_tokens: 60,
  max_tokens: 60, temperature: 0.7, top_p: 0.5, typical_p: 1, typical: 1, min_p: 0, repetition_penalty: 1.2,
  frequency_penalty: 0, presence_penalty: 0, top_k: 40, skew: 0, min_tokens: 0, add_bos_token: true,
  smoothing_factor: 0, smoothing_curve: 1, dry_allowed_length: 2, dry_multiplier: 0, dry_base: 1.75,
  dry_sequence_breakers: BREAKERS, dry_penalty_last_n: 0, max_tokens_second: 0, samplers: SAMPLERS,
  stopping_strings: stops, stop: stops, truncation_length: 2048, ban_eos_token: false, skip_special_tokens: true,
  include_reasoning: true, top_a: 0, tfs: 1, mirostat_mode: 0, mirostat_tau: 5, mirostat_eta: 0.1,
  custom_token_bans: "", banned_strings: [], xtc_threshold: 0.1, xtc_probability: 0, nsigma: 0, top_n_sigma: 0,
  min_keep: 0, adaptive_target: -0.01, adaptive_decay: 0.9, n: 1, rep_pen: 1.2, rep_pen_range: 0,
  repetition_penalty_range: 0, guidance_scale: 1, negative_prompt: "", repeat_penalty: 1.2, repeat_last_n: 0,
  n_predict: 60, num_predict: 60, num_ctx: 2048, mirostat: 0, ignore_eos: false, rep_pen_slope: 1, logit_bias: [],
  grammar: "", cache_prompt: true,
};

await started();
await run({
  async keys() {
    await post("secrets/write", { key: "api_key_custom", value: KEY, label: "Paddock" });
    await post("secrets/write", { key: "api_key_llamacpp", value: KEY, label: "Paddock" });
  },
  async chat() {
    await post("backends/chat-completions/status", { chat_completion_source: "custom", custom_url: V1 });
    await post("backends/chat-completions/generate", { ...chat, messages, stream: false });
    await post("backends/chat-completions/generate", { ...chat, messages, stream: true, seed: 3, n: 2, logprobs: 5 });
  },
  async chatSettings() {
    const custom_include_body = "top_k: 40\nmin_p: 0.05\nrepetition_penalty: 1.1";
    await post("backends/chat-completions/generate", { ...chat, messages, stream: false, custom_include_body });
  },
  async text() {
    await post("backends/text-completions/status", { api_type: "llamacpp", api_server: URL_ });
    await post("backends/text-completions/props", { api_type: "llamacpp", api_server: URL_, model: CHAT });
    await post("backends/text-completions/generate", { ...text, stream: false });
    await post("backends/text-completions/generate", { ...text, stream: true, n_probs: 10, seed: 3, mirostat: 2 });
  },
  async dynamic() {
    const more = {
      dynamic_temperature: true, dynatemp_low: 0, dynatemp_high: 2, dynatemp_range: 1, dynatemp_exponent: 1,
      temperature: 1, stop: ["\n\n"],
    };
    await post("backends/text-completions/generate", { ...text, ...more, stream: false });
  },
  async form() {
    const json_schema = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
    const { grammar, ...rest } = text;
    const asked = { ...rest, prompt: PERSON, json_schema, stop: [], stopping_strings: [], stream: false };
    await post("backends/text-completions/generate", asked);
  },
  async tokens() {
    await post("tokenizers/remote/textgenerationwebui/encode", {
      text: WHO, url: URL_, legacy_api: false, api_type: "llamacpp", model: CHAT,
    });
  },
  async vectors() {
    await post("vector/query", {
      collectionId: "c", searchText: "a fox", topK: 3, threshold: 0.1, source: "llamacpp", apiUrl: URL_, model: EMBEDDER,
    });
  },
}, server);
