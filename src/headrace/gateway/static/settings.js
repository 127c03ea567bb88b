// What the next request asks for besides the conversation: model, system prompt, temperature, length. Kept in this tab.

import { make } from "./dom.js";

const FIELDS = ["system", "temperature", "max-tokens"];

export class Settings {
  #drawer = document.getElementById("settings");
  #toggle = document.getElementById("settings-toggle");
  #model = document.getElementById("model");

  constructor() {
    this.#toggle.addEventListener("click", () => (this.isOpen ? this.close() : this.#open()));
    document.getElementById("settings-close").addEventListener("click", () => this.close());
    for (const input of [this.#model, ...FIELDS.map(field)]) {
      input.addEventListener("change", () => sessionStorage.setItem(`headrace.${input.id}`, input.value));
    }
    for (const name of FIELDS) field(name).value = sessionStorage.getItem(`headrace.${name}`) ?? field(name).defaultValue;
  }

  get isOpen() {
    return !this.#drawer.hidden;
  }

  get model() {
    return this.#model.value;
  }

  close() {
    this.#drawer.hidden = true;
    this.#toggle.setAttribute("aria-expanded", "false");
    this.#toggle.focus();
  }

  showModels(models) {
    const chosen = sessionStorage.getItem("headrace.model") ?? this.model;
    const options = models.map(({ id, max_model_len: length }) =>
      make("option", { value: id, title: length ? `${length} tokens of context` : "" }, id),
    );
    this.#model.replaceChildren(...options);
    if (models.some(({ id }) => id === chosen)) this.#model.value = chosen;
    this.#model.disabled = models.length === 0;
  }

  // The fields of a chat request. What is left empty is the server's choice; an invalid number is left out.
  request(messages) {
    const system = field("system").value.trim();
    const body = { model: this.model, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    const temperature = field("temperature");
    const most = field("max-tokens");
    if (temperature.value && temperature.validity.valid) body.temperature = temperature.valueAsNumber;
    if (most.value && most.validity.valid) body.max_tokens = most.valueAsNumber;
    return body;
  }

  #open() {
    this.#drawer.hidden = false;
    this.#toggle.setAttribute("aria-expanded", "true");
    field("system").focus();
  }
}

function field(id) {
  return document.getElementById(id);
}
