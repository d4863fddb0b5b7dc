// The catalog's file: what is wrong with it, and an editor that checks a change before it is used.
import { useRef, useState } from "preact/hooks";
import { get, post, put } from "../api";
import { text } from "../strings";
import type { CatalogAnswer, CatalogChanges, CatalogCheck } from "../types";
import { Field, Problem, useLoaded } from "../ui";

export function Catalog({ reloaded }: { reloaded: () => void }) {
  const catalog = useLoaded(() => get<CatalogAnswer>("/admin/catalog"), []);
  const [error, setError] = useState<unknown>(null);
  const [isDone, setDone] = useState(false);
  const [isEditing, setEditing] = useState(false);
  if (!catalog.value) return <Problem error={catalog.error} />;
  const reload = () => {
    setError(null);
    post("/admin/catalog/reload").then(() => {
      setDone(true);
      catalog.again();
      reloaded();
    }, setError);
  };
  return (
    <section class="card" aria-label={text.models.catalog}>
      <p>{text.models.file(catalog.value.file)}</p>
      <Problem error={catalog.value.fault} />
      <Problem error={error} />
      {catalog.value.file !== null && (
        <p class="row">
          <button type="button" onClick={reload}>
            {text.models.reload}
          </button>
          <button type="button" aria-expanded={isEditing} onClick={() => setEditing(!isEditing)}>
            {text.models.edit}
          </button>
          <span role="status">{isDone && !error ? text.models.reloaded : ""}</span>
        </p>
      )}
      {isEditing && (
        <Editor
          applied={() => {
            catalog.again();
            reloaded();
          }}
        />
      )}
    </section>
  );
}

function Editor({ applied }: { applied: () => void }) {
  const file = useLoaded(() => get<CatalogAnswer>("/admin/catalog", { text: "true" }), []);
  const [draft, setDraft] = useState<string | null>(null);
  const [check, setCheck] = useState<{ of: string; found: CatalogCheck } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isApplied, setApplied] = useState(false);
  const area = useRef<HTMLTextAreaElement>(null);
  if (!file.value) return <Problem error={file.error} />;
  const { digest, unwritable } = file.value;
  const now = draft ?? file.value.text ?? "";
  const isChecked = check?.of === now;
  const isGood = isChecked && check.found.faults.length === 0;
  const look = () => {
    setError(null);
    setApplied(false);
    post<CatalogCheck>("/admin/catalog/check", { text: now }).then((found) => setCheck({ of: now, found }), setError);
  };
  const apply = () => {
    setError(null);
    put("/admin/catalog", { text: now, digest }).then(() => {
      setApplied(true);
      setCheck(null);
      setDraft(null);
      file.again();
      applied();
    }, setError);
  };
  const showLine = (line: number) => {
    const element = area.current;
    if (!element || !line) return;
    const lines = now.split("\n");
    const begin = lines.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0);
    element.focus();
    element.setSelectionRange(begin, begin + (lines[line - 1] ?? "").length);
    element.scrollTop = (element.scrollHeight / Math.max(1, lines.length)) * Math.max(0, line - 3);
  };
  return (
    <>
      <Field label={text.models.contents}>
        <textarea
          ref={area}
          class="code"
          rows={Math.min(30, Math.max(8, now.split("\n").length + 1))}
          wrap="off"
          spellcheck={false}
          value={now}
          onInput={(event) => setDraft(event.currentTarget.value)}
        />
      </Field>
      {unwritable && <p class="quiet">{unwritable}</p>}
      <Problem error={error} />
      <div role="status">
        {isApplied && <p>{text.models.applied}</p>}
        {isChecked && <Found found={check.found} showLine={showLine} />}
      </div>
      <p class="row">
        <button type="button" onClick={look}>
          {text.models.check}
        </button>
        <button type="button" class="main" disabled={!isGood || !!unwritable || draft === null} onClick={apply}>
          {text.models.apply}
        </button>
        <button type="button" disabled={draft === null} onClick={() => setDraft(null)}>
          {text.models.discard}
        </button>
      </p>
    </>
  );
}

function Found({ found, showLine }: { found: CatalogCheck; showLine: (line: number) => void }) {
  if (found.faults.length === 0) {
    const told = Object.entries(found.changes).flatMap(([part, changes]) => toldOf(part, changes));
    return <p>{told.length ? text.models.good(told.join("; ")) : text.models.same}</p>;
  }
  return (
    <ul class="plain">
      {found.faults.map((fault) => (
        <li key={`${fault.line} ${fault.message}`} class="problem">
          {fault.line > 0 && (
            <button type="button" class="link" onClick={() => showLine(fault.line)}>
              {text.models.line(fault.line)}
            </button>
          )}{" "}
          {fault.message}
        </li>
      ))}
    </ul>
  );
}

function toldOf(part: string, changes: CatalogChanges): string[] {
  return Object.entries(changes).map(([how, names]) => `${part} ${how}: ${names.join(", ")}`);
}
