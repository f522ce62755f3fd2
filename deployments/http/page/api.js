// The gateway as the page uses it: the same routes as any other client.

import { Kept } from "./storage.js";

export class ApiError extends Error {
  constructor(message, { status = 0, key = "" } = {}) {
    super(message);
    Object.assign(this, { status, key });
  }

  get isOfKey() {
    return this.status === 401 || this.status === 403;
  }
}

export const key = new Kept(() => sessionStorage, "hdserve-key");

async function call(path, options = {}) {
  const sent = key.get();
  const headers = { ...options.headers };
  if (sent) headers.authorization = `Bearer ${sent}`;
  const response = await fetch(path, { ...options, headers }).catch(() => {
    throw new ApiError("The server cannot be reached.");
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    const { status } = response;
    throw new ApiError(body?.error?.message ?? `The server answered ${status}.`, { status, key: sent });
  }
  return response;
}

export const getJson = async (path) => (await call(path)).json();
export const getText = async (path) => (await call(path)).text();
export const describe = (model) => getJson(`v1/models/${model.split("/").map(encodeURIComponent).join("/")}`);

// The chunks of a streamed chat; throws what the server reports in mid-stream, and when it ends too early.
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, include_sources: true },
    }),
    signal,
  });
  for await (const data of events(response.body)) {
    signal.throwIfAborted(); // what has arrived already is not shown either
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw brokenOff(); // as when a proxy gives up
}

const brokenOff = () => new ApiError("The answer broke off.");

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(() => {
        throw brokenOff();
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const SERIES = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// The series of `GET /metrics`: [{name, labels, value}].
export function parseMetrics(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SERIES.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value;
    found.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return found;
}
