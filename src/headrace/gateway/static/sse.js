// Server-sent events out of a stream of bytes. Knows the format, not what the events say.

export async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream has nothing left to cancel
  }
}

export class EventParser {
  #rest = "";
  #data = [];

  // The data of every event that `text` completes. An event that never ends is no event.
  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/); // a last \r may be half of \r\n
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line === "data" || line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return events;
  }
}
