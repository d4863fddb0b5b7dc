// Writes numbers, sizes and times for people.

export function number(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
}

export function span(seconds: number): string {
  if (seconds >= 172800) return `${Math.round(seconds / 86400)} d`;
  if (seconds >= 7200) return `${Math.round(seconds / 3600)} h`;
  if (seconds >= 60) return `${Math.round(seconds / 60)} min`;
  return `${Math.max(0, seconds) < 10 ? Math.max(0, seconds).toFixed(1) : Math.round(seconds)} s`;
}

export function bytes(value: number): string {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]] as const) {
    if (value >= factor) return `${number(value / factor)} ${unit}`;
  }
  return `${value} bytes`;
}

export function time(at: number | null | undefined): string {
  return at ? new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ") + "Z" : "";
}

export function perSecond(millisecondsEach: number): string {
  return millisecondsEach ? `${number(1000 / millisecondsEach)} t/s` : "";
}
