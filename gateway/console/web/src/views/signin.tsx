import { useState } from "preact/hooks";
import { post } from "../api";
import { text } from "../strings";
import type { Session } from "../types";
import { Field, Problem } from "../ui";

export function SignIn(props: { hasEnded: boolean; hasSignOn: boolean; onSignedIn: (session: Session) => void }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState<unknown>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    post<Session>("/ui/session", { key: key.trim() }).then(props.onSignedIn, (problem) => {
      setKey("");
      setError(problem);
    });
  };
  return (
    <main class="narrow" id="content">
      <h1>{text.title}</h1>
      <form class="card" onSubmit={submit}>
        <h2>{text.signIn.heading}</h2>
        {props.hasEnded && <p>{text.signIn.ended}</p>}
        <p class="quiet">{text.signIn.about}</p>
        <Field label={text.signIn.key} hint={text.signIn.where}>
          <input
            type="password"
            name="key"
            autocomplete="current-password"
            required
            value={key}
            onInput={(event) => setKey(event.currentTarget.value)}
          />
        </Field>
        <Problem error={error} />
        <div class="row end">
          {props.hasSignOn && <a href="/auth/login?return_to=/ui">{text.signIn.byProvider}</a>}
          <button type="submit" class="main">
            {text.signIn.go}
          </button>
        </div>
      </form>
    </main>
  );
}
