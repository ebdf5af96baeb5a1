// OpenAI's SDK: its own loop over tools.
import OpenAI from "openai";
import { INSTRUCTIONS, QUESTIONS, population, weather } from "./asked.mjs";

const streamed = process.argv[3] === "stream";
const client = new OpenAI();
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [weather, population].map((run) => ({
  type: "function",
  function: { name: run.name, function: run, parse: JSON.parse, parameters },
}));
let messages = [{ role: "system", content: INSTRUCTIONS }];
for (const question of QUESTIONS) {
  messages.push({ role: "user", content: question });
  const runner = client.chat.completions.runTools({ model: "policy", messages, tools, stream: streamed });
  console.log(await runner.finalContent());
  messages = runner.messages;
}
