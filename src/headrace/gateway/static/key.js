// The API key: taken from the address once, asked for once, kept in this tab's session storage, never in an address.

const STORED = "headrace.key";

export function storedKey() {
  return sessionStorage.getItem(STORED) ?? "";
}

// The key of a `#key=...` address. The address loses it at once, and so does the history.
export function takeKeyFromAddress() {
  const found = /^#key=(.*)$/.exec(location.hash);
  if (!found) return "";
  history.replaceState(null, "", location.pathname + location.search);
  return keep(decoded(found[1]));
}

export class KeyDialog {
  #dialog = document.getElementById("key-dialog");
  #input = document.getElementById("key");
  #problem = document.getElementById("key-problem");

  constructor(use) {
    document.getElementById("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = keep(this.#input.value);
      this.#problem.textContent = key ? "" : "That cannot be a key: a key has letters, digits and signs, no spaces.";
      if (!key) return;
      this.#input.value = "";
      this.#dialog.close();
      use(key);
    });
    document.getElementById("key-cancel").addEventListener("click", () => this.#dialog.close());
  }

  get isOpen() {
    return this.#dialog.open;
  }

  ask(problem = "") {
    this.#problem.textContent = problem;
    if (!this.isOpen) this.#dialog.showModal();
    this.#input.focus();
  }
}

function keep(text) {
  const key = text.trim();
  if (!/^[\x21-\x7e]{1,512}$/.test(key)) return ""; // nothing else can be sent in a header
  sessionStorage.setItem(STORED, key);
  return key;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
