import { useEffect, useState } from "preact/hooks";
import { Plot } from "../plot";
import { difference, ratio, total, type Sampler } from "../metrics";
import { text } from "../strings";
import type { Session } from "../types";
import { Problem } from "../ui";

export function Health({ session, sampler }: { session: Session; sampler: Sampler }) {
  const [, redraw] = useState(0);
  useEffect(() => sampler.listen(() => redraw((count) => count + 1)), [sampler]);
  const samples = sampler.samples;
  const times = samples.slice(1).map((sample) => sample.at);
  const pairs = samples.slice(1).map((now, place) => ({ now, before: samples[place]! }));
  const rates = (name: string, perS: number, where?: (labels: string) => boolean) =>
    pairs.map(({ now, before }) => (difference(now.figures, before.figures, name, where) / (now.at - before.at)) * perS);
  const plots = [
    { label: text.health.calls, values: rates("paddock_requests_total", 60) },
    { label: text.health.failures, values: rates("paddock_requests_total", 60, (labels) => !/outcome="(ok|client_gone|cancelled)"/.test(labels)) },
    {
      label: text.health.ttft,
      values: pairs.map(({ now, before }) => ratio(now.figures, before.figures, "paddock_ttft_seconds")),
    },
    { label: text.health.waiting, values: pairs.map(({ now }) => total(now.figures, "paddock_queue_length")) },
    { label: text.health.tokens, values: rates("paddock_generated_tokens_total", 1) },
    {
      label: text.health.lag,
      values: pairs.map(({ now, before }) => {
        const found = ratio(now.figures, before.figures, "paddock_loop_lag_seconds");
        return found === null ? null : 1000 * found;
      }),
    },
  ];
  return (
    <>
      <p class="quiet">{text.health.here}</p>
      <Problem error={sampler.isOff ? text.health.off : null} />
      <section class="cards">
        {plots.map((plot) => (
          <div class="card wide" key={plot.label}>
            <Plot label={plot.label} times={times} series={[{ label: plot.label, values: plot.values }]} />
          </div>
        ))}
      </section>
      {Object.keys(session.links).length > 0 && (
        <>
          <h2>{text.health.links}</h2>
          <ul>
            {Object.entries(session.links).map(([name, address]) => (
              <li key={name}>
                <a href={address} rel="noreferrer">
                  {name}
                </a>
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}
