// OpenAI's SDK: its own loop over tools; over Responses, where it has none, a loop of a few lines.
import OpenAI from "openai";
import { INSTRUCTIONS, QUESTIONS, population, weather } from "./asked.mjs";

const [api, streamed] = process.argv.slice(2);
const stream = streamed === "stream";
const client = new OpenAI();
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function overChat() {
  const tools = [weather, population].map((run) => ({
    type: "function",
    function: { name: run.name, function: run, parse: JSON.parse, parameters },
  }));
  let messages = [{ role: "system", content: INSTRUCTIONS }];
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    const runner = client.chat.completions.runTools({ model: "policy", messages, tools, stream });
    console.log(await runner.finalContent());
    messages = runner.messages;
  }
}

async function overResponses() {
  const run = { weather, population };
  const tools = Object.keys(run).map((name) => ({ type: "function", name, parameters, strict: false }));
  const input = [];
  const answered = async () => {
    const asked = { model: "policy", instructions: INSTRUCTIONS, input, tools };
    return stream ? client.responses.stream(asked).finalResponse() : client.responses.create(asked);
  };
  for (const question of QUESTIONS) {
    input.push({ role: "user", content: question });
    for (let calls = true; calls; ) {
      const said = await answered();
      const called = said.output.filter(({ type }) => type === "function_call");
      const results = called.map(({ call_id, name, arguments: given }) => ({
        type: "function_call_output",
        call_id,
        output: run[name](JSON.parse(given)),
      }));
      input.push(...said.output, ...results);
      if (!(calls = called.length)) console.log(said.output_text);
    }
  }
}

await (api === "responses" ? overResponses() : overChat());
