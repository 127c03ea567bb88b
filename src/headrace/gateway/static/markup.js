// A reply's text as it grows: paragraphs, headings, lists, code fences, inline code, bold. Links and images stay text.
// Whole lines are drawn once and never again; only the unfinished line is redrawn, and when that is long, appended to.

import { copyButton, make } from "./dom.js";

const LONG_LINE = 1000;
const ENDLESS_LINE = 10_000; // marks in such a line are not looked for
const CODE_PART = 2000; // characters of code that are laid out together

const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/;
const HALF_FENCE = /^\s*(`{1,2}|~{1,2}|`{3,}[^`]*|~{3,}[^`]*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;

export class ReplyText {
  text = "";
  #root;
  #pending = "";
  #line = ""; // the unfinished line
  #block = null; // the open paragraph or list: {kind, element, into}
  #tail = null; // how the unfinished line is drawn: {nodes, text, drawn}
  #code = null; // the open fence: {mark, indent, into, part, drawn}
  #frame = 0;

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    this.text += text;
    this.#pending += text;
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  end() {
    this.#flush();
    if (this.#line) this.#commit();
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const lines = this.#pending.split("\n");
    this.#pending = "";
    lines.forEach((line, index) => {
      this.#line += line;
      if (index < lines.length - 1) this.#commit();
    });
    this.#drawTail();
  }

  #commit() {
    const line = this.#line.replace(/\r$/, "");
    this.#line = "";
    if (this.#code) return this.#commitCode(line);
    this.#retract();
    const fence = FENCE.exec(line);
    if (fence) return this.#openCode(fence);
    this.#block = this.#draw(line).block;
  }

  #drawTail() {
    if (this.#code) return this.#drawCodeTail();
    if (!this.#line) return;
    if (HALF_FENCE.test(this.#line)) return this.#retract();
    if (this.#tail?.text && this.#line.length > LONG_LINE) {
      this.#tail.text.appendData(this.#line.slice(this.#tail.drawn));
    } else {
      this.#retract();
      const isLong = this.#line.length > LONG_LINE;
      this.#tail = this.#draw(this.#line, isLong);
    }
    this.#tail.drawn = this.#line.length;
  }

  #retract() {
    for (const node of this.#tail?.nodes ?? []) node.remove();
    this.#tail = null;
  }

  // Draws a line at the end: the nodes that it added, the block that is open after it, and the text node that may grow.
  #draw(line, isPlain = line.length > ENDLESS_LINE) {
    if (!line.trim() || RULE.test(line)) {
      const nodes = line.trim() ? [make("hr")] : [];
      this.#root.append(...nodes);
      return { nodes, block: null };
    }
    const open = this.#block;
    const heading = HEADING.exec(line);
    const item = heading ? null : ITEM.exec(line);
    const content = inline(heading?.[1] ?? item?.[3] ?? line, isPlain);
    const text = isPlain ? content[0] : null;
    if (item) return { ...this.#drawItem(item, content), text };
    if (open && !heading && (open.kind === "paragraph" || /^\s/.test(line))) {
      const nodes = [document.createTextNode("\n"), ...content];
      open.into.append(...nodes);
      return { nodes, block: open, text };
    }
    const paragraph = make("p", { class: heading ? "heading" : "" }, ...content);
    this.#root.append(paragraph);
    const block = heading ? null : { kind: "paragraph", into: paragraph };
    return { nodes: [paragraph], block, text };
  }

  #drawItem([, indent, number], content) {
    const depth = Math.min(3, Math.floor(indent.length / 2));
    const kind = `${number ? "ol" : "ul"}${depth}`;
    const into = make("li", {}, ...content);
    if (number) into.value = Number(number);
    if (this.#block?.kind === kind) {
      this.#block.element.append(into);
      return { nodes: [into], block: { kind, element: this.#block.element, into } };
    }
    const element = make(number ? "ol" : "ul", { class: `depth-${depth}` }, into);
    this.#root.append(element);
    return { nodes: [element], block: { kind, element, into } };
  }

  #openCode([, indent, mark, language]) {
    const into = make("code");
    const bar = make("div", { class: "code-bar" }, make("span", {}, language.trim() || "code"));
    bar.append(copyButton("Copy", () => into.textContent.replace(/\n$/, "")));
    this.#root.append(make("div", { class: "code" }, bar, make("pre", { tabIndex: 0 }, into)));
    this.#block = null;
    this.#code = { mark, indent: indent.length, into, part: null, drawn: 0 };
  }

  #commitCode(line) {
    const { mark, drawn } = this.#code;
    const bare = line.trim();
    if (!drawn && bare.length >= mark.length && bare === mark[0].repeat(bare.length)) {
      this.#code = null;
      return;
    }
    this.#appendCode(`${this.#unindented(line).slice(drawn)}\n`);
    this.#code.drawn = 0;
    if (this.#code.part.length > CODE_PART) this.#code.part = null;
  }

  #drawCodeTail() {
    const { mark, drawn } = this.#code;
    const bare = this.#line.trim();
    if (!drawn && bare === mark[0].repeat(bare.length)) return; // spaces, or perhaps the closing fence
    const line = this.#unindented(this.#line.replace(/\r$/, ""));
    this.#appendCode(line.slice(drawn));
    this.#code.drawn = line.length;
  }

  #appendCode(text) {
    const code = this.#code;
    if (!code.part) {
      code.part = document.createTextNode("");
      code.into.append(make("span", { class: "code-part" }, code.part));
    }
    code.part.appendData(text);
  }

  #unindented(line) {
    const spaces = line.length - line.trimStart().length;
    return line.slice(Math.min(spaces, this.#code.indent));
  }
}

// Nodes for one line. A mark without a partner is plain text.
export function inline(text, isPlain = false, inBold = false) {
  if (isPlain) return [document.createTextNode(text)];
  const nodes = [];
  let from = 0; // where plain text begins that is not yet a node
  const lonely = new Set(); // marks that have no partner from here on
  const marks = inBold ? /`+/g : /`+|\*\*(?=\S)/g;
  for (let mark = marks.exec(text); mark; mark = marks.exec(text)) {
    const sign = mark[0];
    const begin = mark.index + sign.length;
    const end = lonely.has(sign) ? -1 : partner(text, sign, begin);
    if (end < 0) lonely.add(sign);
    if (end <= begin) continue;
    const inner = text.slice(begin, end);
    if (mark.index > from) nodes.push(document.createTextNode(text.slice(from, mark.index)));
    nodes.push(sign === "**" ? make("strong", {}, ...inline(inner, false, true)) : make("code", {}, inner));
    from = marks.lastIndex = end + sign.length;
  }
  if (from < text.length) nodes.push(document.createTextNode(text.slice(from)));
  return nodes;
}

// Backticks are closed by a run of the same length.
function partner(text, sign, begin) {
  let end = text.indexOf(sign, begin);
  while (end >= 0 && sign !== "**") {
    let after = end;
    while (text[after] === "`") after += 1;
    if (after - end === sign.length) break;
    end = text.indexOf(sign, after);
  }
  return end;
}
