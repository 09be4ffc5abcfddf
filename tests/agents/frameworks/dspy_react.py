"""A ReAct agent of DSPy, which writes each step as a question of its own."""

import dspy

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = dspy.LM(f"openai/{task.model}", api_base=task.base_url, api_key=task.api_key, cache=False, num_retries=0)
    with dspy.context(lm=model):
        done = await dspy.ReAct("question -> answer", tools=[calculator], max_iters=3).acall(question=task.prompt)
    return str(done.answer)
