// The server's API: the key, errors as people read them, and streams of events.

const KEY = "tinyserve-key";

let onKeyWanted = () => {};

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  whenWanted: (listener) => { onKeyWanted = listener; },
};

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function asError(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch {
    // no JSON: the status line has to do
  }
  if (response.status === 401) {
    onKeyWanted(message);
  }
  return new ServerError(message, response.status);
}

// `options` as fetch() has them; `body`, an object, is sent as JSON. Throws a ServerError for an answer that is none.
export async function call(path, { body, ...options } = {}) {
  const headers = {};
  if (key.get()) {
    headers.Authorization = `Bearer ${key.get()}`;
  }
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError("the server cannot be reached", 0);
  }
  if (!response.ok) {
    throw await asError(response);
  }
  return response;
}

export const getJson = async (path) => (await call(path)).json();

// The data of the events of a streamed answer, parsed, up to [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    held += value ?? "";
    const parts = held.split(/\r?\n\r?\n/);
    held = done ? "" : parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") {
        return;
      }
      if (data) {
        const event = JSON.parse(data);
        if (event.error) {
          throw new ServerError(event.error.message, 200);
        }
        yield event;
      }
    }
    if (done) {
      return;
    }
  }
}
