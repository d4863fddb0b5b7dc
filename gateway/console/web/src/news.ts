// What becomes of models while one looks: follows GET /models/sse, which tells admins of downloads, too.
import { useEffect, useState } from "preact/hooks";
import { follow } from "./api";
import { sum } from "./fleet";
import type { CardStatus } from "./types";

const AGAIN_MS = 2000;

export interface Download {
  state: "downloading" | "finished" | "failed";
  done: number;
  /** Bytes of all its files; 0: not known yet. */
  total: number;
  /** Bytes that were there, and the time in seconds, when the page heard of it first. */
  from: number;
  since: number;
  /** Why it failed. */
  reason: string;
}

export interface News {
  /** Reference of the hub -> its download. */
  downloads: Record<string, Download>;
  /** Model -> its status now. */
  statuses: Record<string, CardStatus>;
}

interface NewsEvent {
  model: string;
  event: string;
  data?: Record<string, unknown>;
}

/** Return what was told since the page was opened. */
export function useNews(): News {
  const [news, setNews] = useState<News>({ downloads: {}, statuses: {} });
  useEffect(() => {
    const abort = new AbortController();
    keepFollowing(abort.signal, (event) => setNews((now) => changed(now, event)));
    return () => abort.abort();
  }, []);
  return news;
}

/** Streams end with their gateway, and after an hour: follow the next one. */
async function keepFollowing(signal: AbortSignal, take: (event: NewsEvent) => void): Promise<void> {
  while (!signal.aborted) {
    try {
      for await (const event of follow<NewsEvent>("/models/sse", signal)) take(event);
    } catch {
      // the connection broke, or the gateway has no place for it now
    }
    await new Promise((resolve) => window.setTimeout(resolve, AGAIN_MS));
  }
}

function changed(now: News, { model, event, data = {} }: NewsEvent): News {
  const downloads = { ...now.downloads };
  const statuses = { ...now.statuses };
  const known = downloads[model] ?? progressed(undefined, []);
  if (event === "model_status") {
    statuses[model] = { ...(data as Omit<CardStatus, "value">), value: String(data.status) };
  } else if (event === "download_progress") {
    downloads[model] = progressed(downloads[model], Object.values(data as Record<string, { done: number; total: number }>));
  } else if (event === "download_finished") {
    downloads[model] = { ...known, state: "finished", done: known.total };
  } else if (event === "download_failed") {
    downloads[model] = { ...known, state: "failed", reason: String(data.reason ?? "") };
  } else if (event === "model_remove") {
    delete downloads[model];
    delete statuses[model];
  }
  return { downloads, statuses };
}

function progressed(before: Download | undefined, files: { done: number; total: number }[]): Download {
  const done = sum(files.map((file) => file.done));
  const total = sum(files.map((file) => file.total));
  const first = before?.state === "downloading" ? before : { from: done, since: performance.now() / 1000 };
  return { state: "downloading", done, total, from: first.from, since: first.since, reason: "" };
}
