// The page: wires key, settings, conversation and composer to the API. Owns the conversation, which lives in this tab.

import { Api, Problem } from "./api.js";
import { make } from "./dom.js";
import { KeyDialog, storedKey, takeKeyFromAddress } from "./key.js";
import { notice } from "./notice.js";
import { Reply } from "./reply.js";
import { Settings } from "./settings.js";

const at = (id) => document.getElementById(id);
// The server files an explanation when the last byte was taken: a moment after this page saw it.
const EXPLAIN_AFTER_MS = [80, 300, 1000];
const NEAR_END_PX = 80;

class Chat {
  #turns = []; // {question, reply: Reply | null, element}
  #stopper = null; // of the reply that streams now
  #isFollowing = true;
  #settings = new Settings();
  #keyDialog = new KeyDialog((key) => this.#useKey(key));
  #api = new Api(storedKey());
  #models = Promise.resolve(); // settles when the list of models is here, or is not to be had

  start() {
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("question").addEventListener("input", () => this.#fitQuestion());
    at("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    at("stop").addEventListener("click", () => this.#stop());
    at("new-chat").addEventListener("click", () => this.#clear());
    at("change-key").addEventListener("click", () => this.#keyDialog.ask());
    at("latest").addEventListener("click", () => this.#follow(true));
    document.addEventListener("keydown", (event) => this.#onEscape(event));
    document.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    new ResizeObserver(() => this.#follow(this.#isFollowing)).observe(at("conversation"));
    window.addEventListener("hashchange", () => this.#begin());
    this.#begin();
  }

  #begin() {
    const key = takeKeyFromAddress() || this.#api.key;
    if (key) this.#useKey(key);
    else this.#keyDialog.ask();
  }

  #useKey(key) {
    this.#api.key = key;
    this.#models = this.#loadModels();
    at("question").focus();
  }

  // Shows the list of models; the problem, where there is one.
  async #loadModels() {
    at("banner").replaceChildren();
    try {
      this.#settings.showModels(await this.#api.models());
      return null;
    } catch (error) {
      const problem = asProblem(error);
      if (problem.status === 401) this.#keyDialog.ask(problem.words);
      else at("banner").replaceChildren(notice(problem, () => this.#useKey(this.#api.key)));
      return problem;
    }
  }

  async #modelIsKnown() {
    await this.#models;
    if (this.#settings.model) return;
    const problem = await (this.#models = this.#loadModels());
    if (problem) throw problem;
    if (!this.#settings.model) throw new Problem("The server has no model ready yet.");
  }

  #send() {
    const question = at("question").value;
    if (this.#stopper || !question.trim()) return;
    if (!this.#api.key) return this.#keyDialog.ask();
    at("question").value = "";
    this.#fitQuestion();
    at("welcome").hidden = true;
    const asked = make("article", { class: "question", "aria-label": "You", dir: "auto" }, question);
    const turn = { question, reply: null, element: make("section", { class: "turn" }, asked) };
    this.#turns.push(turn);
    at("conversation").append(turn.element);
    this.#follow(true);
    this.#answer(turn);
  }

  async #answer(turn) {
    const again = () => !this.#stopper && turn === this.#turns.at(-1) && this.#answer(turn);
    const messages = this.#messagesUpTo(turn);
    turn.reply?.element.remove();
    const reply = (turn.reply = new Reply(again));
    turn.element.append(reply.element);
    const stopper = new AbortController();
    this.#setStopper(stopper);
    at("status").textContent = "The reply has begun.";
    let requestId = null;
    try {
      await this.#modelIsKnown();
      const answer = await this.#api.chat(this.#settings.request(messages), stopper.signal);
      requestId = answer.requestId;
      const { finish, tokens } = await pour(answer.events, reply);
      reply.end(finish, tokens);
      at("status").textContent = "The reply has ended.";
    } catch (error) {
      if (error.name === "AbortError") {
        reply.end("stopped", null);
        at("status").textContent = "The reply was stopped.";
      } else {
        const problem = asProblem(error);
        reply.fail(problem, again);
        if (problem.status === 401) this.#keyDialog.ask(problem.words);
      }
    }
    if (this.#stopper === stopper) this.#setStopper(null);
    if (requestId) await this.#explain(requestId, reply);
  }

  async #explain(requestId, reply) {
    for (const delayMs of EXPLAIN_AFTER_MS) {
      await new Promise((resolve) => setTimeout(resolve, delayMs));
      if (!reply.element.isConnected) return;
      const explanation = await this.#api.explain(requestId);
      if (explanation) return reply.showStages(explanation);
    }
  }

  // A turn that got no answer is not part of what is said next.
  #messagesUpTo(last) {
    const messages = [];
    for (const turn of this.#turns) {
      if (turn === last) break;
      const { question, reply } = turn;
      if (reply?.text) messages.push({ role: "user", content: question }, { role: "assistant", content: reply.text });
    }
    return [...messages, { role: "user", content: last.question }];
  }

  #stop() {
    this.#stopper?.abort();
    at("question").focus();
  }

  #clear() {
    this.#stop();
    this.#turns = [];
    at("conversation").replaceChildren();
    at("welcome").hidden = false;
    at("question").focus();
  }

  #setStopper(stopper) {
    const hadFocus = document.activeElement === at("stop") || document.activeElement === at("send");
    this.#stopper = stopper;
    at("send").hidden = Boolean(stopper);
    at("stop").hidden = !stopper;
    if (hadFocus) at("question").focus();
  }

  #onEscape(event) {
    if (event.key !== "Escape" || event.isComposing || this.#keyDialog.isOpen) return;
    if (this.#stopper) this.#stop();
    else if (this.#settings.isOpen) this.#settings.close();
  }

  #fitQuestion() {
    const area = at("question");
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  }

  #noticeScroll() {
    const { scrollTop, scrollHeight, clientHeight } = document.scrollingElement;
    this.#isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    at("latest").hidden = this.#isFollowing;
  }

  #follow(isWanted) {
    if (isWanted) document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
  }
}

// Pours the chunks of a stream into a reply; how it ended and how many tokens the server counted.
async function pour(events, reply) {
  let finish = null;
  let tokens = null;
  for await (const chunk of events) {
    tokens = chunk.usage?.completion_tokens ?? tokens;
    for (const { delta, finish_reason: reason } of chunk.choices ?? []) {
      const thought = delta?.reasoning ?? delta?.reasoning_content;
      if (thought) reply.appendThought(thought);
      if (delta?.content) reply.append(delta.content);
      finish = reason ?? finish;
    }
  }
  return { finish, tokens };
}

function asProblem(error) {
  return error instanceof Problem ? error : new Problem("This page failed.", { message: String(error) });
}

new Chat().start();
