// Hit rate and link traffic of the last two minutes, from the counters of one snapshot to the next.
import { fit, theme } from "./map.js";

const by = (id) => document.getElementById(id);
const SPAN = 120; // seconds
const LEFT = 48;
const BOTTOM = 14;

export const bytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; n >= 999.5 && at < units.length - 1; at++) {
    n /= 1000;
  }
  return `${n >= 100 || at === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[at]}`;
};

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e5)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export class Charts {
  constructor() {
    this.samples = []; // {at, decode, prefill: hit rates or null, link: bytes per second, tokens: per second}
    this.before = null;
    for (const id of ["hit-chart", "link-chart"]) {
      new ResizeObserver(() => this.draw()).observe(by(id));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `counts` by phase. Returns what happened since the last time, or null.
  add(counts, now = performance.now() / 1000) {
    const before = this.before;
    this.before = { counts, now };
    if (!before || counts.decode.lookups < before.counts.decode.lookups) {
      return null;
    }
    const seconds = Math.max(now - before.now, 0.05);
    const since = (phase, name) => counts[phase][name] - before.counts[phase][name];
    const rate = (phase) => (since(phase, "lookups") > 0 ? since(phase, "hits") / since(phase, "lookups") : null);
    const sample = {
      at: now,
      decode: rate("decode"),
      prefill: rate("prefill"),
      link: (since("decode", "bytes_link") + since("prefill", "bytes_link")) / seconds,
      tokens: since("decode", "graphs") / seconds, // a graph is a token, while it runs: replies are counted when they end
    };
    this.samples.push(sample);
    this.samples = this.samples.filter((one) => now - one.at <= SPAN + 5);
    this.draw(now);
    return sample;
  }

  draw(now = performance.now() / 1000) {
    const last = this.samples.at(-1);
    this.drawHits(now);
    this.drawLink(now);
    const rate = last?.decode ?? last?.prefill;
    by("hit-now").textContent = rate === undefined || rate === null ? "" : `${(100 * rate).toFixed(1)} %`;
    by("link-now").textContent = last ? `${bytes(last.link)}/s` : "";
    by("hit-chart").setAttribute("aria-label", `Hit rate of the last two minutes; now ${by("hit-now").textContent || "nothing is looked up"}`);
    by("link-chart").setAttribute("aria-label", `Link traffic of the last two minutes; now ${by("link-now").textContent || "unknown"}`);
  }

  // The frame. Returns the context and where a time and a share of the height lie.
  frame(id, now, labels) {
    const { context, width, height } = fit(by(id));
    const x = (at) => LEFT + (width - LEFT - 2) * (1 - (now - at) / SPAN);
    const y = (share) => 5 + (height - BOTTOM - 5) * (1 - share);
    context.font = "10px system-ui, sans-serif";
    context.fillStyle = theme("--muted");
    context.strokeStyle = theme("--line");
    context.lineWidth = 1;
    for (const [share, label] of labels) {
      context.beginPath();
      context.moveTo(LEFT, Math.round(y(share)) + 0.5);
      context.lineTo(width, Math.round(y(share)) + 0.5);
      context.stroke();
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(label, LEFT - 4, y(share));
    }
    context.textBaseline = "alphabetic";
    for (const [ago, align] of [[SPAN, "left"], [SPAN / 2, "center"], [0, "right"]]) {
      context.textAlign = align;
      context.fillText(ago ? `${ago} s ago` : "now", x(now - ago), height - 2);
    }
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height - BOTTOM + 1);
    context.clip();
    return { context, x, y };
  }

  drawHits(now) {
    const { context, x, y } = this.frame("hit-chart", now, [[0, "0 %"], [0.5, "50 %"], [1, "100 %"]]);
    for (const [phase, dash] of [["prefill", [4, 3]], ["decode", []]]) {
      context.strokeStyle = context.fillStyle = theme(`--${phase}`);
      context.lineWidth = 1.75;
      context.setLineDash(dash);
      context.beginPath();
      let connected = false;
      for (const sample of this.samples) {
        if (sample[phase] === null) {
          connected = false;
          continue;
        }
        context[connected ? "lineTo" : "moveTo"](x(sample.at), y(sample[phase]));
        connected = true;
      }
      context.stroke();
      this.samples.forEach((sample, i) => { // one alone would not be seen
        if (sample[phase] !== null && (this.samples[i - 1]?.[phase] ?? null) === null && (this.samples[i + 1]?.[phase] ?? null) === null) {
          context.fillRect(x(sample.at) - 2, y(sample[phase]) - 2, 4, 4);
        }
      });
    }
    context.restore();
  }

  drawLink(now) {
    const most = nice(Math.max(0, ...this.samples.map((sample) => sample.link)));
    const { context, x, y } = this.frame("link-chart", now, [[0, "0"], [0.5, bytes(most / 2)], [1, bytes(most)]]);
    context.fillStyle = theme("--decode");
    this.samples.forEach((sample, i) => {
      const from = x(this.samples[i - 1]?.at ?? sample.at - 0.5);
      context.fillRect(from, y(sample.link / most), Math.max(1, x(sample.at) - from - 0.5), y(0) - y(sample.link / most));
    });
    context.restore();
  }
}
