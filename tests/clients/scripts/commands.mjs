// Runs a command of a program, and tells what it said if it failed.

import { spawnSync } from "node:child_process";

export function command(file, args, options = {}) {
  const done = spawnSync(file, args, { encoding: "utf8", stdio: ["ignore", "pipe", "pipe"], timeout: 240000, ...options });
  if (done.status !== 0) throw new Error(`${done.status} ${done.error ?? ""} ${done.stderr}${done.stdout}`.slice(-600));
  return done.stdout;
}
