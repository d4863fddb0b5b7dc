// What llama.cpp's web UI sends: the page itself, built from its sources, in a browser. As llama-server does, one
// address serves the page and takes what it asks.

import { createServer, request } from "node:http";
import { readFileSync } from "node:fs";
import { extname, join } from "node:path";
import { chromium } from "playwright-core";
import { KEY, URL_, WHO, run } from "./steps.mjs";

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".webmanifest": "application/json" };
const PAGE = join(process.env.PLACE, "dist");

function file(path) {
  try {
    return readFileSync(join(PAGE, path === "/" ? "index.html" : path));
  } catch {
    return null;
  }
}

const server = createServer((asked, answer) => {
  const path = new URL(asked.url, "http://page").pathname;
  const found = asked.method === "GET" ? file(path) : null;
  if (!found && path.startsWith("/favicon")) {
    answer.writeHead(204).end();
    return;
  }
  if (found) {
    const type = TYPES[path === "/" ? ".html" : extname(path)];
    answer.writeHead(200, type ? { "content-type": type } : {}).end(found);
    return;
  }
  const passed = request(new URL(asked.url, URL_), { method: asked.method, headers: asked.headers }, (told) => {
    answer.writeHead(told.statusCode, told.headers);
    told.pipe(answer);
  });
  passed.on("error", () => answer.destroy());
  asked.pipe(passed);
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const address = `http://127.0.0.1:${server.address().port}/`;

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] });

// A page of its own for each step, with the settings that its user has made.
async function opened(settings = {}) {
  const context = await browser.newContext({ serviceWorkers: "block", viewport: { width: 1280, height: 900 } });
  const kept = JSON.stringify({ apiKey: KEY, ...settings });
  await context.addInitScript((config) => localStorage.setItem("LlamaUi.config", config), kept);
  const page = await context.newPage();
  page.setDefaultTimeout(60000);
  await page.goto(address);
  return page;
}

async function say(page, text) {
  const box = page.locator("textarea").first();
  await box.waitFor();
  await box.fill(text);
  await Promise.all([answered(page), box.press("Enter")]);
}

// The whole answer has come.
async function answered(page) {
  const told = await page.waitForResponse((one) => one.url().endsWith("/chat/completions"));
  if (told.status() !== 200) throw new Error(`${told.status()} ${await told.text()}`);
  await told.finished();
}

const SAMPLING = {
  temperature: 0.8, dynatemp_range: 0, dynatemp_exponent: 1, top_k: 40, top_p: 0.95, min_p: 0.05, xtc_probability: 0,
  xtc_threshold: 0.1, typ_p: 1, max_tokens: 60, samplers: "top_k;typ_p;top_p;min_p;temperature", backend_sampling: false,
  repeat_last_n: 64, repeat_penalty: 1, presence_penalty: 0, frequency_penalty: 0, dry_multiplier: 0, dry_base: 1.75,
  dry_allowed_length: 2, dry_penalty_last_n: -1,
};

await run({
  async chat() {
    const page = await opened({ max_tokens: 60 });
    await say(page, WHO);
    await say(page, "And what can you do?");
    await page.context().close();
  },
  async settings() {
    const page = await opened({ ...SAMPLING, systemMessage: "Be brief.", customJson: '{"seed": 3}' });
    await say(page, WHO);
    await page.context().close();
  },
  async thoughts() {
    const page = await opened({ max_tokens: 60, disableReasoningParsing: true, excludeReasoningFromContext: true });
    await say(page, WHO);
    await page.context().close();
  },
  async prepared() {
    const page = await opened({ max_tokens: 60, preEncodeConversation: true });
    await say(page, WHO);
    await page.waitForTimeout(2000);
    await page.context().close();
  },
  async again() {
    const page = await opened({ max_tokens: 60, enableContinueGeneration: true });
    await say(page, WHO);
    const answer = page.getByLabel("Assistant message with actions").last();
    for (const name of ["Continue", "Regenerate"]) {
      await answer.hover();
      await Promise.all([answered(page), answer.getByRole("button", { name }).first().click()]);
    }
    await page.context().close();
  },
});
