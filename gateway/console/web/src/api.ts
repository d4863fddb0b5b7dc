// Calls the gateway with the session's cookie: documents, server-sent events, and streamed answers.

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** The header by which the gateway knows that this page asks, and no other one: see gateway/access/keys.py. */
const OF_CONSOLE = { "x-paddock-console": "1" };

type Listener = () => void;
let onSignedOut: Listener = () => {};

/** Have `listener` called when a request is refused because the session is over. */
export function whenSignedOut(listener: Listener): void {
  onSignedOut = listener;
}

async function refusal(response: Response): Promise<ApiError> {
  let code = "";
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    code = String(body.error?.code ?? body.error?.type ?? "");
    message = String(body.error?.message ?? message);
  } catch {
    // no JSON: the status says it
  }
  return new ApiError(response.status, code, message);
}

async function send(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const options: RequestInit = { method, credentials: "same-origin", headers: { ...OF_CONSOLE } };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { ...OF_CONSOLE, "content-type": "application/json" };
  }
  if (signal) options.signal = signal;
  const response = await fetch(path, options);
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.status === 401 && path !== "/ui/session") onSignedOut();
  throw error;
}

export async function get<T>(path: string, query: Record<string, string | number> = {}): Promise<T> {
  const search = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)]));
  return (await send("GET", search.size ? `${path}?${search}` : path)).json();
}

export async function getText(path: string): Promise<string> {
  return (await send("GET", path)).text();
}

export async function post<T>(path: string, body?: unknown): Promise<T> {
  return (await send("POST", path, body)).json();
}

export async function put<T>(path: string, body: unknown): Promise<T> {
  return (await send("PUT", path, body)).json();
}

export async function remove(path: string): Promise<void> {
  await send("DELETE", path);
}

/** Remove what `path` and `query` name, and return what the gateway answers. */
export async function removed<T>(path: string, query: Record<string, string>): Promise<T> {
  return (await send("DELETE", `${path}?${new URLSearchParams(query)}`)).json();
}

/** Yield the data of a streamed answer's events, decoded; it ends at `[DONE]`. */
export async function* stream<T>(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<T> {
  yield* eventsOf<T>(await send("POST", path, body, signal));
}

/** Yield the data of the events at `path`, decoded. An EventSource can't send the header that this page is known by. */
export async function* follow<T>(path: string, signal: AbortSignal): AsyncGenerator<T> {
  yield* eventsOf<T>(await send("GET", path, undefined, signal));
}

async function* eventsOf<T>(response: Response): AsyncGenerator<T> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6).trim();
        if (data === "[DONE]") return;
        const found = JSON.parse(data);
        if (found.error) throw new ApiError(0, String(found.error.code ?? ""), String(found.error.message));
        yield found as T;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
