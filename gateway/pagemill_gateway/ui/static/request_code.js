// The playground's request as a command and as a program. Values are quoted, because prompts may contain anything.

/** Return text in single quotes for a POSIX shell. */
export function shellQuoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Return a value of JSON as an expression of Python. */
export function pythonValue(value, indent = "") {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (typeof value !== "object") return typeof value === "string" ? asciiJson(value) : String(value);
  const inner = `${indent}    `;
  const isList = Array.isArray(value);
  const parts = isList ? value.map((each) => pythonValue(each, inner))
    : Object.entries(value).map(([name, each]) => `${asciiJson(name)}: ${pythonValue(each, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.map((each) => `${inner}${each},\n`).join("")}${indent}${close}` : open + close;
}

/** Return a string's JSON in ASCII, which Python reads as the same string. */
function asciiJson(text) {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .replace(/\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})/g, (_, high, low) =>
      `\\U${(0x10000 + ((parseInt(high, 16) - 0xd800) << 10) + parseInt(low, 16) - 0xdc00).toString(16).padStart(8, "0")}`);
}

export function asCurl(origin, body, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  return `curl --no-buffer ${origin}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${shellQuoted(JSON.stringify(body))}`;
}

export function asPython(origin, body, needsKey) {
  const lines = Object.entries(body).map(([name, value]) => `    ${name}=${pythonValue(value, "    ")},\n`).join("");
  const output = body.stream
    ? 'for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="")\n'
    : "print(answer.choices[0].message)\n";
  const key = needsKey ? 'os.environ["API_KEY"]' : '"none"';
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key=${key})\n`
    + `answer = client.chat.completions.create(\n${lines})\n${output}`;
}
