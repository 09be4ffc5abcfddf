"""An agent of LlamaIndex."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = OpenAILike(
        model=task.model,
        api_base=task.base_url,
        api_key=task.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    agent = FunctionAgent(tools=[calculator], llm=model, system_prompt="Use the calculator.")
    return str(await agent.run(task.prompt))
