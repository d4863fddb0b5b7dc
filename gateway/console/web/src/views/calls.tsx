// The calls under way at all gateways, and how an admin cancels one.
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, removed } from "../api";
import { span } from "../format";
import { text } from "../strings";
import type { CallRow, CallsAnswer } from "../types";
import { Badge, Confirm, Problem, Table, type Column } from "../ui";

const EVERY_MS = 2000;

/** Names one call: callers choose request ids, so the team belongs to it. */
export interface CallName {
  request_id: string;
  team: string;
}

export function CancelButton(props: { call: CallName; onAsk: (call: CallName) => void }) {
  const label = `${text.calls.cancel} ${props.call.request_id}`;
  return (
    <button type="button" aria-label={label} title={label} onClick={() => props.onAsk(props.call)}>
      {text.calls.cancel}
    </button>
  );
}

export function ConfirmCancel(props: { call: CallName; onClose: () => void }) {
  const { request_id, team } = props.call;
  return (
    <Confirm
      heading={`${text.calls.cancel} ${request_id}`}
      about={text.calls.confirm(team)}
      action={text.calls.cancelIt}
      run={() => removed(`/admin/calls/${encodeURIComponent(request_id)}`, { team })}
      onClose={props.onClose}
    />
  );
}

/** The calls of all gateways, asked for again while `isLive`. */
export function Calls(props: { isLive: boolean; gateways: number }) {
  const [found, setFound] = useState<CallsAnswer | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [asked, setAsked] = useState<CallName | null>(null);
  useEffect(() => {
    let timer = 0;
    let isOver = false;
    const look = () =>
      get<CallsAnswer>("/admin/calls")
        .then(
          (answer) => {
            if (isOver) return;
            setFound(answer);
            setError(null);
          },
          (problem) => !isOver && setError(problem),
        )
        .finally(() => {
          if (!isOver && props.isLive) timer = window.setTimeout(look, EVERY_MS);
        });
    look();
    return () => {
      isOver = true;
      window.clearTimeout(timer);
    };
  }, [props.isLive]);
  // The view is drawn anew with each event of the fleet, and this table need not be.
  const table = useMemo(
    () =>
      found && (
        <Table
          label={text.calls.heading}
          columns={columnsOf(props.gateways > 1, setAsked)}
          rows={found.data}
          id={(call) => `${call.gateway} ${call.key} ${call.request_id}`}
          empty={text.calls.none}
        />
      ),
    [found, props.gateways > 1],
  );
  return (
    <>
      <h2>{text.calls.heading}</h2>
      <Problem error={error} />
      {found && found.silent.length > 0 && <p class="quiet">{text.calls.silent(found.silent)}</p>}
      {table}
      {asked && <ConfirmCancel call={asked} onClose={() => setAsked(null)} />}
    </>
  );
}

function columnsOf(hasGateways: boolean, ask: (call: CallName) => void): Column<CallRow>[] {
  return [
    { title: text.fleet.request, cell: (call) => <span class="id">{call.request_id}</span> },
    { title: text.fleet.team, cell: (call) => call.team },
    { title: text.calls.key, cell: (call) => call.key },
    {
      title: text.fleet.model,
      cell: (call) => (
        <>
          {call.model} {call.alias !== call.model && <small>{text.calls.as(call.alias)}</small>}
        </>
      ),
    },
    {
      title: text.fleet.state,
      cell: (call) =>
        call.status === "running" ? (
          <Badge kind="good">{text.calls.runs(call.worker)}</Badge>
        ) : (
          <Badge kind="busy">{text.calls.waits(call.position)}</Badge>
        ),
    },
    { title: text.calls.since, cell: (call) => span(Date.now() / 1000 - call.since), isNumber: true },
    {
      title: text.calls.predicted,
      cell: (call) => (call.status === "waiting" && call.predicted_wait_s ? span(call.predicted_wait_s) : ""),
      isNumber: true,
    },
    { title: text.queue.priority, cell: (call) => call.priority, isNumber: true },
    ...(hasGateways ? [{ title: text.queue.gateway, cell: (call: CallRow) => call.gateway }] : []),
    { title: "", cell: (call) => <CancelButton call={call} onAsk={ask} /> },
  ];
}
