"""A small tokenizer with the chat format of Qwen3: thoughts, tools, and tokens for both."""

from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizer import build_tokenizer

_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

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
TEMPLATE = (
    _SYSTEM + "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}" + _ASSISTANT + "{%- elif m.role == 'tool' %}" + _TOOL + "{%- endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_qwen3_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; its tokens are characters and a few words."""
    tokenizer = build_tokenizer(["What is", " and", " the"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(_MARKS)
    return tokenizer
