import { useState } from "preact/hooks";
import { get } from "../api";
import type { FleetState } from "../fleet";
import { number, span } from "../format";
import { text } from "../strings";
import { Problem, Table, useLoaded, type Column } from "../ui";
import { Calls } from "./calls";
import { entries } from "./fleet";

interface Ticket {
  position: number;
  team: string;
  priority: number;
  waited_s: number;
  gateway: string;
}

interface Ranked {
  worker: string;
  total_ms: number;
  wait_ms: number;
  slot_ms: number;
  backlog_ms: number;
  prefill_ms: number;
  adapter_ms: number;
  burden_ms: number;
  cached_tokens: number;
  free_slots: number;
}

interface Explanation {
  model: string;
  workers: Ranked[];
  left_out: Record<string, string>;
  line: { waiting: number; by_team: Record<string, number>; head: Ticket[] } | null;
}

const PARTS = ["wait", "slot", "backlog", "prefill", "adapter", "burden"] as const;

export function Queue({ state }: { state: FleetState }) {
  const [chosen, choose] = useState<string | null>(null);
  if (!state.overview) return <p class="quiet">{text.loading}</p>;
  const models = entries(state.overview.models);
  const waiting = models.filter((model) => model.row.waiting);
  return (
    <>
      <Table
        label={text.tabs.queue}
        rows={waiting}
        id={(model) => model.name}
        empty={text.queue.none}
        columns={[
          { title: text.fleet.model, cell: (model) => model.name },
          { title: text.fleet.waitingCalls, cell: ({ row }) => row.waiting, isNumber: true },
          { title: text.queue.predicted, cell: ({ row }) => span(row.predicted_wait_s), isNumber: true },
          {
            title: "",
            cell: (model) => (
              <button type="button" onClick={() => choose(model.name)}>
                {text.queue.explain}
              </button>
            ),
          },
        ]}
      />
      <Calls isLive={!state.isPaused} gateways={Object.keys(state.overview.gateways).length} />
      <label class="field short">
        <span>{text.queue.ask}</span>
        <select value={chosen ?? ""} onChange={(event) => choose(event.currentTarget.value || null)}>
          <option value="" />
          {models.map((model) => (
            <option key={model.name}>{model.name}</option>
          ))}
        </select>
      </label>
      {chosen && <Explained model={chosen} at={Math.floor(state.overview.at / 2)} />}
    </>
  );
}

function Explained({ model, at }: { model: string; at: number }) {
  const { value, error } = useLoaded(() => get<Explanation>("/admin/explain", { model }), [model, at]);
  if (error) return <Problem error={error} />;
  if (!value) return <p class="quiet">{text.loading}</p>;
  const longest = Math.max(1, ...value.workers.map((worker) => worker.total_ms));
  const tickets: Column<Ticket>[] = [
    { title: text.queue.position, cell: (ticket) => ticket.position, isNumber: true },
    { title: text.access.team, cell: (ticket) => ticket.team },
    { title: text.queue.waitingSince, cell: (ticket) => span(ticket.waited_s), isNumber: true },
    { title: text.queue.priority, cell: (ticket) => ticket.priority, isNumber: true },
    { title: text.queue.gateway, cell: (ticket) => ticket.gateway },
  ];
  return (
    <section>
      <h2>{text.queue.explained(value.model)}</h2>
      {value.workers.map((worker) => (
        <div class="explained" key={worker.worker}>
          <span>{worker.worker}</span>
          <Parts worker={worker} longest={longest} />
          <span class="number">{number(worker.total_ms)} ms</span>
        </div>
      ))}
      <p class="legend">
        {PARTS.map((part) => (
          <span key={part}>
            <i class={`part ${part}`} /> {text.queue.parts[part]}
          </span>
        ))}
      </p>
      {Object.keys(value.left_out).length > 0 && (
        <p class="quiet">
          {text.queue.leftOut}:{" "}
          {Object.entries(value.left_out)
            .map(([worker, why]) => `${worker} (${why})`)
            .join(", ")}
        </p>
      )}
      {value.line && value.line.head.length > 0 && (
        <Table label={text.tabs.queue} rows={value.line.head} columns={tickets} id={(ticket) => String(ticket.position)} />
      )}
    </section>
  );
}

function Parts({ worker, longest }: { worker: Ranked; longest: number }) {
  const told = PARTS.map((part) => `${text.queue.parts[part]} ${number(worker[`${part}_ms`])} ms`).join(", ");
  return (
    <span class="parts" role="img" aria-label={told} title={told}>
      {PARTS.map((part) => (
        <i key={part} class={`part ${part}`} style={{ width: `${(100 * worker[`${part}_ms`]) / longest}%` }} />
      ))}
    </span>
  );
}
