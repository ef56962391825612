// What a model wrote as nodes of the page. Text only ever becomes text nodes: no markup of the model's is interpreted.

const FENCE = /^```[^\n]*\n([\s\S]*?)(?:^```[ \t]*$\n?|$(?![\s\S]))/m;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

function element(name, text) {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

function inline(text) {
  return text.split(INLINE).filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) {
      return element("code", part.slice(1, -1));
    }
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) {
      return element("strong", part.slice(2, -2));
    }
    return document.createTextNode(part);
  });
}

function blocks(text) {
  const nodes = [];
  let rest = text;
  for (let found = FENCE.exec(rest); found; found = FENCE.exec(rest)) {
    nodes.push(...inline(rest.slice(0, found.index).replace(/\n$/, "")));
    const pre = document.createElement("pre");
    pre.append(element("code", found[1].replace(/\n$/, "")));
    nodes.push(pre);
    rest = rest.slice(found.index + found[0].length).replace(/^\n+/, "");
  }
  nodes.push(...inline(rest));
  return nodes;
}

// What a reasoning model says to itself stands in <think> at the beginning, or came apart from the reply.
function splitThoughts(text, thoughts) {
  const open = /^\s*<think>/.exec(text);
  if (!open) {
    return [thoughts, text];
  }
  const end = text.indexOf("</think>");
  return end < 0 ? [thoughts + text.slice(open[0].length), ""] : [thoughts + text.slice(open[0].length, end), text.slice(end + 8).replace(/^\s+/, "")];
}

export function show(node, text, thoughts = "") {
  const [own, reply] = splitThoughts(text, thoughts);
  const nodes = blocks(reply);
  if (own.trim()) {
    const details = document.createElement("details");
    details.open = !reply;
    details.append(element("summary", "Thoughts"), document.createTextNode(own.trim()));
    nodes.unshift(details);
  }
  node.replaceChildren(...nodes);
}

// The same for the history that is sent back: without thoughts.
export const spoken = (text) => splitThoughts(text, "")[1];
