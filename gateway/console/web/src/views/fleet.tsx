import { useEffect, useState } from "preact/hooks";
import { get, post } from "../api";
import { compare, sum, type FleetFeed, type FleetState } from "../fleet";
import { bytes, number, perSecond, span } from "../format";
import { Plot } from "../plot";
import { text } from "../strings";
import type { MachineRow, ModelRow, SlotRow, WishedPlan, WorkerRow } from "../types";
import { Badge, Bar, Confirm, Problem, Table, useLoaded, type Column } from "../ui";
import { CancelButton, ConfirmCancel, type CallName } from "./calls";

type Model = { name: string; row: ModelRow };
type Worker = { id: string; row: WorkerRow };
type Action = "load" | "unload" | "drain";
/** What an admin wants done, to the model or the worker of this name. */
type Asked = { action: Action; name: string };

export function Fleet(props: { feed: FleetFeed; state: FleetState }) {
  const { feed, state } = props;
  const [filter, setFilter] = useState("");
  const [opened, setOpened] = useState<string | null>(null);
  const [asked, setAsked] = useState<Asked | null>(null);
  const overview = state.overview;
  const openedModel = opened && overview?.workers[opened]?.model;
  useEffect(() => feed.watch(openedModel ? [openedModel] : []), [openedModel]);
  if (!overview) return <p class="quiet">{text.loading}</p>;
  const wanted = (name: string) => name.toLowerCase().includes(filter.toLowerCase());
  const models = entries(overview.models).filter((model) => wanted(model.name));
  const workers: Worker[] = [];
  for (const id of state.order) {
    const row = overview.workers[id];
    if (row && (!filter || wanted(id) || wanted(row.model))) workers.push({ id, row });
  }
  return (
    <>
      <Summary state={state} />
      <input
        type="search"
        aria-label={text.fleet.filter}
        placeholder={text.fleet.filter}
        value={filter}
        onInput={(event) => setFilter(event.currentTarget.value)}
      />
      <h2>{text.fleet.models}</h2>
      <Table label={text.fleet.models} columns={modelColumns(setAsked)} rows={models} id={(model) => model.name} />
      <h2>{text.fleet.workers}</h2>
      {workers.length ? (
        <Workers workers={workers} state={state} opened={opened} open={setOpened} ask={setAsked} />
      ) : (
        <p class="quiet">{text.fleet.empty}</p>
      )}
      <Machines machines={overview.machines} wanted={wanted} />
      {asked && <Wish asked={asked} onClose={() => setAsked(null)} />}
    </>
  );
}

export function entries(models: Record<string, ModelRow>): Model[] {
  return Object.entries(models)
    .map(([name, row]) => ({ name, row }))
    .sort((one, other) => compare(one.name, other.name));
}

function Summary({ state }: { state: FleetState }) {
  const overview = state.overview!;
  const workers = Object.values(overview.workers);
  const times = state.history.map((sample) => sample.at);
  return (
    <section class="summary" aria-label={text.tabs.fleet}>
      <div class="card">
        <p class="quiet">
          {text.fleet.summary(
            Object.keys(overview.gateways).length,
            Object.keys(overview.models).length,
            workers.length,
          )}
        </p>
        <Total label={text.fleet.slotsInUse} part={sum(workers.map((worker) => worker.slots_busy))} whole={sum(workers.map((worker) => worker.slots))} />
        <Total label={text.fleet.kvInUse} part={sum(workers.map((worker) => worker.kv_tokens_used))} whole={sum(workers.map((worker) => worker.kv_tokens))} />
      </div>
      <div class="card">
        <Plot
          label={`${text.fleet.slotsInUse}, ${text.fleet.waiting.toLowerCase()}`}
          times={times}
          series={[
            { label: text.fleet.slotsInUse, values: state.history.map((sample) => sample.busy) },
            { label: text.fleet.waiting, values: state.history.map((sample) => sample.waiting) },
          ]}
        />
      </div>
    </section>
  );
}

function Total(props: { label: string; part: number; whole: number }) {
  const told = `${number(props.part)} of ${number(props.whole)}`;
  return (
    <p class="total">
      <strong>{told}</strong> <span class="quiet">{props.label}</span>
      <Bar share={props.whole ? props.part / props.whole : 0} label={`${props.label}: ${told}`} />
    </p>
  );
}

export function ModelState({ row }: { row: ModelRow }) {
  switch (row.status) {
    case "loaded":
      return <Badge kind="good">loaded</Badge>;
    case "loading":
      return <Badge kind="busy">loading{row.progress === null ? "" : ` ${Math.round(100 * row.progress)} %`}</Badge>;
    case "failed":
      return <Badge kind="bad">failed</Badge>;
    case "sleeping":
      return <Badge kind="quiet">sleeping</Badge>;
    default:
      return <Badge kind="quiet">{row.is_on_demand ? "on demand" : row.status}</Badge>;
  }
}

/** Say what loading or unloading a model, or draining a worker, would do, then do it. */
function Wish(props: { asked: Asked; onClose: () => void }) {
  const { action, name } = props.asked;
  const subject = action === "drain" ? { worker: name } : { model: name };
  const { value: plan, error } = useLoaded(() => get<WishedPlan>("/admin/plan", { action, ...subject }), [action, name]);
  return (
    <Confirm
      heading={`${text.fleet[action]} ${name}`}
      action={text.fleet[action]}
      isOff={!plan || (plan.kept_by === "nobody" && action !== "drain")}
      run={() =>
        action === "drain"
          ? post(`/admin/workers/${encodeURIComponent(name)}/drain`)
          : post(`/models/${action}`, { model: name })
      }
      onClose={props.onClose}
      about={
        <>
          <Problem error={error} />
          {!plan && !error && <p class="quiet">{text.loading}</p>}
          {plan && <Would plan={plan} asked={props.asked} />}
        </>
      }
    />
  );
}

function Would({ plan, asked: { action, name } }: { plan: WishedPlan; asked: Asked }) {
  if (plan.kept_by === "nobody" && action !== "drain") return <p>{text.fleet.notKept}</p>;
  return (
    <>
      {plan.kept_by === "supervisor" && action === "load" && <p>{text.fleet.confirmLoad(name)}</p>}
      {action === "unload" && <p>{text.fleet.confirmUnload(name, plan.num_running, plan.num_waiting)}</p>}
      {plan.sentences.length > 0 && (
        <>
          <h3>{plan.is_possible ? text.fleet.wouldDo : text.fleet.notPossible}</h3>
          <ul>
            {plan.sentences.map((sentence) => (
              <li key={sentence}>{sentence}</li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}

const MOST_MACHINES = 24;

function Machines(props: { machines: Record<string, MachineRow> | undefined; wanted: (name: string) => boolean }) {
  const [isWhole, setWhole] = useState(false);
  const all = Object.entries(props.machines ?? {}).filter(
    ([name, row]) => props.wanted(name) || row.workers.some((worker) => props.wanted(worker.model)),
  );
  if (!all.length) return null;
  const shown = isWhole ? all : all.slice(0, MOST_MACHINES);
  return (
    <>
      <h2>{text.fleet.machines}</h2>
      <section class="cards" aria-label={text.fleet.machines}>
        {shown.map(([name, row]) => (
          <Machine key={name} name={name} row={row} />
        ))}
      </section>
      {all.length > shown.length && (
        <button type="button" onClick={() => setWhole(true)}>
          {text.more(all.length - shown.length)}
        </button>
      )}
    </>
  );
}

function Machine({ name, row }: { name: string; row: MachineRow }) {
  return (
    <div class="card">
      <strong>{name}</strong> {row.is_leaving && <Badge kind="busy">{text.fleet.leavingMachine}</Badge>}
      {row.devices.map((device) => {
        const told = text.fleet.freeOf(bytes(device.free_bytes), bytes(device.total_bytes));
        return (
          <p key={device.id}>
            <Bar share={device.total_bytes ? 1 - device.free_bytes / device.total_bytes : 0} label={told} />{" "}
            {text.fleet.device(device.id)} <small>{told}</small>
          </p>
        );
      })}
      {row.workers.length ? (
        <ul class="plain">
          {row.workers.map((worker, place) => (
            <li key={place}>
              {text.fleet.takes(worker.model, bytes(sum(Object.values(worker.bytes))), worker.status)}
            </li>
          ))}
        </ul>
      ) : (
        <p class="quiet">{text.fleet.noWorkersHere}</p>
      )}
      {Object.entries(row.failures).map(([model, why]) => (
        <p key={model} class="problem">
          {text.fleet.notLoadedThere(model, why)}
        </p>
      ))}
    </div>
  );
}

function modelColumns(ask: (asked: Asked) => void): Column<Model>[] {
  return [
    { title: text.fleet.model, cell: (model) => model.name },
    {
      title: text.fleet.state,
      cell: ({ row }) => (
        <>
          <ModelState row={row} /> {row.status !== "loaded" && row.why && <small>{row.why}</small>}
        </>
      ),
    },
    { title: text.fleet.workers, cell: ({ row }) => row.num_workers || "", isNumber: true },
    { title: text.fleet.slots, cell: ({ row }) => (row.slots ? `${row.slots_busy} of ${row.slots}` : "") },
    {
      title: text.fleet.waitingCalls,
      cell: ({ row }) =>
        row.waiting === null
          ? "?"
          : row.waiting
            ? `${row.waiting}${row.predicted_wait_s ? ` (${span(row.predicted_wait_s)})` : ""}`
            : "",
    },
    { title: text.fleet.also, cell: ({ row }) => row.aliases.join(", ") },
    {
      title: "",
      cell: ({ name, row }) => (
        <Ask asked={{ action: ["loaded", "loading", "sleeping"].includes(row.status) ? "unload" : "load", name }} ask={ask} />
      ),
    },
  ];
}

function Ask(props: { asked: Asked; ask: (asked: Asked) => void; isOff?: boolean }) {
  const { action, name } = props.asked;
  return (
    <button type="button" aria-label={`${text.fleet[action]} ${name}`} disabled={props.isOff} onClick={() => props.ask(props.asked)}>
      {text.fleet[action]}
    </button>
  );
}

function Workers(props: {
  workers: Worker[];
  state: FleetState;
  opened: string | null;
  open: (id: string | null) => void;
  ask: (asked: Asked) => void;
}) {
  const now = props.state.overview!.at;
  const columns: Column<Worker>[] = [
    {
      title: text.fleet.worker,
      cell: ({ id }) => {
        const isOpen = props.opened === id;
        return (
          <button
            type="button"
            class="link"
            aria-expanded={isOpen}
            title={isOpen ? text.fleet.hideSlots : text.fleet.showSlots}
            onClick={() => props.open(isOpen ? null : id)}
          >
            {id}
          </button>
        );
      },
    },
    { title: text.fleet.model, cell: ({ row }) => row.model },
    { title: text.fleet.state, cell: ({ row }) => <WorkerState row={row} /> },
    { title: text.fleet.slots, cell: (worker) => <Cells worker={worker} /> },
    { title: text.fleet.kv, cell: ({ row }) => <Kv row={row} /> },
    { title: text.fleet.reads, cell: ({ row }) => perSecond(row.prefill_ms), isNumber: true },
    { title: text.fleet.writes, cell: ({ row }) => perSecond(row.decode_ms), isNumber: true },
    {
      title: text.fleet.tiers,
      cell: ({ row }) =>
        text.fleet.tier(
          row.cache_ram_bytes ? bytes(row.cache_ram_bytes) : "",
          row.cache_disk_bytes ? bytes(row.cache_disk_bytes) : "",
        ),
    },
    { title: text.fleet.adapters, cell: ({ row }) => row.adapters_resident.join(", ") },
    { title: text.fleet.up, cell: ({ row }) => span(now - row.started_at), isNumber: true },
    { title: "", cell: ({ id, row }) => <Ask asked={{ action: "drain", name: id }} ask={props.ask} isOff={row.is_draining} /> },
  ];
  const slots = props.opened === null ? undefined : props.state.slots[props.opened];
  return (
    <>
      <Table label={text.fleet.workers} columns={columns} rows={props.workers} id={(worker) => worker.id} />
      {props.opened !== null && slots && <SlotCards worker={props.opened} slots={slots} state={props.state} />}
    </>
  );
}

function WorkerState({ row }: { row: WorkerRow }) {
  if (row.is_draining) return <Badge kind="busy">draining</Badge>;
  if (row.circuit) return <Badge kind="bad">{row.circuit === "open" ? "fails" : "on trial"}</Badge>;
  return <Badge kind="good">serving</Badge>;
}

/** A cell for each slot; of many, a bar. */
function Cells({ worker: { row } }: { worker: Worker }) {
  const told = `${row.slots_busy} of ${row.slots}${row.waiting ? `, ${row.waiting} queued` : ""}`;
  if (row.slots > 32) return <Bar share={row.slots_busy / row.slots} label={told} />;
  return (
    <span class="cells" role="img" aria-label={told} title={told}>
      {Array.from({ length: row.slots }, (_, place) => (
        <i key={place} class={place < row.slots_busy ? "on" : ""} />
      ))}
    </span>
  );
}

function Kv({ row }: { row: WorkerRow }) {
  const told = `${number(row.kv_tokens_used)} of ${number(row.kv_tokens)} cells`;
  return <Bar share={row.kv_tokens ? row.kv_tokens_used / row.kv_tokens : 0} label={told} />;
}

function SlotCards(props: { worker: string; slots: SlotRow[]; state: FleetState }) {
  const earlier = props.state.earlier[props.worker] ?? [];
  const seconds = props.state.slotsAt - props.state.earlierAt;
  const [asked, setAsked] = useState<CallName | null>(null);
  return (
    <section aria-label={`${text.fleet.slots}: ${props.worker}`} class="cards">
      {props.slots.map((slot, place) => (
        <div class="card slot" key={place}>
          <strong>{place}</strong>{" "}
          {slot.is_busy ? (
            <>
              <Badge kind="busy">{slot.team}</Badge>
              <p class="id">{slot.request_id}</p>
              <p>
                {number(slot.prompt_tokens)} {text.fleet.prompt}, {number(slot.answer_tokens)}
                {slot.max_tokens > 0 && ` of ${number(slot.max_tokens)}`} {text.fleet.answer}
                {speed(slot, earlier[place], seconds)}
              </p>
              {slot.request_id && <CancelButton call={slot} onAsk={setAsked} />}
            </>
          ) : (
            <span class="quiet">
              {text.fleet.idle}
              {slot.prompt_tokens > 0 && `, ${number(slot.prompt_tokens)} tokens kept for ${slot.team}`}
            </span>
          )}
        </div>
      ))}
      {asked && <ConfirmCancel call={asked} onClose={() => setAsked(null)} />}
    </section>
  );
}

function speed(now: SlotRow, before: SlotRow | undefined, seconds: number): string {
  if (!before || before.request_id !== now.request_id || seconds <= 0) return "";
  return `, ${number((now.answer_tokens - before.answer_tokens) / seconds)} t/s`;
}
