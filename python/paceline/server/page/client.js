// Talks to the server, and puts the text of an output together from its chunks.

let apiKey = "";

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Sends a request; `body` makes it a POST. The path is relative, since a proxy may put the page below
// another one. Throws ApiError unless it succeeds.
async function request(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ApiError(response.status, answer?.error?.message ?? `status ${response.status}`);
}

// The events of a stream, up to the one that ends it.
async function* eventsOf(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(500, parsed.error.message);
      yield parsed;
    }
  }
}

// The text of one output, token by token. A token's text begins at its offset, in characters; text
// that the server held back comes with a later chunk, and still belongs to its own token.
class TokenText {
  constructor() {
    this.sources = [];
    this.ids = [];
    this.offsets = [];
    this.counts = { accepted: 0, corrected: 0, bonus: 0, plain: 0 };
    this.index = -1; // of the token that the last text belongs to
    this.length = 0; // characters so far
  }

  // Adds a choice of a chunk. Returns its text in pieces {index, text}, one for each token.
  push(choice) {
    this.sources.push(...choice.token_sources);
    for (const source of choice.token_sources) this.counts[source] += 1;
    this.ids.push(...choice.token_ids);
    this.offsets.push(...choice.text_offsets);
    const characters = [...(choice.text ?? choice.delta?.content ?? "")];
    const first = this.length;
    const end = first + characters.length;
    const pieces = [];
    for (let start = first; start < end; ) {
      while (this.offsets[this.index + 1] <= start) this.index += 1;
      const stop = Math.min(end, this.offsets[this.index + 1] ?? end);
      const text = characters.slice(start - first, stop - first).join("");
      pieces.push({ index: this.index, text });
      start = stop;
    }
    this.length = end;
    return pieces;
  }
}
