// Runs the steps of a program's script, each by itself: what one is refused, the next one still sends.

export const URL_ = process.env.PADDOCK_URL;
export const KEY = process.env.PADDOCK_KEY;
export const V1 = `${URL_}/v1`;
export const CHAT = "paddock-demo";
export const EMBEDDER = "embedder";
export const WHO = "Who are you?";
export const WEATHER = "What is the weather in Paris?";
export const PERSON = "Anna is 31 years old. Answer as JSON with the keys name and age.";
export const RESULT = "sunny, 21 degrees";

// `child` is a server of the program's own, which is stopped at the end.
export async function run(steps, child) {
  let failed = 0;
  for (const [name, step] of Object.entries(steps)) {
    try {
      await step();
    } catch (error) {
      failed += 1;
      console.error(`${name}: ${error?.name}: ${String(error?.message).slice(0, 300)}`);
    }
  }
  child?.kill();
  process.exit(failed ? 1 : 0);
}

export async function drain(stream) {
  for await (const _ of stream);
}
