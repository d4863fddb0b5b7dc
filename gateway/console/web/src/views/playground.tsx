import { useEffect, useRef, useState } from "preact/hooks";
import { get, stream } from "../api";
import { languages, snippet, type Language } from "../snippets";
import { text } from "../strings";
import type { ModelCard } from "../types";
import { Dialog, Field, Problem, useLoaded } from "../ui";

type Part =
  | { type: "text"; text: string }
  | { type: "image_url"; image_url: { url: string } }
  | { type: "input_audio"; input_audio: { data: string; format: string } };
interface Turn {
  role: "user" | "assistant";
  content: string | Part[];
  thoughts?: string;
  calls?: string;
  told?: string;
  /** Number of attached files that the model did not get, as it takes none of their kind. */
  leftOut?: number;
}

interface Chunk {
  choices: {
    delta: {
      content?: string | null;
      reasoning_content?: string | null;
      tool_calls?: { index: number; function?: { name?: string; arguments?: string } }[];
    };
  }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } };
}

const SAMPLERS = [
  ["max_tokens", -1, 1000000],
  ["temperature", 0, 100],
  ["top_p", 0, 1],
  ["top_k", -1, 100000],
  ["min_p", 0, 1],
  ["repeat_penalty", 0.01, 10],
  ["presence_penalty", -2, 2],
  ["frequency_penalty", -2, 2],
  ["seed", -1, 4294967295],
] as const;
/** Those that few people turn. */
const MORE_SAMPLERS = [
  ["typical_p", 0, 1],
  ["top_n_sigma", -1, 100],
  ["dynatemp_range", 0, 100],
  ["dynatemp_exponent", 0, 10],
  ["xtc_probability", 0, 1],
  ["xtc_threshold", 0, 1],
  ["repeat_last_n", -1, 100000],
  ["dry_multiplier", 0, 100],
  ["dry_base", 0, 10],
  ["dry_allowed_length", 0, 100000],
  ["dry_penalty_last_n", -1, 100000],
  ["mirostat", 0, 2],
  ["mirostat_tau", 0, 100],
  ["mirostat_eta", 0, 1],
] as const;

interface Props {
  default_generation_settings?: { params?: Record<string, unknown> };
}

/** Return the model's own values of the samplers; none while no worker of it can be asked. */
async function defaultsOf(model: string): Promise<Record<string, unknown>> {
  try {
    return !model ? {} : (await get<Props>("/props", { model })).default_generation_settings?.params ?? {};
  } catch {
    return {};
  }
}

const KEPT = "paddock-playground";
const MOST_TURNS = 200;

interface Settings {
  model: string;
  other: string;
  system: string;
  tools: string;
  format: string;
  samplers: Record<string, string>;
}

interface Kept {
  settings: Settings;
  turns: Record<string, Turn[]>;
}

const EMPTY: Kept = {
  settings: { model: "", other: "", system: "", tools: "", format: "", samplers: {} },
  turns: { one: [], other: [] },
};

function kept(): Kept {
  try {
    return { ...EMPTY, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return EMPTY;
  }
}

function keep(value: Kept): void {
  try {
    localStorage.setItem(KEPT, JSON.stringify(value));
  } catch {
    // too large, or not allowed: it lasts until the page is closed
  }
}

export function Playground() {
  const cards = useLoaded(() => get<{ data: ModelCard[] }>("/v1/models"), []);
  const [state, setState] = useState<Kept>(kept);
  const [message, setMessage] = useState("");
  const [attached, setAttached] = useState<Part[]>([]);
  const [running, setRunning] = useState<AbortController | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isShowingCode, setShowingCode] = useState(false);
  useEffect(() => keep(state), [state]);
  const talking = (cards.value?.data ?? []).filter((card) => card.architecture.output_modalities.includes("text"));
  const settings = state.settings;
  const model = settings.model || talking.find((card) => card.status.value === "loaded")?.id || talking[0]?.id || "";
  const inputsOf = (name: string) => talking.find((card) => card.id === name)?.architecture.input_modalities ?? [];
  const accepted = Object.keys(KINDS).filter((kind) => [model, settings.other].some((name) => inputsOf(name).includes(kind)));
  const defaults = useLoaded(() => defaultsOf(model), [model]);
  const sampler = ([name, least, most]: readonly [string, number, number]) => (
    <Field key={name} label={name}>
      <input
        type="number"
        step="any"
        min={least}
        max={most}
        placeholder={shown(defaults.value?.[name])}
        value={settings.samplers[name] ?? ""}
        onInput={(event) => change({ samplers: { ...settings.samplers, [name]: event.currentTarget.value } })}
      />
    </Field>
  );
  const change = (part: Partial<Settings>) => setState((now) => ({ ...now, settings: { ...now.settings, ...part } }));

  const send = async (event: Event) => {
    event.preventDefault();
    if (!message.trim() || running) return;
    let extra: Record<string, unknown>;
    try {
      extra = parameters(settings);
    } catch (problem) {
      setError(problem);
      return;
    }
    const abort = new AbortController();
    setRunning(abort);
    setError(null);
    setMessage("");
    setAttached([]);
    const places = settings.other ? (["one", "other"] as const) : (["one"] as const);
    const names = { one: model, other: settings.other };
    const results = await Promise.allSettled(
      places.map((place) => {
        const asked = [...(state.turns[place] ?? []), turnOf(message, attached, inputsOf(names[place]))].slice(-MOST_TURNS);
        return answer(place, names[place], settings.system, extra, asked, abort, setState);
      }),
    );
    const failed = results.find((result) => result.status === "rejected");
    if (failed && !abort.signal.aborted) setError(failed.reason);
    setRunning(null);
  };

  const attach = (event: Event) => {
    const input = event.currentTarget as HTMLInputElement;
    for (const file of input.files ?? []) {
      const reader = new FileReader();
      reader.onload = () => setAttached((now) => [...now, partOf(String(reader.result))]);
      reader.readAsDataURL(file);
    }
    input.value = "";
  };

  return (
    <div class="playground">
      <aside class="card">
        <ModelChoice label={text.playground.model} cards={talking} value={model} choose={(name) => change({ model: name })} />
        <ModelChoice
          label={text.playground.compare}
          cards={talking}
          value={settings.other}
          choose={(name) => change({ other: name })}
          none={text.playground.nobody}
        />
        <Field label={text.playground.system}>
          <textarea rows={3} value={settings.system} onInput={(event) => change({ system: event.currentTarget.value })} />
        </Field>
        <details>
          <summary>{text.playground.parameters}</summary>
          {SAMPLERS.map(sampler)}
          <details>
            <summary>{text.playground.more}</summary>
            {MORE_SAMPLERS.map(sampler)}
          </details>
          <Field label={text.playground.tools}>
            <textarea rows={4} spellcheck={false} value={settings.tools} onInput={(event) => change({ tools: event.currentTarget.value })} />
          </Field>
          <Field label={text.playground.responseFormat}>
            <textarea rows={4} spellcheck={false} value={settings.format} onInput={(event) => change({ format: event.currentTarget.value })} />
          </Field>
        </details>
        <div class="row">
          <button type="button" onClick={() => setShowingCode(true)}>
            {text.playground.code}
          </button>
          <button type="button" onClick={() => setState((now) => ({ ...now, turns: EMPTY.turns }))}>
            {text.playground.clear}
          </button>
        </div>
        <p class="quiet">{text.playground.empty}</p>
      </aside>
      <section>
        <div class="talks">
          <Talk name={model} turns={state.turns.one ?? []} />
          {settings.other && <Talk name={settings.other} turns={state.turns.other ?? []} />}
        </div>
        <Problem error={error ?? cards.error} />
        <form class="say" onSubmit={send}>
          <Said content={attached} />
          <textarea
            aria-label={text.playground.message}
            placeholder={text.playground.message}
            rows={3}
            value={message}
            onInput={(event) => setMessage(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
            }}
          />
          <div class="row end">
            {accepted.length > 0 && (
              <label class="button">
                {text.playground.attach}
                <input
                  class="unseen"
                  type="file"
                  accept={accepted.map((kind) => `${kind}/*`).join(",")}
                  multiple
                  onChange={attach}
                />
              </label>
            )}
            {running ? (
              <button type="button" onClick={() => running.abort()}>
                {text.playground.stop}
              </button>
            ) : (
              <button type="submit" class="main">
                {text.playground.send}
              </button>
            )}
          </div>
        </form>
      </section>
      {isShowingCode && (
        <Code
          body={request(model, settings, state.turns.one ?? [], turnOf(message, attached, inputsOf(model)))}
          onClose={() => setShowingCode(false)}
        />
      )}
    </div>
  );
}

/** Return a sampler's value as the field shows it while nothing is typed. */
function shown(value: unknown): string {
  return typeof value === "number" ? String(Math.round(value * 1e6) / 1e6) : text.playground.default;
}

/** Kind of input, as models tell it -> the type of the parts of a message that are of this kind. */
const KINDS: Record<string, Part["type"]> = { image: "image_url", audio: "input_audio" };

/** Return what the user says to a model that takes these inputs, with those of the attached files that it takes. */
function turnOf(message: string, attached: Part[], inputs: string[]): Turn {
  const taken = attached.filter((part) => inputs.some((kind) => KINDS[kind] === part.type));
  const content: string | Part[] = taken.length ? [...taken, { type: "text", text: message }] : message;
  return { role: "user", content, leftOut: attached.length - taken.length };
}

/** Return the part of a message for an attached file, a data URL. */
function partOf(file: string): Part {
  const sound = /^data:audio\/([\w.+-]+)[^,]*,(.*)$/s.exec(file);
  if (!sound) return { type: "image_url", image_url: { url: file } };
  const format = { mpeg: "mp3", "x-wav": "wav", wave: "wav", "vnd.wave": "wav" }[sound[1]!] ?? sound[1]!;
  return { type: "input_audio", input_audio: { data: sound[2]!, format } };
}

function ModelChoice(props: { label: string; cards: ModelCard[]; value: string; choose: (name: string) => void; none?: string }) {
  return (
    <Field label={props.label}>
      <select value={props.value} onChange={(event) => props.choose(event.currentTarget.value)}>
        {props.none !== undefined && <option value="">{props.none}</option>}
        {props.cards.map((card) => (
          <option key={card.id} value={card.id}>
            {card.id}
          </option>
        ))}
      </select>
    </Field>
  );
}

/** Return the parameters of a call beside its messages. Throws an Error for fields that are no JSON. */
function parameters(settings: Settings): Record<string, unknown> {
  const found: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(settings.samplers)) if (value !== "") found[name] = Number(value);
  for (const [field, name] of [["tools", "tools"], ["format", "response_format"]] as const) {
    if (!settings[field].trim()) continue;
    try {
      found[name] = JSON.parse(settings[field]);
    } catch {
      throw new Error(text.playground.badJson(field === "tools" ? text.playground.tools : text.playground.responseFormat));
    }
  }
  return found;
}

function messages(system: string, turns: Turn[]) {
  const told = turns.map(({ role, content }) => ({ role, content }));
  return system.trim() ? [{ role: "system", content: system }, ...told] : told;
}

function request(model: string, settings: Settings, turns: Turn[], asked: Turn): Record<string, unknown> {
  const isEmpty = typeof asked.content === "string" && !asked.content.trim();
  const next: Turn[] = isEmpty ? turns : [...turns, asked];
  let extra: Record<string, unknown> = {};
  try {
    extra = parameters(settings);
  } catch {
    // the code is shown without them
  }
  return { model, messages: messages(settings.system, next), ...extra };
}

async function answer(
  place: "one" | "other",
  model: string,
  system: string,
  extra: Record<string, unknown>,
  asked: Turn[],
  abort: AbortController,
  setState: (change: (now: Kept) => Kept) => void,
): Promise<void> {
  const turn: Turn = { role: "assistant", content: "" };
  const show = () =>
    setState((now) => ({ ...now, turns: { ...now.turns, [place]: [...asked, { ...turn }] } }));
  const body = { model, messages: messages(system, asked), ...extra, stream: true, stream_options: { include_usage: true } };
  const began = performance.now();
  let firstAt = 0;
  let drawn = 0;
  const calls: { name: string; arguments: string }[] = [];
  show();
  try {
    for await (const chunk of stream<Chunk>("/v1/chat/completions", body, abort.signal)) {
      const delta = chunk.choices[0]?.delta;
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) firstAt ||= performance.now();
      if (delta?.content) turn.content += delta.content;
      if (delta?.reasoning_content) turn.thoughts = (turn.thoughts ?? "") + delta.reasoning_content;
      for (const call of delta?.tool_calls ?? []) {
        const known = (calls[call.index] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
        turn.calls = calls.map((one) => `${one.name}(${one.arguments})`).join("\n");
      }
      if (chunk.usage) {
        const { prompt_tokens, completion_tokens, prompt_tokens_details } = chunk.usage;
        const seconds = Math.max(0.001, (performance.now() - firstAt) / 1000);
        const cached = prompt_tokens_details?.cached_tokens ?? 0;
        turn.told = text.playground.timings(prompt_tokens, cached, completion_tokens, firstAt - began, completion_tokens / seconds);
      }
      if (performance.now() - drawn > 40) {
        drawn = performance.now();
        show();
      }
    }
  } finally {
    show();
  }
}

function Talk({ name, turns }: { name: string; turns: Turn[] }) {
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [turns]);
  return (
    <section class="talk" aria-label={name} aria-live="polite">
      <h2>{name}</h2>
      {turns.map((turn, place) => (
        <article key={place} class={turn.role}>
          <h3>{turn.role === "user" ? text.playground.you : name}</h3>
          {turn.thoughts && (
            <details>
              <summary>{text.playground.thoughts}</summary>
              <p class="said">{turn.thoughts}</p>
            </details>
          )}
          <Said content={turn.content} />
          {turn.calls && (
            <pre>
              {text.playground.toolCall}: {turn.calls}
            </pre>
          )}
          {turn.told && <small>{turn.told}</small>}
          {!!turn.leftOut && <small>{text.playground.leftOut(turn.leftOut)}</small>}
        </article>
      ))}
      <div ref={end} />
    </section>
  );
}

function Said({ content }: { content: string | Part[] }) {
  if (typeof content === "string") return <p class="said">{content}</p>;
  return (
    <>
      {content.map((part, place) =>
        part.type === "text" ? (
          <p class="said" key={place}>
            {part.text}
          </p>
        ) : part.type === "input_audio" ? (
          <p class="quiet" key={place}>
            {text.playground.sound}
          </p>
        ) : (
          <img key={place} src={part.image_url.url} alt={text.playground.image} />
        ),
      )}
    </>
  );
}

function Code({ body, onClose }: { body: Record<string, unknown>; onClose: () => void }) {
  const [language, setLanguage] = useState<Language>("curl");
  const [isCopied, setCopied] = useState(false);
  const code = snippet(language, location.origin, body);
  return (
    <Dialog heading={text.playground.code} onClose={onClose}>
      <div class="row">
        {languages.map((name) => (
          <button key={name} type="button" aria-pressed={name === language} onClick={() => setLanguage(name)}>
            {name}
          </button>
        ))}
      </div>
      <pre tabIndex={0}>{code}</pre>
      <div class="row end">
        <span role="status">{isCopied ? text.playground.copied : ""}</span>
        <button type="button" onClick={() => navigator.clipboard.writeText(code).then(() => setCopied(true))}>
          {text.playground.copy}
        </button>
        <button type="button" onClick={onClose}>
          {text.close}
        </button>
      </div>
    </Dialog>
  );
}
