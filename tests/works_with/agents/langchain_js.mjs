// LangChain.js: an agent with tools by `createAgent`.
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { INSTRUCTIONS, QUESTIONS, population, weather } from "./asked.mjs";

const [api, streamed] = process.argv.slice(2);
const model = new ChatOpenAI({
  model: "policy",
  useResponsesApi: api === "responses",
  streaming: streamed === "stream",
  configuration: { baseURL: process.env.OPENAI_BASE_URL },
});
const schema = z.object({ city: z.string() });
const tools = [
  tool(weather, { name: "weather", description: "The weather in a city now.", schema }),
  tool(population, { name: "population", description: "How many people live in a city.", schema }),
];
const agent = createAgent({ model, tools, systemPrompt: INSTRUCTIONS });
let messages = [];
for (const question of QUESTIONS) {
  ({ messages } = await agent.invoke({ messages: [...messages, { role: "user", content: question }] }));
  console.log(messages.at(-1).text);
}
