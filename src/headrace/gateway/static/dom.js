// Builds elements. Text goes in as text nodes: nothing here parses markup.

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "click") element.addEventListener("click", value);
    else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children); // a string becomes a text node
  return element;
}

export function button(words, click, properties = {}) {
  return make("button", { type: "button", click, ...properties }, words);
}

export function milliseconds(seconds) {
  const ms = seconds * 1000;
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  if (ms >= 10) return `${Math.round(ms)} ms`;
  return `${ms.toFixed(1)} ms`;
}

// Pages that came over plain HTTP from another machine have no clipboard object.
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not permitted: the older way may still be.
    }
  }
  const area = make("textarea", { value: text, class: "unseen", readOnly: true });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function copyButton(words, text) {
  const it = button(words, async () => {
    it.textContent = (await copy(text())) ? "Copied" : "Could not copy";
    setTimeout(() => (it.textContent = words), 1500);
  });
  return it;
}
