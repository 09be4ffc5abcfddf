"""A ReAct agent of LangGraph, with LangChain's client of OpenAI."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


def make_graph(task: AgentTask, tools: Toolbox) -> Any:
    """Return the graph: model, tools, model, until there is an answer."""

    @tool
    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = ChatOpenAI(model=task.model, base_url=task.base_url, api_key=task.api_key, max_retries=0)
    return create_agent(model, [calculator], system_prompt="Use the calculator.")


async def solve(task: AgentTask, client: object, tools: Toolbox, *, most: int = 25) -> str:
    """Run the graph, which raises GraphRecursionError if it has no answer after so many steps."""
    asked = {"messages": [{"role": "user", "content": task.prompt}]}
    done = await make_graph(task, tools).ainvoke(asked, {"recursion_limit": most})
    return str(done["messages"][-1].content)


async def solve_in_a_stream(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run it and read its messages while it works."""
    asked = {"messages": [{"role": "user", "content": task.prompt}]}
    said = ""
    async for message, _ in make_graph(task, tools).astream(asked, stream_mode="messages"):
        said = said + str(message.content) if message.type == "AIMessageChunk" else ""
    return said
