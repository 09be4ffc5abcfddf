"""What of a completion is thought: one rule for graders, agents' messages, models beside the policy, and imports."""

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from tasks.agents.answers import AnswerReader
from tasks.agents.chat import Chat
from tasks.agents.control import quoted
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.audit.importing import command
from tasks.audit.importing.rollout import Message, Rollout, to_trajectory
from tasks.inference.api import Completion
from tasks.score.by_model import messages_of
from tasks.score.verdict import Answer
from tasks.score.verifier import Verifier
from tasks.thoughts import after, split
from tests.support.chat_formats import tokenizer_of
from tests.support.rollout_helpers import PROBLEM, ScriptedEngine, context, play

QUESTION = {"role": "user", "content": PROBLEM.prompt}
END = "<|im_end|>"


def template(opening: str, end: str = "</think>") -> str:
    """Return one that writes `opening` before an answer, and drops earlier thoughts."""
    return (
        "{% for m in messages %}{% set w = m.content.split('END')[-1].lstrip('\n') if m.role == 'assistant' and not "
        "loop.last else m.content %}{{ '<|im_start|>' + m.role + '\n' + w + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}OPENING{% endif %}"
    ).replace("OPENING", opening).replace("END", end)  # fmt: skip


BY_SYSTEM = "{{ '<think></think>' if messages[0].content == 'Be brief.' else '<think>\n' }}"
TEMPLATES = {
    "plain": template(""),
    "opens": template("<think>\n"),
    "words": template("<think>\nOkay, "),  # goes on in words of its own
    "closed": template("<think>\n\n</think>\n\n"),
    "special": template("[THINK]", "[/THINK]"),
    "by system": template(BY_SYSTEM),
}
OPENED = {"opens", "words", "special", "by system"}


def chat_of(name: str) -> Chat:
    tokenizer = deepcopy(tokenizer_of("opening"))
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in ("[THINK]", "[/THINK]")])
    tokenizer.chat_template = TEMPLATES[name]
    return Chat(tokenizer)


CHATS = {name: chat_of(name) for name in TEMPLATES}


CASES = [
    ("It is 3", OPENED, "unparsable", ""),
    (r"Could it be \boxed{3}? Hmm", OPENED, "unparsable", ""),
    (f"4, no, 3.\n</think>\n\nIt is 3.{END}", OPENED, "correct", "It is 3."),
    ("It is 3", TEMPLATES.keys() - OPENED, "correct", "It is 3"),
    ("<think>It is 3", TEMPLATES.keys(), "unparsable", ""),
    (f"<think>4</think>It is 3.{END}", TEMPLATES.keys(), "correct", "It is 3."),
]


@pytest.mark.parametrize(("said", "names", "verdict", "content"), CASES)
def test_a_thought_is_no_answer(said: str, names: set[str], verdict: str, content: str, verifier: Verifier) -> None:
    """Whoever has opened it, whatever tokens its tags are, and whether it was cut: for graders and in messages."""
    for name in sorted(names):
        chat = CHATS[name]
        words = said.replace("<think>", "[THINK]").replace("</think>", "[/THINK]") if name == "special" else said
        agent, ids = MathMultiTurnAgent(context(chat), num_turns=1), chat.encode(words)
        done = Completion(ids, [-0.5] * len(ids), [3] * len(ids), "stop" if words.endswith(END) else "length")
        (row,) = play(ScriptedEngine(chat, lambda *_, done=done: done), agent, verifier, group_size=1)
        turn = {"text": row.turns[0].text, "feedback": ""}
        stored = Answer({"turns": [turn], "answers": [], "follows": [], "prompt": ""}, 0)
        read = AnswerReader(chat).read(chat.prompt([QUESTION]), ids, [])
        assert (row.turns[0].verdict, read.content) == (verdict, content), name
        assert [stored.given.strip(), messages_of(stored)[-1]["content"].strip()] == [content] * 2, name
        assert bool(chat.opening) == (name in OPENED)


def test_a_template_may_open_thoughts_in_some_conversations_only() -> None:
    chat = CHATS["by system"]
    prompts = [chat.prompt([*before, QUESTION]) for before in ([], [{"role": "system", "content": "Be brief."}])]
    assert [chat.decode(chat.encode("3"), ids) for ids in prompts] == ["<think>\n3", "3"]


def test_thoughts_may_stand_between_several_tokens() -> None:
    """Those of the format harmony, whose answers begin with such tokens, too."""
    chat = Chat(tokenizer_of("harmony"))
    final = "<|channel|>final<|message|>It is 3.<|end|>"
    for said in (final, f"<|channel|>analysis<|message|>4?<|end|><|start|>assistant{final}"):
        assert split(chat.decode(chat.encode(said)))[1] == "It is 3."
    assert split(chat.decode(chat.encode("<|channel|>analysis<|message|>It is 3")))[1] == ""


def learnt(chat: Chat, message: dict[str, Any], folder: Path) -> str:
    """Return what is learnt from a message with its thought, as the import makes it."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"messages": [QUESTION, {"role": "assistant", **message}], "reward": 1}))
    ((rollout,), bad) = command.read([str(path)], "messages", chat)
    assert not bad
    assert split(rollout.turns[0].text)[1] == "3"
    return str(chat.tokenizer.decode(rollout.turns[0].token_ids or []))


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning_content": "1, 2", "content": "3"},
        {"content": "<think>\n1, 2\n</think>\n\n3"},
        {"content": "1, 2\n</think>\n\n3"},  # what vLLM gives without a parser of thoughts
        {"content": "3"},
    ],
)
def test_a_thought_is_learnt_as_it_is_sampled(message: dict[str, Any], tmp_path: Path) -> None:
    """Where the template has opened it, it goes on; otherwise it begins with its tag."""
    has_thought = "1, 2" in str(message)
    for name in sorted(OPENED):
        end = "[/THINK]" if name == "special" else "</think>"
        expected = f"{'1, 2' + chr(10) if has_thought else ''}{end}\n\n3{END}"
        assert learnt(CHATS[name], message, tmp_path) == expected, name
    thought = "<think>\n1, 2\n</think>\n\n" if "reasoning_content" in message else ""
    for name in ("plain", "closed"):  # the second has ended its own
        if not str(message["content"]).startswith("1"):
            assert learnt(CHATS[name], message, tmp_path) == f"{thought}{message['content']}{END}", name


def test_texts_of_other_programs_are_thoughts_after_a_prompt_that_opens_one() -> None:
    """verl and TRL write the prompt as one text."""
    for asked, answer in (("user\n1 + 2?\nassistant\n<think>\n", ""), ("user\n1 + 2?\nassistant\n", "It is 3")):
        said = [Message(role="user", content=asked), Message(role="assistant", content="It is 3")]
        row = to_trajectory(Rollout(messages=said, rendered=True, reward=1.0), Counter(), "r", "p", "verl")
        assert split(row.turns[0].text)[1] == answer


@pytest.mark.parametrize(
    "words", ["Rude words.</think>Nice.", "Nice.<think>Rude words.</think>", "Rude words.[/THINK]N"]
)
def test_no_words_are_hidden_from_a_model_that_reads_a_policy(words: str) -> None:
    """Its template would drop what it takes for a thought: tags in contents are text for it, in all messages."""
    for name, chat in CHATS.items():
        tags = chat.tokenizer.convert_tokens_to_ids(["<think>", "</think>", "[THINK]", "[/THINK]"])
        found = []
        for said in (words, "Nice."):
            row = {"turns": [{"text": said, "feedback": ""}], "answers": [], "follows": [], "prompt": f"Grade {said}"}
            messages = messages_of(Answer(row, 0))
            read = [*chat.whole(messages), *chat.prompt(quoted([*messages, QUESTION]))]
            assert str(chat.tokenizer.decode(read)).count(said) == 4, name
            found.append([number for number in read if number in tags])  # type: ignore[operator]
        assert found[0] == found[1], name


WORDS = st.text(alphabet="ab1 \n", min_size=1, max_size=9).filter(str.strip)


@given(WORDS | st.just(""), WORDS, st.sampled_from(["<think>\n", "[THINK]", "<|begin_of_thought|>", "◁think▷"]))
def test_what_is_said_after_an_opened_thought_splits_as_before(thought: str, said: str, opening: str) -> None:
    text = f"<think>{thought}</think>{said}" if thought else said.lstrip()
    assert split(opening + after(opening, text)) == (thought.strip(), said.lstrip())
