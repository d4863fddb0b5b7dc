import { get } from "../api";
import { bytes, number, span } from "../format";
import { useNews, type Download } from "../news";
import { text } from "../strings";
import type { CardStatus, MemoryRow, ModelCard, ModelRow, Overview, Session } from "../types";
import { Badge, Problem, Progress, Table, useLoaded, type Column } from "../ui";
import { Catalog } from "./catalog";
import { entries } from "./fleet";

const COLUMNS: Column<ModelCard>[] = [
  {
    title: text.fleet.model,
    cell: (card) => (
      <>
        {card.id} {card.parent && <small>{text.models.adapter(card.parent)}</small>}
      </>
    ),
  },
  {
    title: text.fleet.state,
    cell: (card) => (
      <Badge kind={card.status.failed ? "bad" : card.status.value === "loaded" ? "good" : "quiet"}>
        {stateOf(card.status)}
      </Badge>
    ),
  },
  { title: text.models.context, cell: (card) => (card.meta ? number(card.meta.n_ctx) : ""), isNumber: true },
  { title: text.models.parameters, cell: (card) => (card.meta ? number(card.meta.n_params) : ""), isNumber: true },
  { title: text.models.size, cell: (card) => (card.meta ? bytes(card.meta.size) : ""), isNumber: true },
  { title: text.models.takes, cell: (card) => card.architecture.input_modalities.join(", ") },
  { title: text.models.gives, cell: (card) => card.architecture.output_modalities.join(", ") },
  { title: text.fleet.also, cell: (card) => (card.aliases ?? []).filter((name) => name !== card.id).join(", ") },
  { title: text.models.workers, cell: (card) => card.workers ?? "", isNumber: true },
];

function stateOf({ value, failed, progress }: CardStatus): string {
  if (failed) return "failed";
  return value === "loading" && progress ? `loading ${Math.round(100 * progress.value)} %` : value;
}

type NamedDownload = Download & { model: string };

const DOWNLOADS: Column<NamedDownload>[] = [
  { title: text.fleet.model, cell: (each) => each.model },
  {
    title: text.fleet.state,
    cell: ({ state }) => (
      <Badge kind={state === "failed" ? "bad" : state === "finished" ? "good" : "busy"}>{state}</Badge>
    ),
  },
  {
    title: text.models.progress,
    cell: (each) =>
      each.total > 0 && (
        <span class="total">
          <Progress share={each.done / each.total} label={each.model} />
          {text.models.came(bytes(each.done), bytes(each.total), shareOf(each), timeLeft(each))}
        </span>
      ),
  },
  { title: text.models.machineSays, cell: (each) => each.reason },
];

function shareOf({ done, total }: Download): number {
  return Math.floor((100 * done) / total);
}

/** Return the time until all has come, at the speed since the page heard of it; empty: that can't be told. */
function timeLeft({ state, done, total, from, since }: Download): string {
  const seconds = performance.now() / 1000 - since;
  if (state !== "downloading" || done <= from || seconds < 2) return "";
  return span(((total - done) * seconds) / (done - from));
}

function Downloads({ downloads }: { downloads: Record<string, Download> }) {
  const rows = Object.entries(downloads).map(([model, each]): NamedDownload => ({ model, ...each }));
  if (!rows.length) return null;
  return (
    <>
      <h2>{text.models.downloads}</h2>
      <p class="quiet">{text.models.aboutDownloads}</p>
      <Table label={text.models.downloads} rows={rows} columns={DOWNLOADS} id={(each) => each.model} />
    </>
  );
}

type Memory = { model: string; machine: string; row: MemoryRow };

const MEMORY: Column<Memory>[] = [
  { title: text.fleet.model, cell: ({ model }) => model },
  { title: text.models.machine, cell: ({ machine }) => machine },
  { title: text.models.weights, cell: ({ row }) => bytes(row.weights), isNumber: true },
  { title: text.models.cells, cell: ({ row }) => bytes(row.cells), isNumber: true },
  { title: text.models.compute, cell: ({ row }) => bytes(row.compute), isNumber: true },
  { title: text.models.other, cell: ({ row }) => bytes(row.other), isNumber: true },
  { title: text.models.predicted, cell: ({ row }) => bytes(row.predicted), isNumber: true },
  { title: text.models.taken, cell: ({ row }) => (row.taken === null ? text.models.unread : taken(row, row.taken)), isNumber: true },
  { title: text.models.growth, cell: ({ row }) => (row.growth ? bytes(row.growth) : ""), isNumber: true },
];

/** Write what was seen, and by how much the prediction is off. */
function taken(row: MemoryRow, seen: number): string {
  const off = Math.round((100 * (row.predicted - seen)) / Math.max(1, seen));
  return `${bytes(seen)} (${off > 0 ? "+" : ""}${off} %)`;
}

function MemoryPlan({ models }: { models: Record<string, ModelRow> }) {
  const rows = entries(models).flatMap(({ name, row }) =>
    Object.entries(row.memory ?? {}).map(([machine, memory]): Memory => ({ model: name, machine, row: memory })),
  );
  if (!rows.length) return null;
  return (
    <>
      <h2>{text.models.memory}</h2>
      <p class="quiet">{text.models.aboutMemory}</p>
      <Table label={text.models.memory} rows={rows} columns={MEMORY} id={(each) => `${each.machine} ${each.model}`} />
    </>
  );
}

export function Models({ session, overview }: { session: Session; overview: Overview | null }) {
  const { downloads, statuses } = useNews();
  const cards = useLoaded(() => get<{ data: ModelCard[] }>("/models"), [Object.keys(statuses).sort().join()]);
  const rows = (cards.value?.data ?? []).map((card) => ({ ...card, status: statuses[card.id] ?? card.status }));
  return (
    <>
      {session.role === "admin" && <Catalog reloaded={cards.again} />}
      <Problem error={cards.error} again={cards.again} />
      {cards.value && <Table label={text.tabs.models} rows={rows} columns={COLUMNS} id={(card) => card.id} />}
      <Downloads downloads={downloads} />
      {overview && <MemoryPlan models={overview.models} />}
    </>
  );
}
