// The HTTP API: what is served, and a generation as a stream of chunks. All addresses are relative,
// so that the page also works under a path of a proxy.

/** What the server, or the way to it, refused: `message` is for people. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, key, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }) };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-cache" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(`The server at ${location.host} cannot be reached.`);
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // An answer of something in between: its status has to do.
  }
  throw new Refusal(message, response.status);
}

/** The model that is served, as /v1/models describes it. */
export async function model(key) {
  return (await (await request("v1/models", key)).json()).data[0];
}

/** One row for each method of the catalogue. */
export async function catalogue() {
  return (await request("playground/methods.json")).json();
}

/**
 * The chunks of a generation.
 * @param {"completion" | "chat"} kind
 * @param {object} body without the prompt's place in it
 */
export async function* generate(kind, prompt, body, key, signal) {
  const chat = kind === "chat";
  const response = await request(chat ? "v1/chat/completions" : "v1/completions", key, {
    method: "POST",
    signal,
    body: JSON.stringify({
      ...body,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      stream: true,
      return_rounds: true,
      return_explanation: true,
    }),
  });
  let complete = false;
  for await (const data of events(response.body)) {
    complete = data === "[DONE]";
    if (complete) continue; // to the end of the response, which would count as broken off
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  if (!complete) throw new Refusal("The connection to the server was lost.");
}

/** The data of server-sent events, one line each. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
