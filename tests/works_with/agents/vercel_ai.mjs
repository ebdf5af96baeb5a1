// Vercel's AI SDK.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { INSTRUCTIONS, QUESTIONS, population, weather } from "./asked.mjs";

const [api, streamed] = process.argv.slice(2);
const at = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const anthropic = { baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`, apiKey: process.env.ANTHROPIC_API_KEY };
const model = {
  chat: () => createOpenAICompatible({ name: "gateway", ...at })("policy"),
  responses: () => createOpenAI(at).responses("policy"),
  messages: () => createAnthropic(anthropic)("policy"),
}[api]();
const inputSchema = z.object({ city: z.string() });
const tools = {
  weather: tool({ description: "The weather in a city now.", inputSchema, execute: weather }),
  population: tool({ description: "How many people live in a city.", inputSchema, execute: population }),
};
const messages = [];
for (const question of QUESTIONS) {
  messages.push({ role: "user", content: question });
  const asked = { model, instructions: INSTRUCTIONS, messages, tools, stopWhen: isStepCount(5) };
  const said = streamed === "stream" ? streamText(asked) : await generateText(asked);
  console.log(await said.text);
  messages.push(...(await said.responseMessages));
}
