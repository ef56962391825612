// The conversation: what was said, and one reply at a time that can be stopped.
import { call, events, ServerError } from "./api.js";
import { show, spoken } from "./render.js";

const by = (id) => document.getElementById(id);

export class Chat {
  // `whenBusy(yes)` hears when a reply begins and ends.
  constructor(whenBusy) {
    this.whenBusy = whenBusy;
    this.messages = []; // what the model is told: turns that came to an end
    this.running = null; // AbortController of the reply that runs
    by("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    by("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) {
        this.stop();
      }
    });
    by("stop").addEventListener("click", () => this.stop());
    by("new-chat").addEventListener("click", () => this.clear());
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.turn = null; // a reply that still ends is not kept
    by("log").replaceChildren(by("empty"));
    by("empty").hidden = false;
    by("prompt").focus();
  }

  request(text) {
    const system = by("system").value.trim();
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages, { role: "user", content: text }],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (by("temperature").value !== "") {
      body.temperature = by("temperature").valueAsNumber;
    }
    if (by("max-tokens").value !== "") {
      body.max_tokens = by("max-tokens").valueAsNumber;
    }
    return body;
  }

  async send() {
    const text = by("prompt").value.trim();
    if (!text || this.running) {
      return;
    }
    const turn = { text, reply: "", thoughts: "", finish: null, usage: null, started: performance.now(), first: 0 };
    this.turn = turn;
    by("empty").hidden = true;
    by("log").querySelectorAll(".error").forEach((node) => node.remove());
    turn.asked = this.add("user", text);
    turn.answer = this.add("assistant", "");
    turn.answer.classList.add("waiting");
    by("prompt").value = "";
    this.busy(new AbortController());
    try {
      const response = await call("/v1/chat/completions", { method: "POST", body: this.request(text), signal: this.running.signal });
      for await (const event of events(response)) {
        this.take(turn, event);
      }
    } catch (error) {
      if (error.name === "AbortError") {
        turn.finish = "stopped";
      } else if (error instanceof ServerError) {
        turn.error = error.message;
      } else {
        turn.error = "the connection was lost";
      }
    }
    this.busy(null);
    this.end(turn);
  }

  busy(running) {
    this.running = running;
    by("send").hidden = Boolean(running);
    by("stop").hidden = !running;
    this.whenBusy(Boolean(running));
  }

  take(turn, event) {
    const choice = event.choices?.[0];
    turn.usage = event.usage ?? turn.usage;
    turn.finish = choice?.finish_reason ?? turn.finish;
    const [text, thought] = [choice?.delta?.content ?? "", choice?.delta?.reasoning_content ?? ""];
    if (!text && !thought) {
      return;
    }
    turn.first ||= performance.now();
    turn.reply += text;
    turn.thoughts += thought;
    if (!turn.drawing) { // once a frame, however fast tokens come
      turn.drawing = requestAnimationFrame(() => {
        turn.drawing = 0;
        this.draw(turn);
      });
    }
  }

  draw(turn) {
    const log = by("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    turn.answer.classList.remove("waiting");
    show(turn.answer, turn.reply, turn.thoughts);
    if (atEnd) {
      log.scrollTop = log.scrollHeight;
    }
  }

  end(turn) {
    cancelAnimationFrame(turn.drawing);
    if (this.turn !== turn) {
      return; // the conversation was cleared meanwhile
    }
    this.draw(turn);
    if (turn.error) {
      this.add("error", turn.error, "alert");
    }
    if (spoken(turn.reply)) {
      this.messages.push({ role: "user", content: turn.text }, { role: "assistant", content: spoken(turn.reply) });
      this.cost(turn);
    } else { // nothing was said: the question may be asked again
      turn.answer.remove();
      turn.asked.remove();
      by("empty").hidden = this.messages.length > 0 || Boolean(turn.error);
      by("prompt").value ||= turn.text;
    }
    by("log").scrollTop = by("log").scrollHeight;
  }

  cost(turn) {
    const parts = [];
    const seconds = (performance.now() - turn.first) / 1000;
    if (turn.usage) {
      const paged = turn.usage.tinyserve;
      parts.push(`${turn.usage.completion_tokens} tokens`);
      if (turn.usage.completion_tokens > 1 && seconds > 0) {
        parts.push(`${((turn.usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s`);
      }
      if (paged && paged.hit_rate !== null) {
        parts.push(`hit rate ${(100 * paged.hit_rate).toFixed(1)} %`, `${paged.mb_per_token.toFixed(1)} MB/token`);
      }
    }
    if (turn.finish === "stopped") {
      parts.push("stopped");
    } else if (turn.finish === "length") {
      parts.push("cut off at the most tokens, or at the end of the context");
    }
    this.add("cost", parts.join(" · "));
  }

  add(kind, text, role) {
    const node = document.createElement(kind === "cost" ? "p" : "div");
    node.className = kind === "cost" ? "cost" : `message ${kind}`;
    if (role) {
      node.setAttribute("role", role);
    }
    node.textContent = text;
    by("log").append(node);
    by("log").scrollTop = by("log").scrollHeight;
    return node;
  }
}
