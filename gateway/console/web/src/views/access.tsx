import { useState } from "preact/hooks";
import { get, post, remove } from "../api";
import { number, time } from "../format";
import { Plot } from "../plot";
import { text } from "../strings";
import type { ApiKey, AuditEntry, Budget, Session, UsageSum } from "../types";
import { Badge, Bar, Confirm, Dialog, Field, Problem, Table, Tabs, useLoaded, type Column } from "../ui";

const PARTS = ["keys", "teams", "budgets", "usage", "audit"] as const;
type PartName = (typeof PARTS)[number];
interface Page<T> {
  data: T[];
  next?: string | null;
  currency?: string;
}

export function Access({ session }: { session: Session }) {
  const [part, setPart] = useState<PartName>("keys");
  if (!session.has_accounts) return <p>{text.noAccounts}</p>;
  const names = PARTS.filter((name) => session.role !== "user" || name === "keys" || name === "usage" || name === "budgets");
  return (
    <>
      <Tabs label={text.tabs.access} names={names} titles={text.access} chosen={part} choose={setPart} />
      {part === "keys" && <Keys mayChange={session.role !== "user"} team={session.team} />}
      {part === "teams" && <Teams />}
      {part === "budgets" && <Budgets />}
      {part === "usage" && <UsagePart />}
      {part === "audit" && <Audit />}
    </>
  );
}

function Keys({ mayChange, team }: { mayChange: boolean; team: string }) {
  const keys = useLoaded(() => get<Page<ApiKey>>("/admin/keys", { limit: 1000 }), []);
  const [isMaking, setMaking] = useState(false);
  const [leaving, setLeaving] = useState<ApiKey | null>(null);
  const columns: Column<ApiKey>[] = [
    { title: text.access.name, cell: (key) => key.name },
    { title: text.access.team, cell: (key) => key.team },
    { title: text.access.role, cell: (key) => <>{key.role} {key.blocked && <Badge kind="bad">{text.access.blocked}</Badge>}</> },
    { title: text.access.models, cell: (key) => (key.aliases ? key.aliases.join(", ") : text.access.allModels) },
    { title: text.access.lastUsed, cell: (key) => time(key.last_used_at) || text.access.never },
    { title: text.access.expires, cell: (key) => time(key.expires_at) || text.access.never },
  ];
  if (mayChange) {
    columns.push({
      title: "",
      cell: (key) => (
        <button type="button" aria-label={`${text.access.remove} ${key.name}`} onClick={() => setLeaving(key)}>
          {text.access.remove}
        </button>
      ),
    });
  }
  return (
    <>
      {mayChange && (
        <p class="row end">
          <button type="button" class="main" onClick={() => setMaking(true)}>
            {text.access.newKey}
          </button>
        </p>
      )}
      <Problem error={keys.error} again={keys.again} />
      {keys.value && <Table label={text.access.keys} rows={keys.value.data} columns={columns} id={(key) => key.name} />}
      {isMaking && (
        <NewKey
          team={team}
          onClose={() => {
            setMaking(false);
            keys.again();
          }}
        />
      )}
      {leaving && (
        <Confirm
          heading={`${text.access.remove} ${leaving.name}`}
          about={text.access.confirmRemove(leaving.name)}
          action={text.access.remove}
          run={() => remove(`/admin/keys/${encodeURIComponent(leaving.name)}`).then(keys.again)}
          onClose={() => setLeaving(null)}
        />
      )}
    </>
  );
}

function NewKey({ team, onClose }: { team: string; onClose: () => void }) {
  const [made, setMade] = useState<string | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isCopied, setCopied] = useState(false);
  const submit = (event: Event) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const body: Record<string, unknown> = { team: form.get("team") };
    if (form.get("name")) body.name = form.get("name");
    const days = Number(form.get("days"));
    if (days) body.duration_s = days * 86400;
    post<{ key: string }>("/admin/keys", body).then((answer) => setMade(answer.key), setError);
  };
  if (made !== null) {
    return (
      <Dialog heading={text.access.onceHeading} onClose={onClose}>
        <p>{text.access.once}</p>
        <pre tabIndex={0} class="key">
          {made}
        </pre>
        <div class="row end">
          <span role="status">{isCopied ? text.playground.copied : ""}</span>
          <button type="button" onClick={() => navigator.clipboard.writeText(made).then(() => setCopied(true))}>
            {text.playground.copy}
          </button>
          <button type="button" onClick={onClose}>
            {text.close}
          </button>
        </div>
      </Dialog>
    );
  }
  return (
    <Dialog heading={text.access.newKey} onClose={onClose}>
      <form onSubmit={submit}>
        <Field label={text.access.name}>
          <input name="name" maxLength={256} />
        </Field>
        <Field label={text.access.team}>
          <input name="team" required value={team} />
        </Field>
        <Field label={`${text.access.expires} (d)`}>
          <input name="days" type="number" min={1} />
        </Field>
        <Problem error={error} />
        <div class="row end">
          <button type="button" onClick={onClose}>
            {text.cancel}
          </button>
          <button type="submit" class="main">
            {text.access.make}
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function Teams() {
  const teams = useLoaded(() => get<Page<{ name: string; blocked: boolean; organisation?: string | null }>>("/admin/teams", { limit: 1000 }), []);
  if (!teams.value) return <Problem error={teams.error} again={teams.again} />;
  return (
    <Table
      label={text.access.teams}
      rows={teams.value.data}
      id={(team) => team.name}
      columns={[
        { title: text.access.team, cell: (team) => <>{team.name} {team.blocked && <Badge kind="bad">{text.access.blocked}</Badge>}</> },
        { title: "Organisation", cell: (team) => team.organisation ?? "" },
      ]}
    />
  );
}

function Budgets() {
  const budgets = useLoaded(() => get<Page<Budget>>("/admin/budgets"), []);
  if (!budgets.value) return <Problem error={budgets.error} again={budgets.again} />;
  const currency = budgets.value.currency ?? "";
  return (
    <Table
      label={text.access.budgets}
      rows={budgets.value.data}
      id={(budget) => `${budget.kind} ${budget.name} ${budget.period}`}
      columns={[
        { title: text.access.name, cell: (budget) => `${budget.kind} ${budget.name}` },
        { title: text.access.period, cell: (budget) => budget.period },
        { title: text.access.spent, cell: (budget) => `${number(budget.spent)} of ${number(budget.amount)} ${currency}` },
        { title: text.access.left, cell: (budget) => <Bar share={budget.amount ? budget.spent / budget.amount : 1} label={`${number(budget.left)} ${currency}`} /> },
      ]}
    />
  );
}

const BY = ["team", "key", "model", "day"] as const;

function UsagePart() {
  const [by, setBy] = useState<(typeof BY)[number]>("team");
  const [days, setDays] = useState(30);
  const from = new Date(Date.now() - days * 86_400_000).toISOString().slice(0, 10);
  const sums = useLoaded(() => get<Page<UsageSum>>("/admin/usage/summary", { from, group_by: by }), [by, from]);
  const daily = useLoaded(() => get<Page<UsageSum>>("/admin/usage/summary", { from, group_by: "day" }), [from]);
  const currency = sums.value?.currency ?? "";
  const figures = (["num_calls", "num_failed", "prompt_tokens", "cached_tokens", "completion_tokens"] as const).map((name, place) => ({
    title: [text.access.calls, text.access.failed, text.access.read, text.access.cached, text.access.written][place]!,
    cell: (row: UsageSum) => number(row[name]),
    isNumber: true,
  }));
  return (
    <>
      <div class="row">
        <Field label={text.access.by}>
          <select value={by} onChange={(event) => setBy(event.currentTarget.value as (typeof BY)[number])}>
            {BY.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </Field>
        <Field label={text.access.when}>
          <select value={days} onChange={(event) => setDays(Number(event.currentTarget.value))}>
            {[7, 30, 90].map((count) => (
              <option key={count} value={count}>
                {text.access.days(count)}
              </option>
            ))}
          </select>
        </Field>
        <a class="button" href={`/admin/usage/export?from=${from}`} download="usage.csv">
          {text.access.csv}
        </a>
      </div>
      <Problem error={sums.error} again={sums.again} />
      {daily.value && daily.value.data.length > 1 && (
        <Plot
          label={text.access.written}
          times={daily.value.data.map((row) => Date.parse(String(row.day)) / 1000)}
          series={[{ label: text.access.written, values: daily.value.data.map((row) => row.completion_tokens) }]}
        />
      )}
      {sums.value && (
        <Table
          label={text.access.usage}
          rows={sums.value.data}
          id={(row) => String(row[by])}
          columns={[
            { title: by, cell: (row) => String(row[by]) },
            ...figures,
            { title: `${text.access.cost} ${currency}`, cell: (row) => number(row.cost), isNumber: true },
          ]}
        />
      )}
    </>
  );
}

function Audit() {
  const audit = useLoaded(() => get<Page<AuditEntry>>("/admin/audit", { limit: 200 }), []);
  if (!audit.value) return <Problem error={audit.error} again={audit.again} />;
  return (
    <Table
      label={text.access.audit}
      rows={audit.value.data}
      id={(entry) => String(entry.number)}
      columns={[
        { title: text.access.when, cell: (entry) => time(entry.at) },
        { title: text.access.who, cell: (entry) => entry.actor },
        { title: text.access.what, cell: (entry) => `${entry.action} ${entry.kind} ${entry.subject}` },
        { title: text.access.team, cell: (entry) => entry.team },
      ]}
    />
  );
}
