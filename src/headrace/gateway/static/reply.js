// One reply on the page: its text, its figures, its stages, what went wrong. Asks the server nothing.

import { button, copyButton, make, milliseconds } from "./dom.js";
import { ReplyText } from "./markup.js";
import { notice } from "./notice.js";
import { drawStages } from "./stages.js";

const ENDINGS = {
  length: "The reply reached its limit of tokens.",
  content_filter: "The rest was withheld.",
  stopped: "Stopped.",
};
const FIGURES_MS = 250;

export class Reply {
  #begun = performance.now();
  #first = null;
  #last = null;
  #pieces = 0;
  #drawn = 0;
  #body = make("div", { class: "text", dir: "auto" });
  #figures = make("span", { class: "figures" });
  #foot;
  #copy = copyButton("Copy", () => this.text);
  #text = new ReplyText(this.#body);
  #thought = null;

  constructor(regenerate) {
    const again = button("Regenerate", regenerate, { class: "regenerate" });
    this.#foot = make("div", { class: "foot" }, this.#figures, make("span", { class: "actions" }, this.#copy, again));
    this.element = make("article", { class: "reply waiting", "aria-label": "Reply", "aria-busy": "true" }, this.#body, this.#foot);
  }

  get text() {
    return this.#text.text;
  }

  append(text) {
    this.#mark();
    this.#text.append(text);
  }

  appendThought(text) {
    this.#mark();
    if (!this.#thought) {
      this.#thought = document.createTextNode("");
      const body = make("div", { class: "thought-text", dir: "auto" }, this.#thought);
      this.#body.before(make("details", { class: "thought" }, make("summary", {}, "Thinking"), body));
    }
    this.#thought.appendData(text);
  }

  // `tokens` is the server's count, or null: then pieces stand for tokens and the figures say "about".
  end(finish, tokens) {
    this.#text.end();
    this.#showFigures(tokens);
    if (ENDINGS[finish]) this.#foot.before(make("p", { class: "note" }, ENDINGS[finish]));
    this.#settle();
  }

  fail(problem, again) {
    this.#text.end();
    this.#showFigures(null);
    this.#foot.before(notice(problem, again));
    this.element.classList.add("failed"); // the notice has its own way to ask again
    this.#settle();
  }

  showStages(explanation) {
    const drawn = drawStages(explanation);
    if (drawn) this.element.append(drawn);
  }

  #settle() {
    this.#copy.hidden = !this.text;
    this.element.classList.remove("waiting");
    this.element.setAttribute("aria-busy", "false");
  }

  #mark() {
    this.#last = performance.now();
    if (this.#first === null) {
      this.#first = this.#last;
      this.element.classList.remove("waiting");
    }
    this.#pieces += 1;
    if (this.#last - this.#drawn > FIGURES_MS) {
      this.#drawn = this.#last;
      this.#showFigures(null);
    }
  }

  #showFigures(counted) {
    const tokens = counted ?? this.#pieces;
    if (this.#first === null || !tokens) return;
    const about = counted === null ? "about " : "";
    const parts = [`${about}${tokens} ${tokens === 1 ? "token" : "tokens"}`];
    const streamedS = (this.#last - this.#first) / 1000;
    if (tokens > 1 && streamedS > 0) parts.push(`${about}${rate((tokens - 1) / streamedS)} tokens/s`);
    parts.push(`first after ${milliseconds((this.#first - this.#begun) / 1000)}`);
    this.#figures.textContent = parts.join(" · ");
  }
}

function rate(perSecond) {
  return perSecond.toFixed(perSecond < 100 ? 1 : 0);
}
