"""A tokenizer that knows every character, so that prompts can be read back, and a chat template with tools."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOL_TEMPLATE = (
    "{% if tools %}tools={{ tools | tojson }}\n{% endif %}"
    "{% if style %}style={{ style }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}"
    "{% if m.name is defined %}({{ m.name }}){% endif %}:"
    "{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is defined %}{% for part in m.content %}[{{ part | tojson }}]{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "call {{ call.function.name }} {{ call.function.arguments | tojson }} {{ call | length }};"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def readable_tokenizer(template: str | None = TOOL_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte; `decode` gives the text back."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(characters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer
