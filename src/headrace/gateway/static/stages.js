// Where a reply's time went: a stacked bar, a legend of the large parts, a table of all. Stages sum to the whole.

import { make, milliseconds } from "./dom.js";

const MEANINGS = {
  receive: "the request arrives",
  authenticate: "the key is checked",
  admit: "limits are checked",
  tokenise: "text becomes tokens",
  route: "a worker is chosen",
  "wait:capacity": "waiting for a free place",
  "wait:fairness": "waiting while others have their share",
  "wait:linger": "waiting to share a batch",
  prefill: "the prompt is read",
  "prefill:others": "other prompts are read in the same steps",
  decode: "tokens are written",
  preempted: "set aside for others",
  transfer: "between worker and gateway",
  detokenise: "tokens become text",
  safety: "the text is checked",
  client: "the last bytes are taken",
};
const ORDER = Object.keys(MEANINGS);
const LARGE = 0.01; // share of the whole from which a stage is in the legend

// An element, or null where the explanation holds no time at all.
export function drawStages(explanation) {
  const stages = partsOf(explanation?.stages ?? {});
  const total = stages.reduce((sum, stage) => sum + stage.seconds, 0);
  if (!total) return null;
  const words = stages.map(({ name, seconds }) => `${name} ${milliseconds(seconds)}`);
  const bar = make("span", { class: "bar", role: "img", "aria-label": `Stages: ${words.join(", ")}` });
  for (const { name, seconds, look } of stages) {
    const part = make("span", { class: look, title: `${name} ${milliseconds(seconds)}` });
    part.style.flexGrow = seconds / total;
    bar.append(part);
  }
  const legend = make("span", { class: "legend" });
  for (const stage of stages.filter((one) => one.seconds >= LARGE * total)) {
    legend.append(make("span", { class: "key" }, make("span", { class: `swatch ${stage.look}` }), `${stage.name} ${milliseconds(stage.seconds)}`));
  }
  return make("details", { class: "stages" }, make("summary", { title: "Where the time went" }, bar, legend), table(stages, total));
}

function table(stages, total) {
  const rows = stages.map(({ name, seconds, look }) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, make("span", { class: `swatch ${look}` }), name),
      make("td", { class: "number" }, milliseconds(seconds)),
      make("td", {}, MEANINGS[name] ?? ""),
    ),
  );
  rows.push(make("tr", {}, make("th", { scope: "row" }, "together"), make("td", { class: "number" }, milliseconds(total)), make("td")));
  return make("table", {}, make("caption", { class: "unseen" }, "Stages of this reply"), make("tbody", {}, ...rows));
}

function partsOf(stages) {
  return Object.entries(stages)
    .filter(([, seconds]) => Number.isFinite(seconds) && seconds > 0)
    .map(([name, seconds]) => ({ name, seconds, look: `stage ${name in MEANINGS ? `stage-${name.replace(":", "-")}` : ""}` }))
    .sort((a, b) => place(a.name) - place(b.name));
}

function place(name) {
  const index = ORDER.indexOf(name);
  return index < 0 ? ORDER.length : index;
}
