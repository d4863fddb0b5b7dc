// Writes the code that makes a call: for a shell, for Python, for JavaScript.

export const languages = ["curl", "Python", "JavaScript"] as const;
export type Language = (typeof languages)[number];

export function snippet(language: Language, origin: string, body: Record<string, unknown>): string {
  switch (language) {
    case "curl":
      return [
        `curl ${origin}/v1/chat/completions \\`,
        `  -H "Authorization: Bearer $PADDOCK_API_KEY" -H "Content-Type: application/json" \\`,
        `  -d ${quoted(JSON.stringify(body))}`,
      ].join("\n");
    case "Python":
      return [
        "import os",
        "from openai import OpenAI",
        "",
        `client = OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ["PADDOCK_API_KEY"])`,
        `answer = client.chat.completions.create(**${python(body)})`,
        "print(answer.choices[0].message.content)",
      ].join("\n");
    case "JavaScript":
      return [
        'import OpenAI from "openai";',
        "",
        `const client = new OpenAI({ baseURL: ${JSON.stringify(`${origin}/v1`)}, apiKey: process.env.PADDOCK_API_KEY });`,
        `const answer = await client.chat.completions.create(${JSON.stringify(body, null, 2)});`,
        "console.log(answer.choices[0].message.content);",
      ].join("\n");
  }
}

function quoted(word: string): string {
  return `'${word.replaceAll("'", `'\\''`)}'`;
}

function python(value: unknown, indent = ""): string {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  const deeper = `${indent}    `;
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((item) => `${deeper}${python(item, deeper)},\n`).join("")}${indent}]` : "[]";
  }
  if (typeof value === "object") {
    const fields = Object.entries(value as object);
    return `{\n${fields.map(([name, item]) => `${deeper}${JSON.stringify(name)}: ${python(item, deeper)},\n`).join("")}${indent}}`;
  }
  return JSON.stringify(value);
}
