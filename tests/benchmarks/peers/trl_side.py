r"""TRL's side: train with GRPOTrainer for some rounds; print what was measured as JSON in the last line of output.

Runs in TRL's environment: `python trl_side.py JOB.json`. The file holds a `Job`.

In workloads of several turns, TRL plays its documented interface for environments (`environment_factory`). There a
turn is a tool call, and an episode has as many turns as the policy calls tools, up to a limit. So the tokenizer reads
every answer as a call of the one tool `answer`, and the chat template writes a tool's reply as the user's message, as
the pipeline's agent does.
"""

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\n' + message['content'] }}"
    "{% if message.get('tool_calls') %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The pipeline's ChatML template. TRL refuses templates that show no tool calls, but no prompt here has any."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run. The problems of round r are `problems[r * groups : (r + 1) * groups]`."""

    model: str  # folder
    problems: list[dict[str, str]]  # (rounds * groups): prompt and solution
    groups: int  # problems in a round
    samples: int  # episodes of each problem
    updates: int  # optimizer steps in a round
    rounds: int
    turns: int
    max_new_tokens: int  # in one turn
    max_model_len: int  # all turns and feedback together
    feedback: dict[str, str]  # to a "right" and a "wrong" answer
    optimizer: dict[str, Any]  # arguments of GRPOConfig
    threads: int
    seed: int
    micro_batch: int  # samples in one forward and backward pass


def main(path: Path) -> None:
    """Train as the job at `path` says."""
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job = Job(**json.loads(path.read_text()))
    torch.set_num_threads(job.threads)
    moments, lengths = list[float](), list[list[int]]()  # the ends of rounds, and tokens of the episodes of each

    class Timed(GRPOTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
        def _generate(self, prompts: list[Any]) -> Any:
            generated = super()._generate(prompts)
            _, completions, tool_mask = generated[:3]
            lengths.append([sum(mask) for mask in tool_mask or [[1] * len(tokens) for tokens in completions]])
            return generated

    class Rounds(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            moments.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % job.updates == 0:
                moments.append(time.perf_counter())

    with TemporaryDirectory(prefix="trl-") as scratch:
        trainer = Timed(
            model=job.model,
            args=GRPOConfig(**_arguments(job, scratch)),
            train_dataset=_dataset(job),
            processing_class=_tokenizer(job),
            callbacks=[Rounds()],
            **_environment(job),
        )
        trainer.train()
    parameters = list(trainer.model.parameters())
    found = {
        "seconds": [end - begin for begin, end in pairwise(moments)],
        "lengths": lengths,
        "updates": trainer.state.global_step,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(found))


def _arguments(job: Job, scratch: str) -> dict[str, Any]:
    """Return the arguments of GRPOConfig: one generation of all samples, then `updates` optimizer steps on them."""
    accumulated, rest = divmod(job.groups * job.samples, job.updates * job.micro_batch)
    assert not rest, f"micro_batch={job.micro_batch} does not divide the samples of an update"
    return {
        "output_dir": scratch,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,  # TRL's default saves memory that nobody lacks here, and costs time
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": accumulated * job.updates,
        "num_generations": job.samples,
        "max_steps": job.rounds * job.updates,
        "max_completion_length": job.max_new_tokens if job.turns == 1 else job.max_model_len,
        "generation_kwargs": {"max_new_tokens": job.max_new_tokens},
        "max_tool_calling_iterations": job.turns - 1 or None,
        "shuffle_dataset": False,
        "num_iterations": 1,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over all action tokens of an update, as in the pipeline
        "scale_rewards": "none",
        "lr_scheduler_type": "constant",
        "logging_steps": job.updates,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job.seed,
        **job.optimizer,
    }


def _dataset(job: Job) -> Any:
    from datasets import Dataset

    asked = [[{"role": "user", "content": problem["prompt"]}] for problem in job.problems]
    return Dataset.from_dict({"prompt": asked, "solution": [problem["solution"] for problem in job.problems]})


def _tokenizer(job: Job) -> Any:
    """Return the policy's tokenizer; with several turns, one that reads every answer as a call of the tool."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    if job.turns > 1:

        class Answers(type(tokenizer)):  # type: ignore[misc]  # the class is known at run time only
            def parse_response(self, response: list[int], *_: Any, **__: Any) -> dict[str, Any]:
                call = {"name": "answer", "arguments": {"text": self.decode(response, skip_special_tokens=True)}}
                return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}

        tokenizer.__class__ = Answers
        tokenizer.response_template = {}  # TRL asks tokenizers with a template to parse; this one needs none
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def _environment(job: Job) -> dict[str, Any]:
    """Return GRPOTrainer's arguments for rewards and turns. All verdicts are those of TRL's own `accuracy_reward`."""
    from trl.rewards import accuracy_reward

    def judge(answers: list[str], solutions: list[str]) -> list[float]:
        rewards = accuracy_reward([[{"content": answer}] for answer in answers], solutions)
        return [reward or 0.0 for reward in rewards]

    class Attempts:
        """One episode: the policy answers and is told whether the answer was right."""

        def reset(self, solution: str, **_: Any) -> None:
            self._solution, self._reward = solution, 0.0

        def answer(self, text: str) -> str:
            """Submit an answer.

            Args:
                text: The answer.

            Returns:
                Whether it is right.
            """
            (reward,) = judge([text], [self._solution])
            self._reward += reward
            return job.feedback["right" if reward else "wrong"]

    def one_turn(completions: list[list[dict[str, Any]]], solution: list[str], **_: Any) -> list[float]:
        return judge([completion[0]["content"] for completion in completions], solution)

    def several_turns(completions: list[list[dict[str, Any]]], environments: list[Any], **_: Any) -> list[float]:
        """Add the verdict on the last answer, which TRL gives to no tool."""
        calls = [completion[-1]["tool_calls"][0]["function"]["arguments"]["text"] for completion in completions]
        last = judge(calls, [environment._solution for environment in environments])
        return [environment._reward + reward for environment, reward in zip(environments, last, strict=True)]

    if job.turns == 1:
        return {"reward_funcs": one_turn}
    return {"reward_funcs": several_turns, "environment_factory": Attempts}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
