// What the page does: it asks for the key, runs requests, and shows the figures of the server.

const POLL_MS = 1000;
const RATES = 60; // of the sparkline
const EXAMPLES = {
  completion: "def read_lines(path):\n",
  chat: "Write a Python function that reads the lines of a file.",
};

let k = 0; // drafts that the server makes in an iteration
let lastStats = null;
let ownPositions = null; // acceptance of the output that is shown
let running = null; // AbortController of the request that runs
let pollTimer = 0;
const rates = [];

// ---- one request --------------------------------------------------------------------------------

function modeOf(form) {
  return new FormData(form).get("mode");
}

function bodyOf(form) {
  const text = byId("prompt").value;
  const body = {
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    return_token_sources: true,
    // All text as the model writes it, so that each token is where its offset says.
    skip_special_tokens: false,
    speculative: { num_speculative_tokens: Number(byId("drafts").value) },
  };
  if (byId("seed").value !== "") body.seed = Number(byId("seed").value);
  if (modeOf(form) === "completion") return ["v1/completions", { ...body, prompt: text }];
  return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: text }] }];
}

function span(className, text) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}

// Shows an output while it grows.
class Run {
  constructor(mode, prompt, mostDrafts) {
    this.text = new TokenText();
    this.spans = []; // by token
    this.strip = new IterationStrip(mostDrafts + 1);
    this.mostDrafts = mostDrafts;
    this.numWindows = 0;
    this.numAccepted = Array(mostDrafts).fill(0); // windows by accepted position
    this.begun = performance.now();
    this.firstAt = null;
    this.output = byId("output");
    this.output.replaceChildren(...(mode === "completion" ? [span("prompt", prompt)] : []));
    this.output.setAttribute("aria-busy", "true");
    ownPositions = null;
    this.showFigures();
  }

  push(choice) {
    const { scrollHeight, scrollTop, clientHeight } = this.output;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
    for (const { index, text } of this.text.push(choice)) this.add(index, text);
    const sources = choice.token_sources;
    if (sources.length > 0) {
      this.firstAt ??= performance.now();
      this.strip.push(sources);
      this.countDrafts(sources);
      this.showFigures();
    }
    if (isAtEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  add(index, text) {
    const known = this.spans[index];
    if (known) {
      known.textContent += text;
      return;
    }
    const source = this.text.sources[index];
    const token = span(text.trim() === "" ? "token blank" : "token", text);
    token.dataset.source = source;
    token.title = `token ${index + 1}, id ${this.text.ids[index]}: ${source}`;
    this.spans[index] = token;
    this.output.append(token);
  }

  countDrafts(sources) {
    if (sources.at(-1) === "plain" || this.mostDrafts === 0) return;
    this.numWindows += 1;
    sources.forEach((source, i) => {
      if (source === "accepted") this.numAccepted[i] += 1;
    });
    ownPositions = this.numAccepted.map((count) => count / this.numWindows);
  }

  showFigures() {
    const total = this.text.sources.length;
    for (const [source, count] of Object.entries(this.text.counts)) {
      const shown = total > 0 ? `${number(count)} · ${percent(count / total)}` : "";
      byId("legend").querySelector(`[data-source=${source}] .count`).textContent = shown;
    }
    const seconds = (performance.now() - (this.firstAt ?? this.begun)) / 1000;
    if (this.firstAt) show("first-token", number(this.firstAt - this.begun), "ms");
    else show("first-token", "–");
    show("rate", total > 1 && seconds > 0 ? number(total / seconds) : "–");
    show("per-iteration", this.strip.count > 0 ? number(total / this.strip.count, 2) : "–");
    const drafted = this.numWindows * this.mostDrafts;
    show("share-accepted", percent(drafted > 0 ? this.text.counts.accepted / drafted : null));
    showPositions();
  }

  // The server's own figures take the place of those that the page has measured.
  finish(usage, metrics) {
    const total = usage.completion_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    byId("run-state").textContent =
      `${number(total)} tokens in ${number(metrics.total_time_ms / 1000, 2)} s, ` +
      `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens cached`;
    const { time_to_first_token_ms: first, tokens_per_second: rate } = metrics;
    if (first !== null) show("first-token", number(first, 1), "ms");
    if (rate !== null) show("rate", number(rate));
    const drafts = metrics.speculative_decoding;
    if (drafts === null) return;
    ownPositions = drafts.acceptance_per_position;
    show("share-accepted", percent(drafts.draft_acceptance_rate));
    showPositions();
  }
}

async function run(form) {
  const [path, body] = bodyOf(form);
  byId("run-error").textContent = "";
  byId("run-state").textContent = "Waiting";
  running = new AbortController();
  byId("run").textContent = "Stop";
  const mostDrafts = body.speculative.num_speculative_tokens;
  const shown = new Run(modeOf(form), byId("prompt").value, mostDrafts);
  try {
    const response = await request(path, { body, signal: running.signal });
    byId("run-state").textContent = "Running";
    for await (const event of eventsOf(response)) {
      if (event.choices.length > 0) shown.push(event.choices[0]);
      else shown.finish(event.usage, event.metrics);
    }
  } catch (error) {
    byId("run-state").textContent = error.name === "AbortError" ? "Stopped" : "";
    if (error.status === 401) askForKey("");
    else if (error.name !== "AbortError") byId("run-error").textContent = messageOf(error);
  } finally {
    running = null;
    byId("run").textContent = "Run";
    byId("output").removeAttribute("aria-busy");
  }
}

function messageOf(error) {
  return error instanceof ApiError ? error.message : "The server does not answer.";
}

// ---- the server ---------------------------------------------------------------------------------

function showPositions() {
  const all = lastStats?.speculative_decoding?.acceptance_per_position;
  if (all) drawPositions(ownPositions, all);
}

function showStats(stats) {
  if (lastStats !== null) {
    const seconds = stats.uptime_s - lastStats.uptime_s;
    const tokens = stats.num_output_tokens - lastStats.num_output_tokens;
    // A replica that has ended takes its counts with it.
    rates.push(seconds > 0 ? Math.max(tokens / seconds, 0) : 0);
    if (rates.length > RATES) rates.shift();
    show("server-rate", number(rates.at(-1)));
    drawRates(rates, RATES);
  }
  lastStats = stats;
  const { num_hit_tokens: hits, num_query_tokens: asked } = stats.prefix_cache;
  show("load", `${number(stats.num_running)}, ${number(stats.num_waiting)}`);
  show("prefix-hits", percent(asked > 0 ? hits / asked : null), `of ${number(asked)}`);
  show("kv-usage", percent(stats.kv_cache_usage));
  drawGroups(stats.kv_groups);
  drawRanks(stats.ranks);
  showPositions();
}

async function poll() {
  if (document.visibilityState === "visible") {
    try {
      showStats(await (await request("v1/stats")).json());
      byId("server-state").textContent = "";
    } catch (error) {
      if (error.status === 401) return askForKey("");
      byId("server-state").textContent = messageOf(error);
    }
  }
  pollTimer = setTimeout(poll, POLL_MS);
}

// ---- start --------------------------------------------------------------------------------------

function askForKey(message) {
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("key-error").textContent = message;
  byId("key").focus();
}

function offerDrafts() {
  const options = Array.from({ length: k + 1 }, (_, n) => {
    const isDefault = n === k;
    return new Option(n === 0 ? "none" : String(n), n, isDefault, isDefault);
  });
  byId("drafts").replaceChildren(...options);
  byId("drafts-label").hidden = byId("positions-card").hidden = k === 0;
}

async function start() {
  let capabilities;
  try {
    capabilities = await (await request("v1/capabilities")).json();
  } catch (error) {
    if (error.status === 401) askForKey(apiKey ? "The server refuses this key." : "");
    else byId("server-state").textContent = messageOf(error);
    return;
  }
  const { configured, server } = capabilities;
  k = configured.num_speculative_tokens;
  const drafter = k > 0 ? `${configured.method}, k = ${k}` : "no drafter";
  const { dtype, device } = configured;
  byId("model").textContent = `${server.models[0]} · ${drafter} · ${dtype} on ${device}`;
  document.title = `${server.models[0]} · Paceline`;
  offerDrafts();
  byId("prompt").value = EXAMPLES.completion;
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  clearTimeout(pollTimer);
  poll();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value;
  byId("key").value = "";
  // A header cannot have other characters: the browser would send nothing.
  if (/^[ -~]*$/.test(apiKey)) start();
  else askForKey("A key has only printable ASCII characters.");
});
byId("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else run(event.target);
});
byId("request").addEventListener("change", (event) => {
  if (event.target.name !== "mode") return;
  const prompt = byId("prompt");
  if (Object.values(EXAMPLES).includes(prompt.value)) prompt.value = EXAMPLES[event.target.value];
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("request").requestSubmit();
});
start();
