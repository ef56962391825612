// What is shown besides the conversation: asks the server how its experts do, several times a second while a reply runs.
import { call, getJson, key } from "./api.js";
import { bytes, Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { counted } from "./heat.js";
import { ExpertMap } from "./map.js";

const BUSY_MS = 400;
const IDLE_MS = 2000;

const by = (id) => document.getElementById(id);
const map = new ExpertMap();
const charts = new Charts();
let timer = 0;
let busy = false;
let asking = false;
let touched = false; // the size is being typed: it is not overwritten

new Chat((yes) => {
  busy = yes;
  soon(0);
});

function soon(delay) {
  clearTimeout(timer);
  timer = setTimeout(look, delay);
}

function say(text, bad = false) {
  by("server").textContent = text;
  by("server").classList.toggle("bad", bad);
}

async function look() {
  if (document.hidden || asking) {
    return; // it is asked again when the page is seen, or when the answer is there
  }
  asking = true;
  try {
    show(await getJson("/v1/experts"));
    say(busy ? "replying" : "ready");
  } catch (error) {
    if (error.status === 404) { // a dense model
      by("unpaged").textContent = error.message;
      by("unpaged").hidden = false;
      by("paged").hidden = by("heat").hidden = true;
      say("ready");
      asking = false;
      return;
    }
    say(error.message, true);
  }
  asking = false;
  if (by("key-form").hidden) {
    soon(busy ? BUSY_MS : IDLE_MS);
  }
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

function show(state) {
  const n = counted(state);
  const share = Math.round((100 * state.slots.total) / n);
  const since = charts.add(state.counts);
  map.update(state);
  by("hit-rate").textContent = percent(state.hit_rate.decode);
  by("resident").replaceChildren(`${state.slots.resident}`, small(` of ${n}`));
  by("resident").title = `${state.slots.resident} experts in ${state.slots.total} slots, ${n} experts in all`;
  by("moved").textContent = bytes(state.bytes_moved);
  by("evictions").textContent = state.evictions.toLocaleString("en");
  by("speed").replaceChildren(since && since.tokens > 0 ? since.tokens.toFixed(1) : "–", small(" tok/s"));
  by("axes").textContent = `${state.layers.length} layers of ${Math.max(...state.layers.map((layer) => layer.hits.length))} experts, ${state.n_used} a token`;
  by("all-resident").hidden = !state.all_resident;
  if (!touched && !by("resize").contains(document.activeElement)) {
    by("share").value = share;
    by("size").value = state.expert_cache;
  }
}

function small(text) {
  const node = document.createElement("small");
  node.textContent = text;
  return node;
}

// ---- the size of the cache ----

by("share").addEventListener("input", () => {
  touched = true;
  by("size").value = `${by("share").value}%`;
});
by("size").addEventListener("input", () => {
  touched = true;
  const share = /^\s*(\d+(?:\.\d+)?)\s*%\s*$/.exec(by("size").value);
  if (share) {
    by("share").value = share[1];
  }
});

function tell(text, bad) {
  by("resized").textContent = text;
  by("resized").classList.toggle("bad", bad);
}

by("resize").addEventListener("submit", async (event) => {
  event.preventDefault();
  by("apply").disabled = true;
  tell("resizing, between two tokens …", false);
  try {
    const done = await (await call("/v1/experts/cache", { method: "PUT", body: { expert_cache: by("size").value.trim() } })).json();
    tell(done.lines?.[0] ?? "done", false);
    touched = false;
  } catch (error) {
    tell(`${error.message}; nothing changed`, true);
  }
  by("apply").disabled = false;
  soon(0);
});

by("heat").addEventListener("change", (event) => map.show(event.target.value));

// ---- key, and the beginning ----

key.whenWanted((message) => {
  const had = Boolean(key.get());
  by("key-form").hidden = false;
  say(had ? message : "needs a key", true);
  if (!by("key-form").contains(document.activeElement)) {
    by("key").focus();
  }
});
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(by("key").value.trim());
  by("key").value = "";
  by("key-form").hidden = true;
  by("prompt").focus();
  begin();
});
document.addEventListener("visibilitychange", () => soon(0));

async function begin() {
  try {
    const model = (await getJson("/v1/models")).data[0];
    by("model").textContent = model.meta?.n_ctx ? `${model.id}, ${model.meta.n_ctx.toLocaleString("en")} tokens of context` : model.id;
    document.title = `${model.id} – tinyserve-gguf`;
  } catch (error) {
    say(error.message, true);
    if (error.status === 401) {
      return;
    }
  }
  soon(0);
}

begin();
