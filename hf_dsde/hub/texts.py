"""The files of an exported folder, with places for the versions that it works with."""

from __future__ import annotations

from string import Template

GENERATE = Template('''"""`generate` with drafts, in batches: what transformers calls for `custom_generate`.

The work is done by the package hf-dsde, which has to be installed. README.md says what can be passed.
"""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

OLDEST, BEFORE = "$oldest", "$before"
"""Versions of hf-dsde that this file works with: from the first, and before the second."""
INSTALL = f'Run: pip install "hf-dsde>={OLDEST},<{BEFORE}"'


def _check_version() -> None:
    try:
        installed = version("hf-dsde")
    except PackageNotFoundError:
        found = "is not installed"
    else:
        if Version(OLDEST) <= Version(installed) < Version(BEFORE):
            return
        found = f"is installed in version {installed}"
    msg = f"This custom_generate needs hf-dsde from version {OLDEST} on, before {BEFORE}, which {found}. {INSTALL}"
    raise ImportError(msg)


_check_version()
try:  # without which transformers looks for the package first, and knows no version to name
    from hf_dsde.hub.generate import generate  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"hf-dsde cannot be imported, since {error.name} is missing. {INSTALL}") from error
''')

README = Template("""---
license: apache-2.0
library_name: transformers
tags:
  - custom_generate
  - speculative-decoding
  - assisted-generation
---

# Batched assisted generation (DSDE)

`generate` with drafts for batches of any size, with a draft length for each sequence. The text is that of plain
`generate`: greedily the same tokens (in float32 and float64), sampled the same distribution. This repository holds no
weights. It serves decoder-only models of transformers, and the work is done by the package hf-dsde:

```sh
pip install "hf-dsde>=$oldest,<$before"
```

## Example

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-8B", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="auto", device_map="auto")
inputs = tokenizer(["The capital of France is", "Once upon a time"], padding=True, return_tensors="pt")
output = model.generate(
    **inputs.to(model.device),
    custom_generate="...",  # the id of this repository, or the path of this folder
    trust_remote_code=True,
    assistant_model="Qwen/Qwen3-0.6B",
    speculation_policy="dsde",
    max_new_tokens=100,
    return_dict_in_generate=True,
)
print(tokenizer.batch_decode(output.sequences, skip_special_tokens=True))
print(output.speculation_statistics)
```

In a pipeline these arguments go to the call: `pipe(texts, custom_generate=..., trust_remote_code=True, ...)`.

## Arguments

Those of `generate`, and:

- `assistant_model`: what drafts. A model; the folder or Hub id of a smaller model, or of layers or a head trained for
  the target, which is loaded at the first call and kept with the target; `"suffix"`, `"sssd"` or `"prompt_lookup"`,
  which draft out of texts, without a model; or a drafter of hf-dsde.
- `speculation_policy`: chooses the draft lengths. A name (`"dsde"` if nothing is said, `"auto"`, `"goodput"`,
  `"static"` and others), a policy, or a `SpeculationConfig`. `"dsde"` needs a model that drafts; `"auto"` serves any
  drafter.
- `speculation_config`: a `hf_dsde.SpeculationConfig`, for everything else that can be set.
- `speculation_listeners`: objects that hear of every round.
- `tokenizer` and `assistant_tokenizer`: for stop strings, and for a draft of another tokenizer.

`prompt_lookup_num_tokens` can stand in for `assistant_model`. Sampling, logits processors, stopping criteria, stop
strings, streamers and `num_return_sequences` work as in plain `generate`. Beams, recurrent layers and a cache of your
own are refused; leave out `custom_generate` for them.

With `return_dict_in_generate=True` the output has `speculation_statistics`: what was drafted, what was accepted, and
how long it took. The model is left as it is.

## Beside a model's weights

In the repository of a model, `from_pretrained(..., trust_remote_code=True)` makes this the model's `generate`, which
then needs an `assistant_model` in every call.
""")
