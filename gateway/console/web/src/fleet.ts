// The fleet as the page knows it: follows GET /admin/events, and keeps an hour of figures.
import type { Changes, Overview, Slots } from "./types";

const SAMPLE_S = 5;
const HISTORY_S = 3600;
const AGAIN_MS = 2000;
/** Time that events may take at once: a large fleet's can come many together, and the page must not stand still. */
const AT_ONCE_MS = 8;

export interface Sample {
  at: number;
  busy: number;
  slots: number;
  waiting: number;
}

export interface FleetState {
  overview: Overview | null;
  /** Ids of the workers as they are listed: by model, then by id. */
  order: Set<string>;
  slots: Slots;
  earlier: Slots;
  slotsAt: number;
  earlierAt: number;
  isConnected: boolean;
  isPaused: boolean;
  history: Sample[];
}

type Listener = (state: FleetState) => void;

export class FleetFeed {
  state: FleetState = {
    overview: null,
    order: new Set(),
    slots: {},
    earlier: {},
    slotsAt: 0,
    earlierAt: 0,
    isConnected: false,
    isPaused: false,
    history: [],
  };
  private source: EventSource | null = null;
  private timer = 0;
  private listeners = new Set<Listener>();
  private models: string[] = [];
  private isTelling = false;
  private pending: (() => void)[] = [];
  private isWorking = false;

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    if (!this.source && !this.state.isPaused) this.open();
    return () => {
      this.listeners.delete(listener);
    };
  }

  /** Follow the slots of these models from now on. */
  watch(models: string[]): void {
    const wanted = [...models].sort().slice(0, 8);
    if (wanted.join() === this.models.join()) return;
    this.models = wanted;
    if (this.source) this.open();
  }

  pause(isPaused: boolean): void {
    this.state.isPaused = isPaused;
    if (isPaused) this.close();
    else this.open();
    this.tell();
  }

  close(): void {
    window.clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.pending = [];
    this.state.isConnected = false;
  }

  private open(): void {
    this.close();
    const query = this.models.length ? `?slots=${this.models.map(encodeURIComponent).join(",")}` : "";
    const source = (this.source = new EventSource(`/admin/events${query}`));
    source.addEventListener("overview", (event) =>
      this.soon(() => {
        const overview: Overview = JSON.parse(event.data);
        this.pending.unshift(() => this.take(overview)); // reading it takes long enough for one turn
      }),
    );
    source.addEventListener("changes", (event) => this.soon(() => this.apply(JSON.parse(event.data))));
    source.addEventListener("slots", (event) => this.soon(() => this.takeSlots(JSON.parse(event.data))));
    source.onopen = () => {
      this.state.isConnected = true;
      this.tell();
    };
    source.onerror = () => {
      this.close();
      this.tell();
      this.timer = window.setTimeout(() => this.open(), AGAIN_MS);
    };
  }

  /** Do this after what came before it, some at a time. */
  private soon(work: () => void): void {
    this.pending.push(work);
    if (this.isWorking) return;
    this.isWorking = true;
    const some = () => {
      const until = performance.now() + AT_ONCE_MS;
      while (this.pending.length && performance.now() < until) this.pending.shift()!();
      this.isWorking = this.pending.length > 0;
      if (this.isWorking) window.setTimeout(some);
    };
    window.setTimeout(some);
  }

  private take(overview: Overview): void {
    this.state.overview = overview;
    this.state.order = ordered(overview);
    this.state.isConnected = true;
    this.sample();
    this.tell();
  }

  private apply(changes: Changes): void {
    const before = this.state.overview;
    if (!before) return;
    this.state.overview = {
      ...before,
      at: changes.at,
      redis_up: changes.redis_up ?? before.redis_up,
      catalog_fault: changes.catalog_fault ?? before.catalog_fault,
      gateways: merged(before.gateways, changes.gateways),
      models: merged(before.models, changes.models),
      workers: merged(before.workers, changes.workers),
      machines: merged(before.machines, changes.machines),
    };
    const workers = changes.workers ?? {};
    if (Object.keys(workers).some((id) => workers[id] === null || !this.state.order.has(id))) {
      this.state.order = ordered(this.state.overview);
    }
    this.sample();
    this.tell();
  }

  private takeSlots(slots: Slots): void {
    this.state.earlier = this.state.slots;
    this.state.earlierAt = this.state.slotsAt;
    this.state.slots = { ...this.state.slots, ...slots };
    this.state.slotsAt = performance.now() / 1000;
    this.tell();
  }

  private sample(): void {
    const { overview, history } = this.state;
    const last = history.at(-1);
    if (!overview || (last && overview.at - last.at < SAMPLE_S)) return;
    const models = Object.values(overview.models);
    history.push({
      at: overview.at,
      busy: sum(models.map((model) => model.slots_busy)),
      slots: sum(models.map((model) => model.slots)),
      waiting: sum(models.map((model) => model.waiting ?? 0)),
    });
    while (history[0] && overview.at - history[0].at > HISTORY_S) history.shift();
  }

  /** Tell listeners once per frame at most: a large fleet's events come in bursts. */
  private tell(): void {
    if (this.isTelling) return;
    this.isTelling = true;
    requestAnimationFrame(() => {
      this.isTelling = false;
      this.state = { ...this.state };
      for (const listener of this.listeners) listener(this.state);
    });
  }
}

export function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/** Compare two names by their code units: for thousands of them, an order by language takes too long. */
export function compare(one: string, other: string): number {
  return one < other ? -1 : one > other ? 1 : 0;
}

function ordered(overview: Overview): Set<string> {
  const rows = Object.entries(overview.workers);
  rows.sort(([id, row], [other, next]) => compare(row.model, next.model) || compare(id, other));
  return new Set(rows.map(([id]) => id));
}

/** Change the rows by what is different, and return them: new ones are whole, of others there are only the fields that differ. */
function merged<T extends object>(before: Record<string, T>, changed: Record<string, Partial<T> | null> | undefined): Record<string, T> {
  if (!changed) return before;
  for (const [name, row] of Object.entries(changed)) {
    if (row === null) delete before[name];
    else before[name] = { ...before[name], ...row } as T;
  }
  return before;
}
