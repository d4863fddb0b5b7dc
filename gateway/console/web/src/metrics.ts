// Reads Prometheus' text format, as far as the page needs it: sums of series by name.
import { getText } from "./api";

const EVERY_MS = 10_000;
const MOST = 360;

export type Figures = Map<string, Map<string, number>>;

export function read(page: string): Figures {
  const figures: Figures = new Map();
  for (const line of page.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const found = /^([a-zA-Z_:][\w:]*)(\{.*\})? ([^ ]+)/.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    let series = figures.get(name!);
    if (!series) figures.set(name!, (series = new Map()));
    series.set(labels ?? "", Number(value));
  }
  return figures;
}

export function total(figures: Figures, name: string, where: (labels: string) => boolean = () => true): number {
  let found = 0;
  for (const [labels, value] of figures.get(name) ?? []) if (where(labels)) found += value;
  return found;
}

/** Return by how much a counter has grown; one that began anew counts from 0. */
export function difference(now: Figures, before: Figures, name: string, where?: (labels: string) => boolean): number {
  const grown = total(now, name, where) - total(before, name, where);
  return grown < 0 ? total(now, name, where) : grown;
}

/** Return the average of what a histogram has observed in between; null: nothing. */
export function ratio(now: Figures, before: Figures, name: string): number | null {
  const count = difference(now, before, `${name}_count`);
  return count ? difference(now, before, `${name}_sum`) / count : null;
}

export interface Sample {
  at: number;
  figures: Figures;
}

/** Samples this gateway's metrics for as long as the page is open, an hour of them at most. */
export class Sampler {
  samples: Sample[] = [];
  isOff = false;
  private timer = 0;
  private listeners = new Set<() => void>();

  start(): () => void {
    const look = () =>
      getText("/metrics")
        .then(
          (page) => {
            this.samples.push({ at: Date.now() / 1000, figures: read(page) });
            if (this.samples.length > MOST) this.samples.shift();
            this.isOff = false;
          },
          () => {
            this.isOff = true;
          },
        )
        .then(() => this.listeners.forEach((listener) => listener()));
    look();
    this.timer = window.setInterval(look, EVERY_MS);
    return () => window.clearInterval(this.timer);
  }

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => {
      this.listeners.delete(listener);
    };
  }
}
