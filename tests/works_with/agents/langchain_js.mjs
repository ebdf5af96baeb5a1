// LangChain.js: an agent with tools by `createAgent`. Streamed as users stream it: `streaming: true` alone would count the
// prompt's tokens with a tokenizer from the network.
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { INSTRUCTIONS, QUESTIONS, population, weather } from "./asked.mjs";

const [api, streamed] = process.argv.slice(2);
const model =
  api === "messages"
    ? new ChatAnthropic({ model: "policy", maxTokens: 200, anthropicApiUrl: process.env.ANTHROPIC_BASE_URL })
    : new ChatOpenAI({
        model: "policy",
        useResponsesApi: api === "responses",
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
  const asked = { messages: [...messages, { role: "user", content: question }] };
  if (streamed === "stream") {
    for await (const [mode, piece] of await agent.stream(asked, { streamMode: ["messages", "values"] }))
      if (mode === "values") ({ messages } = piece);
  } else ({ messages } = await agent.invoke(asked));
  console.log(messages.at(-1).text);
}
