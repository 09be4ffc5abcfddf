"""Small tokenizers with the chat formats of several model families."""

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tasks.agents.chat import Chat

_TOOLS = r"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}{{ "\n" + tool | tojson }}{% if loop.last %}{{ "\n" }}{% endif %}{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

_SYSTEM = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if tools %}{{ '<|im_start|>system\n' + (system + '\n\n' if messages[0].role == 'system' else '') }}"
    + _TOOLS
    + "{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}"
)
_ASSISTANT = (
    "{%- set parts = m.content.split('</think>') %}"
    "{%- set thoughts = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{%- set said = parts[-1].lstrip('\n') if parts | length > 1 else m.content %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\n' + thoughts + '\n</think>\n\n' + said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if not loop.first or said %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson """
    "+ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
)
_TOOL = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN3 = (
    _SYSTEM + "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}" + _ASSISTANT + "{%- elif m.role == 'tool' %}" + _TOOL + "{%- endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM = (  # a turn ends with the header of the next one
    "{{ '[gMASK]<sop>' }}"
    "{% if tools %}{{ '<|system|>\nTools:' }}"
    "{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    """{{ '\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}"""
    "{{ '}</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA = (  # one end behind calls, another behind other messages
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}"
    """{{ '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}"""
    "{% endfor %}{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
OPENING = (  # opens a thought, and drops those before the last question
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m.content %}{% set thought = '' %}"
    "{% if m.role == 'assistant' and '</think>' in said %}"
    r"{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    r"{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
STRICT = (  # takes a system message at the beginning only, and outputs of tools after calls only
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'tool' and not m.tool_call_id %}"
    "{{ raise_exception('no') }}{% endif %}{% endfor %}"
) + GLM
HARMONY = (  # each call is a message of its own
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{% elif m.tool_calls %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content }}"
    "{% for call in m.tool_calls %}{{ '<|end|><|start|>assistant to=functions.' + call.function.name }}"
    "{{ '<|channel|>commentary<|message|>' + call.function.arguments | tojson + '<|call|>' }}{% endfor %}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}{% endif %}"
    "{% if not m.tool_calls %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
SINGLE = (  # one call in a turn, with a closing tag and an end of its own; names of arguments between < and >
    "{% for m in messages %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 or m.role == 'tool' and not m.tool_call_id %}"
    "{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<|start|>user\n<tool_response>' + m.content + '</tool_response><|eot|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ '<' + name + '>' + value | tojson }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|eom|>' if m.tool_calls else '<|eot|>' }}{% endif %}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

_CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>"]
_ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
_HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
_OWN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
_RESPONSE = ["<tool_response>", "</tool_response>"]
FORMATS: dict[str, tuple[str, list[str], list[str], str]] = {
    "qwen3": (QWEN3, _CHATML, [*_OWN, *_RESPONSE], "<|im_end|>"),
    "opening": (OPENING, _CHATML, _OWN, "<|im_end|>"),
    "llama": (LLAMA, [*_HEADERS, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], [], "<|eot_id|>"),
    "glm": (GLM, _GLM, [*_OWN, *_ROLES], "<|endoftext|>"),
    "strict": (STRICT, _GLM, [*_OWN, *_ROLES], "<|endoftext|>"),
    "harmony": (HARMONY, _HARMONY, [], "<|end|>"),
    "single": (SINGLE, ["<|start|>", "<|eot|>"], [*_OWN, "<|eom|>", *_RESPONSE], "<|eot|>"),
}
"""By name: template, special tokens, other added tokens, and the tokenizer's end of text."""
_TEXTS = ["The answer is wrong.\n\n Try again, please: what is the sum? <|user|> system assistant </a><b>"] * 4


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer of a format, whose tokens are bytes and pairs of them, as those of real models."""
    template, special, others, end = FORMATS[name]
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _TEXTS, trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        bos_token=special[0],
        additional_special_tokens=special,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in others])
    return tokenizer


@lru_cache
def chat_of(name: str) -> Chat:
    """Return the chat of a format; it is made once, as in a run."""
    return Chat(tokenizer_of(name))
