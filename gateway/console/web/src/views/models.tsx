import { get } from "../api";
import { bytes, number } from "../format";
import { text } from "../strings";
import type { MemoryRow, ModelCard, ModelRow, Overview, Session } from "../types";
import { Badge, Problem, Table, useLoaded, type Column } from "../ui";
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
        {card.status.failed ? "failed" : card.status.value}
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
  const cards = useLoaded(() => get<{ data: ModelCard[] }>("/models"), []);
  return (
    <>
      {session.role === "admin" && <Catalog reloaded={cards.again} />}
      <Problem error={cards.error} again={cards.again} />
      {cards.value && <Table label={text.tabs.models} rows={cards.value.data} columns={COLUMNS} id={(card) => card.id} />}
      {overview && <MemoryPlan models={overview.models} />}
    </>
  );
}
