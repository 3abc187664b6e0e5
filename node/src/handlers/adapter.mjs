// Serves a plain function as an agent: `agent.mjs` that exports `invoke(input, context)`.
// The function may be plain, async, a generator or an async generator; a generator streams.
// Standard library only.

import { createServer } from "node:http";
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const { invoke } = await import(pathToFileURL(resolve("agent.mjs")).href);
if (typeof invoke !== "function") {
  console.error("agent.mjs does not export a function `invoke(input, context)`");
  process.exit(1);
}
const running = new Map();

const log = (level, msg, fields = {}) => console.log(JSON.stringify({ level, msg, ...fields }));

function sendJson(response, status, value) {
  const body = Buffer.from(JSON.stringify(value));
  response.writeHead(status, { "content-type": "application/json", "content-length": body.length });
  response.end(body);
}

const isStream = (value) =>
  value !== null && typeof value === "object" &&
  (typeof value[Symbol.asyncIterator] === "function" || typeof value.next === "function");

async function stream(response, items, requestId) {
  response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
  response.flushHeaders();
  const send = (event) => response.write(`data: ${JSON.stringify(event)}\n\n`);
  let usage = {};
  let stopped = false;
  let ended;
  const end = new Promise((resolve) => (ended = resolve));
  // Canceled is said when the call has ended, not when it was asked to.
  running.set(requestId, () => ((stopped = true), end));
  response.on("close", () => (stopped = true));
  try {
    for await (const item of items) {
      if (stopped) break;
      if (typeof item === "string") send({ type: "chunk", content: item });
      else if (item?.type === "chunk" || item?.type === "custom") send(item);
      else if (item?.usage && Object.keys(item).length === 1) usage = item.usage;
      else send({ type: "chunk", content: JSON.stringify(item) });
    }
    send({ type: "done", usage });
  } catch (error) {
    log("error", error?.stack ?? String(error), { request_id: requestId });
    send({ type: "error", code: error?.name ?? "Error", message: error?.message ?? String(error) });
  }
  response.end();
  ended();
}

async function answer(response, body) {
  let call;
  try {
    call = JSON.parse(body);
  } catch (error) {
    return sendJson(response, 400, { error: `not an invocation: ${error.message}` });
  }
  const requestId = call.context?.request_id;
  try {
    const result = await invoke(call.input, call.context);
    if (isStream(result)) return await stream(response, result, requestId);
    const keys = result && typeof result === "object" ? Object.keys(result) : [];
    const whole = keys.includes("output") && keys.every((key) => key === "output" || key === "usage");
    sendJson(response, 200, whole ? result : { output: result ?? null });
  } catch (error) {
    log("error", error?.stack ?? String(error), { request_id: requestId });
    sendJson(response, 500, { error: error?.name ?? "Error", message: error?.message ?? String(error) });
  } finally {
    running.delete(requestId);
  }
}

async function cancel(response, body) {
  let stop;
  try {
    stop = running.get(JSON.parse(body).request_id);
  } catch {
    stop = undefined;
  }
  await stop?.();
  sendJson(response, stop ? 200 : 404, { canceled: Boolean(stop) });
}

const server = createServer((request, response) => {
  const path = request.url.split("?", 1)[0];
  if (path === "/health") return sendJson(response, 200, { status: "ok" });
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    const body = Buffer.concat(parts).toString("utf8");
    if (request.method === "POST" && path === "/invoke") answer(response, body);
    else if (request.method === "POST" && path === "/invoke/cancel") cancel(response, body);
    else sendJson(response, 404, { error: "no such path" });
  });
});
server.keepAliveTimeout = 75_000;
server.listen(Number(process.env.PORT), process.env.ROOST_BIND ?? "127.0.0.1");
