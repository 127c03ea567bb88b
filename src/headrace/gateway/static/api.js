// The server's API as this page uses it, and its refusals in plain words. Draws nothing.

import { serverEvents } from "./sse.js";

export class Problem extends Error {
  // `words` say what happened, `message` is the server's own sentence or empty.
  constructor(words, { message = "", status = 0, retryAfterS = null } = {}) {
    super(message);
    this.words = words;
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

const WORDS = {
  400: "The server could not use this request.",
  401: "The key was not accepted.",
  402: "The budget of this key is used up.",
  403: "This key may not do that.",
  404: "The server does not have what was asked for.",
  408: "The request took too long to arrive.",
  413: "The message is too long.",
  429: "Too many requests for now.",
  500: "The server failed on this request.",
  502: "A server on the way did not answer.",
  503: "The server is busy or not ready.",
  504: "The server ran out of time.",
};

export class Api {
  constructor(key) {
    this.key = key;
  }

  async models() {
    const answer = await this.#fetch("/v1/models");
    const { data } = await read(answer);
    return data;
  }

  // {requestId, events}: each event is a parsed chunk; the generator returns at [DONE], throws when the stream breaks.
  async chat(body, signal) {
    const answer = await this.#fetch("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      headers: { "content-type": "application/json", "x-headrace-on-disconnect": "cancel" },
      signal,
    });
    if (!(answer.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
      throw new Problem("The server answered with something that is not a stream.");
    }
    return { requestId: answer.headers.get("x-request-id"), events: chunks(answer.body) };
  }

  // Where the time of a request went; null when the server does not know it (yet).
  async explain(requestId) {
    try {
      return await read(await this.#fetch(`/v1/requests/${encodeURIComponent(requestId)}/explain`));
    } catch (problem) {
      if (problem instanceof Problem) return null;
      throw problem;
    }
  }

  async #fetch(path, { headers = {}, ...options } = {}) {
    let answer;
    try {
      answer = await fetch(path, {
        ...options,
        headers: { ...headers, authorization: `Bearer ${this.key}` },
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server cannot be reached.");
    }
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }
}

async function* chunks(body) {
  let chunk;
  try {
    for await (const data of serverEvents(body)) {
      if (data === "[DONE]") return;
      chunk = JSON.parse(data);
      if (chunk.error) break;
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The connection was lost before the reply ended.");
  }
  if (chunk?.error) throw new Problem("The reply broke off.", { message: String(chunk.error.message ?? "") });
  throw new Problem("The connection was lost before the reply ended.");
}

async function read(answer) {
  try {
    return await answer.json();
  } catch {
    throw new Problem("The server's answer could not be read.");
  }
}

async function refusal(answer) {
  let message = "";
  try {
    message = String((await answer.json()).error.message ?? "");
  } catch {
    // Not ours: a proxy's page, or nothing. The status says enough.
  }
  const words = WORDS[answer.status] ?? `The server refused the request (${answer.status}).`;
  return new Problem(words, { message, status: answer.status, retryAfterS: retryAfterS(answer.headers) });
}

function retryAfterS(headers) {
  const ms = headers.get("retry-after-ms");
  if (ms && Number.isFinite(Number(ms))) return Math.max(0, Number(ms) / 1000);
  const after = headers.get("retry-after");
  if (!after) return null;
  const seconds = Number.isFinite(Number(after)) ? Number(after) : (Date.parse(after) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}
