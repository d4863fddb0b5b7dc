import { render } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, post, remove, whenSignedOut } from "./api";
import { FleetFeed, type FleetState } from "./fleet";
import { Sampler } from "./metrics";
import { text } from "./strings";
import type { Session } from "./types";
import { Problem } from "./ui";
import { Access } from "./views/access";
import { Fleet } from "./views/fleet";
import { Health } from "./views/health";
import { Models } from "./views/models";
import { Playground } from "./views/playground";
import { Queue } from "./views/queue";
import { SignIn } from "./views/signin";

const VIEWS = ["fleet", "queue", "playground", "access", "models", "health"] as const;
type View = (typeof VIEWS)[number];
const FOR_ADMINS: ReadonlySet<View> = new Set(["fleet", "queue", "health"]);
const THEME = "paddock-theme";

interface Who {
  session: Session | null;
  sign_on: boolean;
}

function App() {
  const [who, setWho] = useState<Who | null>(null);
  const [hasEnded, setHasEnded] = useState(false);
  const [error, setError] = useState<unknown>(null);
  useEffect(() => {
    whenSignedOut(() => {
      setHasEnded(true);
      setWho((now) => ({ session: null, sign_on: now?.sign_on ?? false }));
    });
    get<Who>("/ui/session").then(setWho, setError);
  }, []);
  if (error) return <Problem error={error} />;
  if (!who) return <p class="quiet">{text.loading}</p>;
  if (!who.session) {
    return <SignIn hasEnded={hasEnded} hasSignOn={who.sign_on} onSignedIn={(session) => setWho({ ...who, session })} />;
  }
  return <Console session={who.session} hasSignOn={who.sign_on} leave={() => setWho({ ...who, session: null })} />;
}

function viewOf(hash: string, session: Session): View {
  const named = VIEWS.find((view) => hash === `#/${view}`);
  if (named && (session.role === "admin" || !FOR_ADMINS.has(named))) return named;
  return session.role === "admin" ? "fleet" : "playground";
}

function Console({ session, hasSignOn, leave }: { session: Session; hasSignOn: boolean; leave: () => void }) {
  const [view, setView] = useState<View>(viewOf(location.hash, session));
  const feed = useMemo(() => new FleetFeed(), []);
  const sampler = useMemo(() => new Sampler(), []);
  const [fleet, setFleet] = useState<FleetState>(feed.state);
  const isAdmin = session.role === "admin";
  useEffect(() => {
    const follow = () => setView(viewOf(location.hash, session));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    if (!isAdmin) return;
    const ends = [feed.listen(setFleet), sampler.start(), () => feed.close()];
    return () => ends.forEach((end) => end());
  }, [feed]);
  useEffect(() => {
    document.title = `${text.tabs[view]} – ${text.title}`;
  }, [view]);
  // A session of the organisation's sign-in ends at the gateways too; of a key, only the browser's cookie goes.
  const signOut = () =>
    (hasSignOn ? post("/auth/logout").catch(() => {}) : Promise.resolve())
      .then(() => remove("/ui/session"))
      .then(leave, leave);
  const shown = VIEWS.filter((name) => isAdmin || !FOR_ADMINS.has(name));
  return (
    <>
      <a class="skip" href="#content" onClick={(event) => {
        event.preventDefault();
        document.getElementById("content")?.focus();
      }}>
        {text.skip}
      </a>
      <header>
        <strong>{text.title}</strong>
        <nav aria-label={text.title}>
          {shown.map((name) => (
            <a key={name} href={`#/${name}`} aria-current={name === view ? "page" : undefined}>
              {text.tabs[name]}
            </a>
          ))}
        </nav>
        <span class="who">
          {isAdmin && <Live feed={feed} state={fleet} />}
          <span class="quiet">
            {session.user} ({session.role})
          </span>
          <button type="button" aria-label={text.theme} title={text.theme} onClick={changeTheme}>
            ◐
          </button>
          {session.is_open ? (
            <strong class="badge busy" title={text.signIn.openHint}>
              {text.signIn.open}
            </strong>
          ) : (
            <button type="button" onClick={signOut}>
              {text.signIn.out}
            </button>
          )}
        </span>
      </header>
      <main id="content" tabIndex={-1}>
        <h1 class="unseen">{text.tabs[view]}</h1>
        {fleet.overview && !fleet.overview.redis_up && <Problem error={text.live.redisAway} />}
        {fleet.overview?.catalog_fault && <Problem error={text.live.catalogFault(fleet.overview.catalog_fault)} />}
        {view === "fleet" && <Fleet feed={feed} state={fleet} />}
        {view === "queue" && <Queue state={fleet} />}
        {view === "playground" && <Playground />}
        {view === "access" && <Access session={session} />}
        {view === "models" && <Models session={session} overview={fleet.overview} />}
        {view === "health" && <Health session={session} sampler={sampler} />}
      </main>
    </>
  );
}

function Live({ feed, state }: { feed: FleetFeed; state: FleetState }) {
  const told = state.isPaused ? text.live.paused : state.isConnected ? text.live.live : text.live.lost;
  return (
    <span class={`live ${state.isPaused ? "paused" : state.isConnected ? "on" : "lost"}`}>
      <span role="status">{told}</span>{" "}
      <button type="button" onClick={() => feed.pause(!state.isPaused)}>
        {state.isPaused ? text.live.resume : text.live.pause}
      </button>
    </span>
  );
}

function changeTheme(): void {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem(THEME, root.dataset.theme);
  } catch {
    // it lasts until the page is closed
  }
}

try {
  const theme = localStorage.getItem(THEME);
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // the system's theme it is
}
render(<App />, document.getElementById("app")!);
