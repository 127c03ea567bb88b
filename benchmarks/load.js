// The chat load of `headrace bench serve --rate`, for k6: open loop, arrivals at a constant rate.
//
// Run: k6 run -e KEY=... -e URL=http://127.0.0.1:8080 -e RATE=20 -e DURATION=60s benchmarks/load.js
//      MODEL, PROMPT_WORDS and OUTPUT_TOKENS change the load; STREAM=0 asks for whole replies.
//
// Plain k6 reads a reply whole, so that time to first token is seen as the time to the first byte (`waiting`), which
// for a stream is when the server began to answer; times between tokens need `headrace bench serve`.
// A constant-arrival-rate executor starts requests on time as long as it has idle VUs: watch `dropped_iterations`,
// which must be 0, or raise VUS.

import http from "k6/http";
import { check } from "k6";
import { Counter, Trend } from "k6/metrics";

const url = __ENV.URL || "http://127.0.0.1:8080";
const streamed = __ENV.STREAM !== "0";
const promptWords = Number(__ENV.PROMPT_WORDS || 80);
const outputTokens = Number(__ENV.OUTPUT_TOKENS || 50);
const words =
  "the of and to in is was for on that by this with you it not people water year work day way part place case".split(" ");

export const options = {
  scenarios: {
    chat: {
      executor: "constant-arrival-rate",
      rate: Number(__ENV.RATE || 10),
      timeUnit: "1s",
      duration: __ENV.DURATION || "60s",
      preAllocatedVUs: Number(__ENV.VUS || 200),
    },
  },
  thresholds: {
    checks: ["rate==1"],
    dropped_iterations: ["count==0"],
  },
  summaryTrendStats: ["med", "p(90)", "p(95)", "p(99)", "max"],
};

const firstByte = new Trend("first_byte", true);
const outputCount = new Counter("output_tokens");

function prompt() {
  const chosen = [];
  for (let i = 0; i < promptWords; i++) {
    chosen.push(words[Math.floor(Math.random() * words.length)]);
  }
  return chosen.join(" ");
}

// Frames of a stream, or the whole reply as one.
function frames(reply) {
  if (!streamed) {
    return [reply.json()];
  }
  return reply.body
    .split("\n")
    .filter((line) => line.startsWith("data: ") && line !== "data: [DONE]")
    .map((line) => JSON.parse(line.slice(6)));
}

export default function () {
  const body = {
    model: __ENV.MODEL || "default",
    messages: [{ role: "user", content: prompt() }],
    max_tokens: outputTokens,
    seed: Math.floor(Math.random() * 2 ** 31),
    ignore_eos: true,
  };
  if (streamed) {
    body.stream = true;
    body.stream_options = { include_usage: true };
  }
  const reply = http.post(`${url}/v1/chat/completions`, JSON.stringify(body), {
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${__ENV.KEY || ""}` },
    timeout: "600s",
  });
  if (!check(reply, { "status is 200": (r) => r.status === 200 })) {
    return;
  }
  firstByte.add(reply.timings.waiting);
  const all = frames(reply);
  const finishes = all.flatMap((frame) => frame.choices || []).filter((choice) => choice.finish_reason);
  const usage = all.map((frame) => frame.usage).find((each) => each);
  outputCount.add(usage ? usage.completion_tokens : 0);
  check(reply, {
    "exactly one end": () => finishes.length === 1 && !all.some((frame) => frame.error),
    "ends with [DONE]": (r) => !streamed || r.body.trimEnd().endsWith("data: [DONE]"),
  });
}
