// The Vercel AI SDK with its provider for APIs compatible with OpenAI's, against a running system.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const pieces = ["The ", "river ", "is ", "in ", "Ulm", "."];
const text = pieces.join("");
const ulm = { name: "Ulm", people: 126000 };
const call = { name: "City", arguments: ['{"name":"Ulm",', '"people":', "126000}"] };
const City = z.object({ name: z.string(), people: z.number().int() });
const prompt = "Where is the river?";

const headrace = createOpenAICompatible({
  name: "headrace",
  baseURL: process.env.BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = headrace("sim");
const hook = (sim) => ({ headrace: { sim } });
const common = { model, prompt, maxRetries: 0 };

test("text is streamed token by token, with its usage", async () => {
  const result = streamText({ ...common, providerOptions: hook({ pieces }) });
  const seen = [];
  for await (const piece of result.textStream) seen.push(piece);
  assert.deepEqual(seen, pieces);
  assert.equal(await result.finishReason, "stop");
  assert.equal((await result.usage).outputTokens, pieces.length);
});

test("text is generated whole", async () => {
  const result = await generateText({ ...common, providerOptions: hook({ pieces }) });
  assert.equal(result.text, text);
});

test("a tool is called and its result is gone on from, streamed and not", async () => {
  const asked = [];
  const tools = {
    City: tool({
      description: "Looks a city up.",
      inputSchema: City,
      execute: async (city) => {
        asked.push(city);
        return "found";
      },
    }),
  };
  const options = { ...common, tools, providerOptions: hook({ tool_calls: [call] }) };
  const whole = await generateText({ ...options, stopWhen: isStepCount(2) });
  const streamed = streamText({ ...options, stopWhen: isStepCount(2) });
  await streamed.consumeStream();
  for (const steps of [whole.steps, await streamed.steps]) {
    assert.equal(steps.length, 2);
    assert.deepEqual(steps[0].toolCalls.map((each) => each.input), [ulm]);
    assert.equal(steps[0].finishReason, "tool-calls");
  }
  assert.deepEqual(asked, [ulm, ulm, ulm, ulm]);
});

test("an object is made after a schema, streamed and not", async () => {
  const options = {
    ...common,
    output: Output.object({ schema: City }),
    providerOptions: hook({ pieces: call.arguments }),
  };
  const whole = await generateText(options);
  assert.deepEqual(whole.output, ulm);
  const streamed = streamText(options);
  const partial = [];
  for await (const each of streamed.partialOutputStream) partial.push(each);
  assert.deepEqual(partial.at(-1), ulm);
  assert.deepEqual(await streamed.output, ulm);
});

test("a failure in a stream is an error of the stream", async () => {
  const errors = [];
  const result = streamText({
    ...common,
    providerOptions: hook({ pieces, fail_at: 2 }),
    onError: ({ error }) => errors.push(error),
  });
  const parts = [];
  for await (const part of result.fullStream) parts.push(part.type);
  assert.ok(parts.includes("error"), String(parts));
  assert.equal(errors.length, 1);
});

test("a refusal is an error with its status", async () => {
  await assert.rejects(
    generateText({ ...common, model: headrace("none") }),
    (error) => error.statusCode === 404 && !error.isRetryable,
  );
});
