"""The policy gets what its chat template renders, for templates of several kinds, and sampled ids never change."""

import logging
from functools import lru_cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.math_multi_turn import WRONG_FEEDBACK, MathMultiTurnAgent
from tasks.agents.template import Message
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import PROBLEM, RIGHT, WRONG, ScriptedEngine, context, play
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, END_OF_TEXT, build_tokenizer

_TURN = "{{ '<|im_start|>' + m.role + '\n' + words + '<|im_end|>\n' }}"
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
_BEFORE_LAST_QUESTION = "(messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list)"


def with_words(change: str = "", before: str = "", words: str = "m.content") -> str:
    """Return a template that writes each message's `words`, after statements that `change` them."""
    return f"{before}{{% for m in messages %}}{{% set words = {words} %}}{change}{_TURN}{{% endfor %}}{_HEADER}"


OPENS = "{% set opening = '<think>\n' %}"
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "injecting": with_words(
        before="{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    ),
    "keeping": with_words(before=OPENS),
    "forgetting": with_words(
        "{% if m.role == 'assistant' and " + _BEFORE_LAST_QUESTION + " %}"
        "{% set words = words.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    ),
    "opening": with_words(
        "{% if m.role == 'assistant' %}{% set words = words.split('</think>')[-1] %}{% endif %}", before=OPENS
    ),
}
MOVING = (  # writes the system prompt into the newest question
    "{% for m in messages %}{% if m.role != 'system' %}{% set words = m.content %}"
    "{% if loop.last and messages[0].role == 'system' %}"
    "{% set words = messages[0].content + '\n\n' + m.content %}{% endif %}"
    + _TURN
    + "{% endif %}{% endfor %}"
    + _HEADER
)
ALL = {
    **TEMPLATES,
    "moving": MOVING,
    "trimming": with_words(words="m.content | trim"),
    "spaced": with_words(words="m.content + '\n'"),
    "refusing": with_words("{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"),
    # The policy samples the header and the end of each part of its turn.
    "parts": with_words(words="('answer: ' if m.role == 'assistant' else '') + m.content"),
    # The policy samples the blank, or the template writes it.
    "blank": with_words(words="(' ' if m.role == 'assistant' else '') + m.content | trim"),
}
OPENED = {"keeping", "opening"}  # the template itself writes <think> before a completion

QUESTION: Message = {"role": "user", "content": PROBLEM.prompt}
END = "<|im_end|>"
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer([PROBLEM.prompt, WRONG_FEEDBACK, "think Hmm boxed"])
    tokenizer.chat_template = template
    return tokenizer


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def thought(name: str, answer: str) -> str:
    """Return a completion with a thought, without `<think>` if the template writes that."""
    return f"{'' if name in OPENED else '<think>' + chr(10)}Hmm\n</think>\n\n{answer}"


def said(name: str, answer: str) -> str:
    """Return a completion without a thought; one that the template opens has to end."""
    return f"{'</think>' * (name in OPENED)}{answer}"


@lru_cache
def chat_of(name: str) -> Chat:
    """Return one Chat for all conversations, as in a run."""
    return Chat(make_tokenizer(ALL[name]))


PIECES = [WRONG, "Hmm", " ", "\n", "think", ".", "?"]
WORDS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)
ANSWERS = st.lists(st.sampled_from([*PIECES, "<|im_end|>\n", "<|im_start|>assistant\n"]), max_size=5).map("".join)


Drawn = tuple[str, list[Message], list[tuple[str, bool, str]]]
"""A template's name, the first messages, and turns of (completion, whether it ended, feedback)."""


@st.composite
def conversations(draw: st.DrawFn) -> Drawn:
    name = draw(st.sampled_from(sorted(ALL)))
    system = [SYSTEM] if name != "refusing" and draw(st.booleans()) else []
    said = st.one_of(WORDS, WORDS.map(partial(thought, name)))
    turns = draw(st.lists(st.tuples(said, st.booleans(), ANSWERS), min_size=1, max_size=3))
    return name, [*system, QUESTION], turns


@given(conversations())
def test_the_policy_gets_the_whole_rendered_conversation(conversation: Drawn) -> None:
    """Every template gives the policy the whole conversation, apart from whitespace.

    This holds in the same sequence or a new one, with a system prompt or without.
    """
    name, messages, turns = conversation
    chat, written = chat_of(name), list(messages)
    ids = chat.prompt(messages)
    for completion, ended, answer in turns:
        sampled = chat.encode(completion + END * ended)
        following = chat.next_prompt(messages, sampled, answer)
        opened = "<think>\n" if name in OPENED else ""
        written += [{"role": "assistant", "content": opened + completion}, {"role": "user", "content": answer}]
        messages = following.messages
        ids = following.token_ids if following.fresh else ids + sampled + following.token_ids
        text = str(chat.tokenizer.decode(ids))
        assert "".join(text.split()) == "".join(render(chat.tokenizer, written).split())


def test_a_system_prompt_that_moves_begins_a_sequence(caplog: pytest.LogCaptureFixture) -> None:
    """A template may append only, until a system prompt makes it rewrite turns. That is logged once."""
    with caplog.at_level(logging.INFO, "tasks.agents"):
        chat = Chat(make_tokenizer(MOVING))
        answered = chat.encode(WRONG + END)
        assert not chat.next_prompt([QUESTION], answered, "Try again.").fresh
        assert not caplog.messages
        for _ in range(2):
            following = chat.next_prompt([SYSTEM, QUESTION], answered, "Try again.")
            assert following.fresh
    assert len(caplog.messages) == 1
    assert "rewrites earlier turns (for example of system, user, assistant, user)" in caplog.text


def test_a_refused_system_prompt_is_reported() -> None:
    """A template without a system role works without a system prompt. With one, the error names the remedy."""
    chat = Chat(make_tokenizer(ALL["refusing"]))
    assert not chat.next_prompt([QUESTION], chat.encode(WRONG + END), "Try again.").fresh
    with pytest.raises(ValueError, match=r"of system, user: no system role here.*agent\.args\.system_prompt empty"):
        chat.prompt([SYSTEM, QUESTION])


def test_the_end_of_a_turn_is_the_templates() -> None:
    """The end of a turn is the token that the template writes after a message.

    Ordinary text is not an end, because it would stop completions in the middle. The end of a part is not one either.
    """
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: "
    for template, ends in ((ALL["spaced"], [END, END_OF_TEXT]), (ALL["parts"], [END_OF_TEXT]), (plain, [END_OF_TEXT])):
        tokenizer = make_tokenizer(template)
        tokenizer.eos_token = END_OF_TEXT
        assert list(Chat(tokenizer).stop_token_ids) == sorted(tokenizer.get_vocab()[end] for end in ends)


def test_a_turn_that_ends_after_a_newline() -> None:
    """If the template's newline is sampled or not, the end is not repeated and the newline is not in the answer."""
    tokenizer = make_tokenizer(ALL["spaced"])
    tokenizer.eos_token = END_OF_TEXT
    chat = Chat(tokenizer)
    for said in (WRONG + "\n", WRONG):
        following = chat.next_prompt([QUESTION], chat.encode(said + END), "Try again.")
        assert not following.fresh
        assert following.messages[1]["content"] == WRONG
        assert following.token_ids == chat.encode("\n<|im_start|>user\nTry again.\n<|im_end|>\n<|im_start|>assistant\n")
        cut = chat.next_prompt([QUESTION], chat.encode(said), "Try again.")
        assert cut.messages[1]["content"] == said
        assert cut.token_ids == [*chat.encode("\n" + END), *following.token_ids]


SPEAKER = "{{ '<|im_start|>' + m.role + '\n' }}"
DEAF = {
    "answers": (CHAT_TEMPLATE.replace("message.content }}", "message.content if message.role != 'assistant' }}"), 2),
    "beginnings": ("{% for m in messages %}" + SPEAKER + "{{ m.content[:64] }}{% endfor %}" + _HEADER, 1),
}


@pytest.mark.parametrize(("template", "number"), DEAF.values(), ids=DEAF)
def test_a_template_that_does_not_show_a_message_is_refused(template: str, number: int) -> None:
    """The policy would answer questions that it never saw, and its verdicts would be used all the same."""
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "models/deaf"
    with pytest.raises(ValueError, match=f"of models/deaf does not show message {number} .*, or repair chat_temp"):
        Chat(tokenizer)
    for broken in ("{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ messages | nofilter }}", "{% for %}"):
        with pytest.raises(ValueError, match="refuses a conversation of user"):  # templates may raise anything
            Chat(make_tokenizer(broken))


TOOL: Message = {"role": "tool", "content": "3"}
JSON_TOOLS = with_words(words="(m.content | tojson) if m.role == 'tool' else m.content")  # Llama 3 does this


def test_a_template_may_write_what_a_tool_returns_as_json() -> None:
    """In JSON a line break is a backslash and a letter. A template that cuts the text is still refused."""
    conversation = [QUESTION, {"role": "assistant", "content": WRONG}, TOOL]
    tokenizer = make_tokenizer(JSON_TOOLS)
    assert tokenizer.decode(Chat(tokenizer).prompt(conversation)) == render(tokenizer, conversation)
    chat = Chat(make_tokenizer(JSON_TOOLS.replace("(m.content | tojson)", "(m.content[:64] | tojson)")))
    with pytest.raises(ValueError, match=r"does not show message 3 \(tool\)"):
        chat.prompt(conversation)


def two_turns(name: str, verifier: Verifier, *, thinks: bool, max_model_len: int = 256) -> Trajectory:
    """Play an episode with a wrong answer and then a right one."""
    chat = Chat(make_tokenizer(TEMPLATES[name]))
    replies = [thought(name, WRONG) if thinks else WRONG, said(name, RIGHT)]
    agent = MathMultiTurnAgent(context(chat, max_model_len), num_turns=2)
    return play(ScriptedEngine(chat, lambda turn, _: replies[turn]), agent, verifier)[0]


@pytest.mark.parametrize("name", ["forgetting", "opening"])
def test_an_episode_of_two_sequences(name: str, verifier: Verifier) -> None:
    """One trajectory holds both sequences one after the other. Its mask covers the sampled tokens."""
    trajectory = two_turns(name, verifier, thinks=True)
    first, second = trajectory.turns
    assert (first.verdict, second.verdict, first.feedback) == ("wrong", "correct", WRONG_FEEDBACK)
    assert trajectory.sequence_starts == [0, first.end]
    sampled = {*range(first.start, first.end), *range(second.start, second.end)}
    assert trajectory.action_mask == [index in sampled for index in range(len(trajectory.token_ids))]
    assert [version == 3 for version in trajectory.versions] == trajectory.action_mask
    assert two_turns(name, verifier, thinks=False).sequence_starts == [0]


def test_the_context_limits_one_sequence(verifier: Verifier) -> None:
    """Tokens of an earlier sequence do not count against the context of the next."""
    whole = two_turns("forgetting", verifier, thinks=True)
    longest = max(whole.sequence_starts[1], len(whole.token_ids) - whole.sequence_starts[1])
    assert two_turns("forgetting", verifier, thinks=True, max_model_len=longest).status == "completed"
    prompt = whole.turns[1].start - whole.sequence_starts[1]
    truncated = two_turns("forgetting", verifier, thinks=True, max_model_len=prompt)
    assert (truncated.status, truncated.sequence_starts) == ("truncated", [0])
