// The parts that all views are made of.
import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { text } from "./strings";

export interface Column<T> {
  title: string;
  cell: (row: T) => ComponentChildren;
  isNumber?: boolean;
}

/** A table whose rows beyond the first `most` are shown when asked for. */
export function Table<T>(props: {
  label: string;
  columns: Column<T>[];
  rows: T[];
  id: (row: T) => string;
  most?: number;
  empty?: string;
}) {
  const step = props.most ?? 50;
  const [most, setMost] = useState(step);
  const shown = props.rows.slice(0, most);
  if (!props.rows.length) return <p class="quiet">{props.empty ?? text.none}</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <caption class="unseen">{props.label}</caption>
        <thead>
          <tr>
            {props.columns.map((column) => (
              <th key={column.title} scope="col" class={column.isNumber ? "number" : ""}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {shown.map((row) => (
            <tr key={props.id(row)}>
              {props.columns.map((column) => (
                <td key={column.title} class={column.isNumber ? "number" : ""}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {props.rows.length > most && (
        <button type="button" onClick={() => setMost(most + step)}>
          {text.more(Math.min(step, props.rows.length - most))}
        </button>
      )}
    </div>
  );
}

export function Badge(props: { kind: "good" | "busy" | "bad" | "quiet"; children: ComponentChildren }) {
  return <span class={`badge ${props.kind}`}>{props.children}</span>;
}

export function Bar(props: { share: number; label: string }) {
  return (
    <span class="bar" role="img" aria-label={props.label} title={props.label}>
      <span style={{ width: `${Math.min(100, 100 * props.share)}%` }} />
    </span>
  );
}

/** How much of something is done. */
export function Progress(props: { share: number; label: string }) {
  const percent = Math.floor(100 * Math.min(1, props.share));
  return (
    <span class="bar" role="progressbar" aria-label={props.label} aria-valuenow={percent} aria-valuemin={0} aria-valuemax={100}>
      <span style={{ width: `${percent}%` }} />
    </span>
  );
}

export function Field(props: { label: string; children: ComponentChildren; hint?: string }) {
  return (
    <label class="field">
      <span>{props.label}</span>
      {props.children}
      {props.hint && <small>{props.hint}</small>}
    </label>
  );
}

export function Problem(props: { error: unknown; again?: () => void }) {
  if (!props.error) return null;
  const message = props.error instanceof Error ? props.error.message : String(props.error);
  return (
    <p class="problem" role="alert">
      {message}{" "}
      {props.again && (
        <button type="button" onClick={props.again}>
          {text.retry}
        </button>
      )}
    </p>
  );
}

export function Dialog(props: { heading: string; onClose: () => void; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog ref={element} onClose={props.onClose} aria-label={props.heading}>
      <h2>{props.heading}</h2>
      {props.children}
    </dialog>
  );
}

/** Ask before something is done that others feel. */
export function Confirm(props: {
  heading: string;
  about: ComponentChildren;
  action: string;
  isOff?: boolean;
  run: () => Promise<unknown>;
  onClose: () => void;
}) {
  const [error, setError] = useState<unknown>(null);
  const act = () => props.run().then(props.onClose, setError);
  return (
    <Dialog heading={props.heading} onClose={props.onClose}>
      {typeof props.about === "string" ? <p>{props.about}</p> : props.about}
      <Problem error={error} />
      <div class="row end">
        <button type="button" onClick={props.onClose}>
          {text.cancel}
        </button>
        <button type="button" class="main" disabled={props.isOff} onClick={act}>
          {props.action}
        </button>
      </div>
    </Dialog>
  );
}

/** Return the answer of `load`, which runs again when `inputs` change or `again` is called. */
export function useLoaded<T>(load: () => Promise<T>, inputs: readonly unknown[]) {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState<unknown>(null);
  const again = useCallback(() => {
    let isWanted = true;
    load().then(
      (found) => {
        if (!isWanted) return;
        setValue(found);
        setError(null);
      },
      (problem) => isWanted && setError(problem),
    );
    return () => {
      isWanted = false;
    };
  }, inputs);
  useEffect(again, [again]);
  return { value, error, again };
}

export function Tabs<Name extends string>(props: {
  label: string;
  names: readonly Name[];
  titles: Record<Name, string>;
  chosen: Name;
  choose: (name: Name) => void;
}) {
  const move = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    const place = (props.names.indexOf(props.chosen) + step + props.names.length) % props.names.length;
    props.choose(props.names[place]!);
    ((event.currentTarget as HTMLElement).children[place] as HTMLElement).focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label={props.label} onKeyDown={move}>
      {props.names.map((name) => (
        <button
          key={name}
          type="button"
          role="tab"
          aria-selected={name === props.chosen}
          tabIndex={name === props.chosen ? 0 : -1}
          onClick={() => props.choose(name)}
        >
          {props.titles[name]}
        </button>
      ))}
    </div>
  );
}
