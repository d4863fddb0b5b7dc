// A plot over time. uPlot draws it on a canvas; the figures beside it are for those who do not see it.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { text } from "./strings";

export interface Series {
  label: string;
  values: (number | null)[];
}

function clock(moment: number): string {
  return new Date(moment * 1000).toTimeString().slice(0, moment % 60 ? 8 : 5);
}

const COLOURS = ["--accent", "--good", "--busy", "--bad"];
const HEIGHT = 160;

export function Plot(props: { label: string; times: number[]; series: Series[] }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const names = props.series.map((series) => series.label).join();
  const isEmpty = props.times.length < 2;
  useEffect(() => {
    const parent = place.current!;
    if (isEmpty) return;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--quiet");
    const axis = { stroke: ink, grid: { stroke: style.getPropertyValue("--line"), width: 1 }, ticks: { show: false } };
    plot.current = new uPlot(
      {
        width: parent.clientWidth || 300,
        height: HEIGHT,
        cursor: { drag: { x: false, y: false } },
        legend: { show: false },
        scales: { y: { range: (_, __, most) => [0, Math.max(1, most * 1.1)] } },
        axes: [{ ...axis, values: (_, moments) => moments.map(clock) }, { ...axis, size: 56 }],
        series: [
          {},
          ...props.series.map((series, number) => ({
            label: series.label,
            stroke: style.getPropertyValue(COLOURS[number % COLOURS.length]!),
            width: 2,
            points: { show: false },
          })),
        ],
      },
      [props.times, ...props.series.map((series) => series.values)] as uPlot.AlignedData,
      parent,
    );
    const resized = new ResizeObserver(() =>
      plot.current?.setSize({ width: parent.clientWidth || 300, height: HEIGHT }),
    );
    resized.observe(parent);
    return () => {
      resized.disconnect();
      plot.current?.destroy();
    };
  }, [names, isEmpty]);
  useEffect(() => {
    plot.current?.setData([props.times, ...props.series.map((series) => series.values)] as uPlot.AlignedData);
  });
  const latest = props.series.map((series) => `${series.label} ${series.values.at(-1) ?? "?"}`).join(", ");
  return (
    <figure>
      <figcaption>
        {props.series.length === 1
          ? props.label
          : props.series.map((series, place) => (
              <span key={series.label} class={`ink-${place}`}>
                ■ {series.label}{" "}
              </span>
            ))}
      </figcaption>
      <div ref={place} class="plot" role="img" aria-label={`${props.label}: ${isEmpty ? text.plot.collecting : latest}`}>
        {isEmpty && <p class="quiet">{text.plot.collecting}</p>}
      </div>
    </figure>
  );
}
