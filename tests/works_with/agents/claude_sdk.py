"""Claude's Agent SDK: the program behind it asks, its tools are functions of ours."""

import asyncio

import claude_agent_sdk as sdk
from asked import INSTRUCTIONS, QUESTIONS, population, weather


def told(function):
    async def run(arguments):
        return {"content": [{"type": "text", "text": function(arguments["city"])}]}

    return sdk.tool(function.__name__, function.__doc__, {"city": str})(run)


async def main() -> None:
    server = sdk.create_sdk_mcp_server("cities", tools=[told(weather), told(population)])
    options = sdk.ClaudeAgentOptions(
        system_prompt=INSTRUCTIONS,
        mcp_servers={"cities": server},
        allowed_tools=["mcp__cities__weather", "mcp__cities__population"],
        tools=[],
    )
    async with sdk.ClaudeSDKClient(options) as client:
        for question in QUESTIONS:
            await client.query(question)
            async for message in client.receive_response():
                if isinstance(message, sdk.ResultMessage):
                    print(message.result)


asyncio.run(main())
