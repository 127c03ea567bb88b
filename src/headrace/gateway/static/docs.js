// Draws the OpenAPI document. Everything goes in as text: nothing of it is parsed as markup.

const MAX_DEPTH = 6;

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// `Words` between backticks as code.
function prose(className, text) {
  const parts = text.replace(/\s+/g, " ").split("`");
  return make("p", { className }, ...parts.map((part, index) => (index % 2 ? make("code", {}, part) : part)));
}

function resolve(api, schema) {
  const name = schema.$ref?.split("/").pop();
  return name ? { name, ...api.components.schemas[name] } : schema;
}

function bounds(schema) {
  const said = [];
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low !== undefined && high !== undefined) said.push(`${low} to ${high}`);
  else if (low !== undefined) said.push(`from ${low}`);
  else if (high !== undefined) said.push(`to ${high}`);
  if (schema.maxLength !== undefined) said.push(`up to ${schema.maxLength} characters`);
  if (schema.maxItems !== undefined) said.push(`up to ${schema.maxItems}`);
  return said.length ? ` (${said.join(", ")})` : "";
}

// A type in words: "array of integer (up to 64)", "TextPart or string".
function words(schema, depth = 0) {
  if (!schema || depth > MAX_DEPTH) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) {
    const kinds = schema.anyOf.filter((kind) => kind.type !== "null");
    return [...new Set(kinds.map((kind) => words(kind, depth + 1)))].join(" or ");
  }
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${words(schema.items, depth + 1)}${bounds(schema)}`;
  return `${schema.type ?? "any"}${bounds(schema)}`;
}

function fields(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).sort(
    ([first], [second]) => required.has(second) - required.has(first),
  );
  const body = make("tbody");
  for (const [name, field] of rows) {
    const kind = make("td", {}, words(field));
    if (required.has(name)) kind.append(make("span", { className: "note" }, " · required"));
    else if (field.default !== undefined && field.default !== null) {
      kind.append(make("span", { className: "note" }, ` · default ${JSON.stringify(field.default)}`));
    }
    body.append(make("tr", {}, make("td", {}, make("code", {}, name)), kind));
  }
  return make("table", {}, body);
}

// Every type that is named below a schema, once.
function named(api, schema, found = new Map()) {
  if (!schema || typeof schema !== "object") return found;
  const name = typeof schema.$ref === "string" ? schema.$ref.split("/").pop() : null;
  if (name) {
    if (!found.has(name)) {
      found.set(name, api.components.schemas[name]);
      named(api, api.components.schemas[name], found);
    }
    return found;
  }
  for (const part of Object.values(schema)) named(api, part, found);
  return found;
}

function shape(api, title, reference, open) {
  const schema = resolve(api, reference);
  const details = make("details", { open }, make("summary", {}, `${title}: ${schema.name ?? words(schema)}`));
  if (schema.description) details.append(prose("note", schema.description));
  details.append(fields(schema));
  const others = named(api, reference);
  others.delete(schema.name);
  for (const [name, other] of others) {
    const inner = make("details", {}, make("summary", {}, name));
    if (other.description) inner.append(prose("note", other.description));
    inner.append(fields(other));
    details.append(inner);
  }
  return details;
}

function curl(path, method, operation) {
  const content = operation.requestBody?.content["application/json"];
  const lines = [`curl ${location.origin}${path.replace(/\{(\w+)\}/g, "$$$1")}`];
  if (content?.example?.stream) lines[0] = lines[0].replace("curl", "curl -N");
  if (method !== "get" && !content) lines.push(`-X ${method.toUpperCase()}`);
  if (operation.security.length) lines.push('-H "Authorization: Bearer $HEADRACE_API_KEY"');
  if (content) {
    lines.push("-H 'Content-Type: application/json'");
    lines.push(`-d '${JSON.stringify(content.example ?? {})}'`);
  }
  return lines.join(" \\\n  ");
}

function copyable(text) {
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard?.writeText(text);
    button.textContent = "Copied";
  });
  return make("div", { className: "code" }, make("pre", {}, text), button);
}

function route(api, path, method, operation) {
  const title = make("h3", {}, path);
  const line = make("div", { className: "line" }, make("span", { className: "method" }, method.toUpperCase()), title);
  if (!operation.security.length) line.append(make("span", { className: "note" }, "no key needed"));
  const article = make("article", { id: operation.operationId }, line, make("p", {}, operation.summary));
  if (operation.description) article.append(prose("note", operation.description));
  article.append(copyable(curl(path, method, operation)));
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) article.append(shape(api, "Body", body, false));
  const reply = operation.responses["200"].content ?? {};
  if (reply["application/json"]) article.append(shape(api, "Reply", reply["application/json"].schema, false));
  if (reply["text/event-stream"]) {
    article.append(make("p", { className: "note" }, "With stream: server-sent events, each with an id; the last is [DONE]."));
  }
  return article;
}

function draw(api) {
  document.getElementById("version").textContent = api.info.version;
  document.getElementById("about").replaceChildren(...prose("", api.info.description).childNodes);
  const tags = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      tags.set(tag, [...(tags.get(tag) ?? []), [path, method, operation]]);
    }
  }
  const contents = document.getElementById("contents");
  const routes = document.getElementById("routes");
  for (const [tag, list] of tags) {
    contents.append(make("strong", {}, tag));
    routes.append(make("h2", {}, tag));
    for (const [path, method, operation] of list) {
      contents.append(make("a", { href: `#${operation.operationId}` }, path));
      routes.append(route(api, path, method, operation));
    }
  }
  const error = api.components.schemas.ErrorObject;
  routes.append(make("h2", {}, "Errors"), make("article", {}, make("p", {}, 'Every refusal is {"error": …} with:'), fields(error)));
}

try {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  draw(await answer.json());
} catch (error) {
  document.getElementById("about").textContent = `The document could not be read: ${error.message}`;
}
