// OpenAI's SDK for Node.js against a running system; each test is one promise of the API.
// BASE_URL names the system, KEYED_URL one with keys.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const pieces = ["The ", "river ", "is ", "in ", "Ulm", "."];
const text = pieces.join("");
const ulm = { name: "Ulm", people: 126000 };
const call = { name: "City", arguments: ['{"name":"Ulm",', '"people":', "126000}"] };
const model = "sim";
const messages = [{ role: "user", content: "Where is the river?" }];
const tools = [
  {
    type: "function",
    function: {
      name: "City",
      strict: true,
      parameters: {
        type: "object",
        properties: { name: { type: "string" }, people: { type: "integer" } },
        required: ["name", "people"],
        additionalProperties: false,
      },
    },
  },
];
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });

async function gathered(stream) {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
}

test("a chat is whole, and streamed token by token with its usage last", async () => {
  const sim = { pieces };
  const whole = await client.chat.completions.create({ model, messages, sim });
  const stream = await client.chat.completions.create({
    model,
    messages,
    sim,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = await gathered(stream);
  const said = chunks.map((chunk) => chunk.choices[0]?.delta.content).filter(Boolean);
  assert.equal(whole.choices[0].message.content, text);
  assert.deepEqual(said, pieces);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, pieces.length);
});

test("the stream's helper adds up text and tool calls", async () => {
  const sim = { pieces: ["a"], tool_calls: [call, call] };
  const stream = client.chat.completions.stream({ model, messages, tools, sim });
  const final = await stream.finalChatCompletion();
  const [choice] = final.choices;
  assert.equal(choice.message.content, "a");
  assert.equal(choice.finish_reason, "tool_calls");
  const found = choice.message.tool_calls.map((each) => JSON.parse(each.function.arguments));
  assert.deepEqual(found, [ulm, ulm]);
});

test("tools are run by the helper until there is an answer", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools(
    {
      model,
      messages,
      // The hook says the same each time, so the second turn ends what would go on for ever.
      sim: { tool_calls: [call] },
      tools: [
        {
          type: "function",
          function: {
            name: "City",
            parameters: tools[0].function.parameters,
            parse: JSON.parse,
            function: (city) => {
              asked.push(city);
              return "found";
            },
          },
        },
      ],
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.deepEqual(asked, [ulm, ulm]);
});

test("an object is parsed from what the hook spells", async () => {
  const { function: { parameters } } = tools[0];
  const format = { type: "json_schema", json_schema: { name: "City", schema: parameters } };
  const answer = await client.chat.completions.create({
    model,
    messages,
    response_format: format,
    sim: { pieces: call.arguments },
  });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), ulm);
});

test("a completion is whole and streamed", async () => {
  const asked = { model, prompt: "Once", sim: { pieces } };
  const whole = await client.completions.create(asked);
  const parts = await gathered(await client.completions.create({ ...asked, stream: true }));
  assert.equal(whole.choices[0].text, text);
  assert.equal(parts.map((part) => part.choices[0].text).join(""), text);
});

test("models are listed and found", async () => {
  const names = (await gathered(client.models.list())).map((each) => each.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).object, "model");
});

test("a response is streamed, stored, gone on from and deleted", async () => {
  const asked = { model, input: "Where?", sim: { pieces } };
  const events = await gathered(await client.responses.create({ ...asked, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events.at(-1).type, "response.completed");
  const { id } = events[0].response;
  const stored = await client.responses.retrieve(id);
  assert.equal(stored.output_text, text);
  const next = await client.responses.create({ ...asked, previous_response_id: id });
  const items = await gathered(client.responses.inputItems.list(next.id, { order: "asc" }));
  assert.equal(items.length, 3);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

test("a response in the background is resumed after its last event", async () => {
  const stream = await client.responses.create({
    model,
    input: "a",
    background: true,
    stream: true,
    sim: { pieces, itl_ms: 30 },
  });
  const seen = [];
  for await (const event of stream) {
    seen.push(event);
    if (seen.length === 8) break;
  }
  const rest = await client.responses.retrieve(seen[0].response.id, {
    stream: true,
    starting_after: seen.at(-1).sequence_number,
  });
  const events = [...seen, ...(await gathered(rest))];
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events.at(-1).response.output[0].content[0].text, text);
});

test("a response in the background is cancelled", async () => {
  const { id } = await client.responses.create({
    model,
    input: "a",
    background: true,
    sim: { pieces, hang_at: 1 },
  });
  let found = await client.responses.cancel(id);
  while (["queued", "in_progress"].includes(found.status)) {
    found = await client.responses.retrieve(id);
  }
  assert.equal(found.status, "cancelled");
});

test("responses come over the SDK's socket, side by side, each with its own events", async () => {
  const socket = new ResponsesWS(client);
  const names = ["a", "b", "c"];
  const said = Object.fromEntries(names.map((name) => [name, []]));
  for (const name of names) {
    socket.send({ type: "response.create", model, input: name, stream_id: name, sim: { pieces } });
  }
  await new Promise((resolve, reject) => {
    socket.on("error", reject);
    socket.on("event", (event) => {
      said[event.stream_id].push(event);
      if (names.every((name) => said[name].at(-1)?.type === "response.completed")) resolve();
    });
  });
  socket.close();
  for (const name of names) {
    const events = said[name];
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
    const stored = await client.responses.retrieve(events[0].response.id);
    assert.equal(stored.output_text, text);
  }
});

test("an aborted stream ends, and the next request is served", async () => {
  const sim = { pieces: Array(200).fill("x "), itl_ms: 30 };
  const stream = await client.chat.completions.create({ model, messages, sim, stream: true });
  let chunks = 0;
  for await (const _ of stream) {
    chunks += 1;
    if (chunks === 3) stream.controller.abort();
  }
  assert.ok(chunks < 200);
  const next = await client.chat.completions.create({ model, messages, sim: { pieces } });
  assert.equal(next.choices[0].message.content, text);
});

test("refusals and failures are the SDK's own errors", async () => {
  const ask = (more) => client.chat.completions.create({ model, messages, ...more });
  await assert.rejects(ask({ temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.match(error.requestID, /^req_/);
    return true;
  });
  await assert.rejects(ask({ model: "none" }), OpenAI.NotFoundError);
  const failing = await ask({ stream: true, sim: { pieces, fail_at: 2 } });
  await assert.rejects(gathered(failing), (error) => error.code === "engine_error");
  const keyed = new OpenAI({ baseURL: process.env.KEYED_URL, apiKey: "sk-no", maxRetries: 0 });
  await assert.rejects(gathered(keyed.models.list()), OpenAI.AuthenticationError);
});
