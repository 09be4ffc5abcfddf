"""An agent of Google's Agent Development Kit, which asks by LiteLLM."""

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from tasks.agents.endpoint.agent import AgentTask
from tasks.tools.toolbox import Toolbox


async def solve(task: AgentTask, client: object, tools: Toolbox) -> str:
    """Run the agent."""

    async def calculator(expression: str) -> str:
        """Compute an expression of numbers and + - * /."""
        return (await tools.call("calculator", {"expression": expression})).output

    model = LiteLlm(f"openai/{task.model}", api_base=task.base_url, api_key=task.api_key)
    agent = LlmAgent(name="calculating", model=model, instruction="Use the calculator.", tools=[calculator])
    runner = InMemoryRunner(agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="me")
    said = ""
    asked = types.Content(role="user", parts=[types.Part(text=task.prompt)])
    async for event in runner.run_async(user_id="me", session_id=session.id, new_message=asked):
        if event.is_final_response() and event.content and event.content.parts:
            said = "".join(part.text or "" for part in event.content.parts)
    return said
