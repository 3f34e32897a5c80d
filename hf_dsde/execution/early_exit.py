"""A model that ends after one of its layers: the layers up to there, then its final norm and its head.

Such a model is a view: an object of the model's class that has the model's own modules, but for the list of layers,
which is shorter. There is no second copy of any weight, layers keep their places in the cache, and what an adapter or
a quantiser has put into a layer is in the view as well.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

Module = TypeVar("Module", bound=nn.Module)


def why_no_exits(model: PreTrainedModel) -> str | None:
    """Say why a model cannot end after one of its layers, fit to follow its name; None if it can.

    Args:
        model: A decoder-only model.
    """
    body: Any = model.base_model
    layers = getattr(body, "layers", None)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if body is model or not isinstance(layers, nn.ModuleList) or len(layers) != count or not hasattr(body, "norm"):
        return "has another layout than Llama's (model.layers, model.norm), so it is not known where a pass could end"
    if count < 2:
        return f"has {count} layer, so there is none to end after before the last"
    if any(_is_replaced(module) for module in (model, body)):
        return (
            "has a `forward` that something has replaced (layers on several devices, a compiler), and would run whole"
        )
    return None


def ending_after(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """Return a model that ends after one of its layers, counted from 1.

    Args:
        model: One that `why_no_exits` has nothing against. What is attached to it or replaced in it later, other than
            inside of its layers, is not in the view.
        layer: Fewer than the model has.
    """
    body: Any = model.base_model
    return _view(model, **{model.base_model_prefix: _view(body, layers=nn.ModuleList(list(body.layers)[:layer]))})


class ExitHead:
    """What a model makes of the hidden states after a layer when its passes end there: final norm, head, and scaling.

    Args:
        model: One that `why_no_exits` has nothing against.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.base_model
        self._model: Any = _view(model, **{model.base_model_prefix: _NormAlone(body.norm)})

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits, `[n, vocabulary]`, float32, of states before any norm, `[n, H]`, of the model's dtype."""
        logits: Tensor = self._model(inputs_embeds=states[None], use_cache=False, return_dict=True).logits
        return logits[0].float()


class _NormAlone(nn.Module):
    """Stands where a model's body is and takes what it is given for the states after a layer.

    Args:
        norm: The final norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        """Return the normed states; of all models' bodies, those with experts return most fields."""
        return MoeModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


def _view(module: Module, **children: nn.Module) -> Module:
    """Return an object of a module's class that holds what the module does, but for some of its children."""
    view = object.__new__(type(module))
    vars(view).update(vars(module), _modules={**module._modules, **children})
    for name in ("forward", "_compiled_call_impl"):  # they would run the module itself
        vars(view).pop(name, None)
    return view


def _is_replaced(module: nn.Module) -> bool:
    """Whether a module's `forward` is another than its class's, or something decides around it what it is given."""
    own = vars(module).get("forward")
    # Taking off an accelerate hook leaves the module's own method as an attribute, which changes nothing.
    replaced = own is not None and getattr(own, "__func__", None) is not type(module).forward
    return replaced or hasattr(module, "_hf_hook")
