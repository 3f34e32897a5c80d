"""Heads that the package speculators makes, and what its own forward pass gives for them.

Run as a script, it writes the heads of tests/heads/data: their files as the package saves them, and inputs and outputs.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, WIDTH, LAYERS = 64, 16, 8
CASES = {
    "llama_draft_vocabulary": {
        "layer_type": "llama",
        "draft_vocab_size": 24,
        "layers": {"attention_bias": True, "head_dim": 8, "rope_theta": 500.0},
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    },
    "qwen3_sliding": {
        "layer_type": "qwen3",
        "draft_vocab_size": VOCABULARY,
        "layers": {
            "num_hidden_layers": 2,
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 3,
            "use_sliding_window": True,
        },
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4],
    },
    "plain": {"layer_type": "llama", "draft_vocab_size": VOCABULARY, "layers": {}},
}
"""Settings of heads by name."""


def their_head(layer_type, draft_vocab_size, layers, verifier=None, **settings):
    """Make a random head of speculators'."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    layer_config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[layer_type](**{**shape, **layers})
    layer_config._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=draft_vocab_size,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=[]),
        ),
        **settings,
    )
    torch.manual_seed(0)
    head = Eagle3DraftModel(config)
    for weight in head.parameters():
        weight.data = 1 + 0.3 * torch.randn_like(weight) if weight.dim() == 1 else 0.3 * torch.randn_like(weight)
    if draft_vocab_size < VOCABULARY:
        listed = torch.zeros(VOCABULARY, dtype=torch.bool)
        listed[torch.randperm(VOCABULARY)[:draft_vocab_size]] = True
        head.load_vocab_mappings(listed, listed.nonzero().flatten() - torch.arange(draft_vocab_size))
    return head.eval()


def make_eager(head):
    """Turn a loaded head of speculators' to attention that runs on a CPU."""
    from speculators.models.attention import create_float_mask

    head.config.transformer_layer_config._attn_implementation = head._attn_impl = "eager"
    head._create_mask_fn = create_float_mask


def their_pass(head, features, ids):
    """Return speculators' logits of the first two steps, `[2, T, draft vocabulary]`, and the states in between."""
    seen = {"logits": [], "states": []}
    states = head.norm if head.config.norm_output else head.layers[-1]
    hooks = [
        head.lm_head.register_forward_hook(lambda module, given, output: seen["logits"].append(output)),
        states.register_forward_hook(lambda module, given, output: seen["states"].append(output)),
    ]
    with torch.no_grad():
        head(torch.cat(list(features), dim=-1)[None], ids[None], torch.zeros_like(ids)[None], ttt_steps=2)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen["logits"]), seen["states"][0][0]


def inputs(layers):
    """Random features, `[layers, T, WIDTH]`, and tokens."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(layers, 9, WIDTH, generator=generator)
    return features, torch.randint(0, VOCABULARY, (9,), generator=generator)


if __name__ == "__main__":
    for name, case in CASES.items():
        folder = Path(sys.argv[1]) / name
        written = their_head(**case)
        written.save_pretrained(folder)
        (folder / "config.py").unlink()  # transformers puts the code there
        features, ids = inputs(len(case.get("eagle_aux_hidden_state_layer_ids", range(3))))
        logits, states = their_pass(written, features, ids)
        example = {"features": features, "ids": ids, "logits": logits, "states": states.contiguous()}
        save_file(example, folder / "example.safetensors")
