"""The math agents: they answer a problem, get feedback and try again; and one without verdicts."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from pydantic import Field

from storage.records import Problem, Trajectory
from tasks.agents.episode import Episode
from tasks.agents.interface import AgentContext, EpisodeEngine, EpisodeSpec
from tasks.agents.template import Message
from tasks.environments.interface import Environment, verdict_of
from tasks.problems.rows import first_messages, with_instructions
from tasks.thoughts import split

WRONG_FEEDBACK = "Your answer is wrong. Try again."
CORRECT_FEEDBACK = "Your answer is correct."


@dataclass(eq=False, repr=False)
class MathMultiTurnAgent:
    """An agent that makes up to `num_turns` completions in one conversation.

    Args:
        context: the pipeline gives it to every agent.
        num_turns: most completions.
        turn_discount: return of turn k = reward k + turn_discount * return of turn k+1.
        stop_on_success: end at the first right answer; otherwise send `correct_feedback` and go on.
        wrong_feedback: user message after a wrong answer.
        correct_feedback: user message after a right answer.
        system_prompt: first message, if not empty; a problem's own system message follows in the same message.
        instruction: appended to the problem's text.
    """

    context: AgentContext
    _: KW_ONLY
    num_turns: Annotated[int, Field(ge=1)] = 5
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    stop_on_success: bool = True
    wrong_feedback: str = WRONG_FEEDBACK
    correct_feedback: str = CORRECT_FEEDBACK
    system_prompt: str = ""
    instruction: str = ""

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Trajectory]:
        """See `AwaitingAgent.play`."""
        chat = self.context.chat
        question, _ = await env.reset(seed=prompt.seed, options={"problem": prompt.problem})
        messages = self.opening(prompt.problem, question)
        episode = Episode(prompt, chat.prompt(messages))
        for turn in range(self.num_turns):
            outputs = await engine.generate(episode.prompt_ids, self.context.gconfig, prompt.qid)
            text = chat.decode(outputs.output_ids[0], episode.prompt_ids)
            episode.add_completion(outputs, text)
            _, reward, terminated, _, info = await env.step(split(text)[1])
            episode.set_verdict(verdict_of(info), reward, info.get("parts"))
            if (terminated and self.stop_on_success) or turn == self.num_turns - 1:
                break
            feedback = self.correct_feedback if terminated else self.wrong_feedback
            following = chat.next_prompt(messages, outputs.output_ids[0], feedback)
            length = 0 if following.fresh else len(episode.prompt_ids)
            if length + len(following.token_ids) >= self.context.max_model_len:
                reason = f"no room for turn {turn + 2} in inference.max_model_len={self.context.max_model_len}"
                return [episode.trajectory(self.turn_discount, "truncated", reason, self.num_turns - turn - 1)]
            add = episode.start_sequence if following.fresh else episode.add_feedback
            add(feedback, following.token_ids)
            messages = following.messages
        return [episode.trajectory(self.turn_discount)]

    def opening(self, problem: Problem, question: str) -> list[Message]:
        """Return the messages with which an episode of `problem` begins if the environment asks `question`."""
        return with_instructions(first_messages(problem, question), self.system_prompt, self.instruction)


class MathSingleStepAgent(MathMultiTurnAgent):
    """The agent `math-multi-turn` with a single turn.

    Args:
        context: the pipeline gives it to every agent.
        system_prompt: first message, if not empty.
        instruction: appended to the problem's text.
    """

    def __init__(self, context: AgentContext, *, system_prompt: str = "", instruction: str = "") -> None:
        super().__init__(context, num_turns=1, system_prompt=system_prompt, instruction=instruction)


class NullAgent:
    """An agent that requests one completion of the bare problem and never steps the environment."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Trajectory]:
        """See `AwaitingAgent.play`."""
        chat = self.context.chat
        episode = Episode(prompt, chat.prompt(first_messages(prompt.problem, prompt.problem.prompt)))
        outputs = await engine.generate(episode.prompt_ids, self.context.gconfig, prompt.qid)
        episode.add_completion(outputs, chat.decode(outputs.output_ids[0], outputs.prompt_ids))
        return [episode.trajectory()]
