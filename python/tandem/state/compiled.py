"""The state of recipes for compiled models: scales and histories of amaxes of their products.

The state is attached to the tensors that a product reads, not to a graph: all graphs of a model, of any shapes and of evaluation, share it, and it
is freed with the model.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from tandem import ops, recipe_state
from tandem.recipe_state import RecipeState

_PARTS = tuple((direction, name) for direction in ("forward", "backward") for name in ("scale", "amax_history"))


class Site(NamedTuple):
    """The identity of a product: the tensors of the model from which its weight is computed, and its number among the products that read them, from 1."""

    tensors: tuple[WeakIdRef, ...]
    use: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], use: int) -> Site:
        return cls(tuple(map(WeakIdRef, tensors)), use)

    def label(self, names: Mapping[int, str]) -> str | None:
        """The name of the product, from the names of its tensors by identity; None if a tensor belongs to another model."""
        found = [names.get(id(tensor())) for tensor in self.tensors]
        return None if None in found else "+".join(map(str, found)) + (f"#{self.use}" if self.use > 1 else "")


class Beside:
    """What is attached to a tensor: the states of the products of which it is the first tensor."""

    def __init__(self) -> None:
        self.states: dict[Site, RecipeState] = {}
        self.used: set[Site] = set()  # products that have been called with their state
        self.stateless: dict[Site, str] = {}  # name of the recipe of each product whose recipe has no state
        self.loaded_as = ""  # name of the tensor in a model for which the state of all products was loaded


_all: Any = WeakTensorKeyDictionary()
_lock = threading.RLock()


def _beside(tensor: torch.Tensor) -> Beside:
    found: Beside = _all.setdefault(tensor, Beside())
    return found


def give(product: ops.Linear, tensors: Sequence[torch.Tensor], use: int, recipe: str) -> None:
    """Gives a product of a pipeline the state that is attached to `tensors` (see `Site`), or attaches a new one, if the recipe, as JSON, has state. Without
    `tensors` nothing is attached: the product creates a state of its own."""
    if not tensors:
        return
    length, site = recipe_state.history_length(recipe), Site.of(tensors, use)
    with _lock:
        beside = _beside(tensors[0])
        held = beside.states.get(site)
        label = site.label({id(tensor): _beside(tensor).loaded_as for tensor in tensors}) if beside.loaded_as else ""
        if not length:
            beside.stateless[site] = (json.loads(recipe) or {"name": "none"})["name"]
            if held is not None and label and site not in beside.used:
                warnings.warn(_wrong_recipe(str(label), beside.stateless[site]), stacklevel=2)  # no error: the first call may be validation under another recipe
            return
        if held is None and label:
            raise ValueError(_missing(str(label)))
        if held is not None:
            product._modules[recipe_state.NAME] = held
        beside.states[site] = recipe_state.of(vars(product), product._quantize_slots(), length)
        beside.used.add(site)


def recipe_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state that recipes keep for the products of a compiled model: with `DelayedScaling` their scales and histories of amaxes.

    Neither buffers nor `state_dict()` of the model contain this state: save both with a training run.

    >>> import torch, tandem
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    >>> compiled = tandem.compile(model, recipe=tandem.recipe.DelayedScaling(amax_history_len=4))
    >>> compiled(torch.randn(4, 16)).sum().backward()
    >>> {name: list(tensor.shape) for name, tensor in tandem.recipe_state_dict(model).items()}
    {'0.weight.forward.scale': [2], '0.weight.forward.amax_history': [4, 2], '0.weight.backward.scale': [1], '0.weight.backward.amax_history': [4, 1]}

    Args:
        model: the module, or the result of `torch.compile` for it. With `fully_shard` all ranks must call this function, as it gathers parameters.

    Returns:
        copies of the tensors by names such as "up.weight.forward.scale", with the name of the product's weight; an empty dict before the first call.
        Products of one x that became one product, and weights that are computed from several parameters, have all names: "q.weight+k.weight". "#2"
        marks the second product of a graph that reads the same parameters.
    """
    tensors = _tensors(model, "recipe_state_dict")
    names = _names(tensors)
    with _lock:
        states = {label: state for tensor in _once(tensors) for site, state in _beside(tensor).states.items() if (label := site.label(names))}
    return {f"{label}.{direction}.{part}": getattr(state._modules[direction], part).clone() for label, state in states.items() for direction, part in _PARTS}


def load_recipe_state_dict(model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Loads a result of `recipe_state_dict`, before or after the first call of the compiled model. An error changes nothing.

    Args:
        model: as for `recipe_state_dict`.
        state: a result of `recipe_state_dict`. If a history is longer than the recipe's, the newest rows count.
        strict: whether `state` must contain every product, and every product in it must run under a recipe that keeps state. For a product that was
            not called yet its first call checks this, and warns of a recipe without state. False: products that `state` lacks keep their state.

    Throws:
        ValueError: unknown or missing keys, other shapes, a recipe without state; an empty dict, unless a call has shown that the recipe keeps no state.
    """
    tensors = _tensors(model, "load_recipe_state_dict")
    if strict and not state and not any(_beside(tensor).stateless for tensor in _once(tensors)):
        raise ValueError(
            "load_recipe_state_dict: expected the state of products, got an empty dict, as recipe_state_dict gives it before the first call. Where the recipe keeps "
            "state, call the model once in training before its state is saved, and before torch.distributed.checkpoint loads into it; where it keeps none, load nothing."
        )
    given: dict[Site, dict[tuple[str, str], Any]] = {}
    for key, tensor in state.items():
        site, part = _parsed(key, tensors)
        given.setdefault(site, {})[part] = tensor
    names = _names(tensors)
    for site, parts in given.items():
        _check(str(site.label(names)), parts)
    with _lock:
        for beside in map(_beside, _once(tensors)) if strict else ():
            for site in beside.states.keys() - given.keys():
                if label := site.label(names):
                    raise ValueError(_missing(label))
            for site in (given.keys() & beside.stateless.keys()) - beside.states.keys():
                raise ValueError(_wrong_recipe(str(site.label(names)), beside.stateless[site]))
        for site, parts in given.items():
            length, slots = parts["forward", "amax_history"].shape
            fresh = RecipeState((slots, parts["backward", "scale"].shape[0]), length, "cpu")
            held = _beside(site.tensors[0]()).states.setdefault(site, fresh)
            held.load_state_dict({f"{direction}.{part}": tensor for (direction, part), tensor in parts.items()})
        for tensor in _once(tensors):
            _beside(tensor).loaded_as = names[id(tensor)] if strict else ""


def _missing(label: str) -> str:
    return (
        f"load_recipe_state_dict: expected the state of all products, got none of {label}. Load what was saved after a call of it, or pass strict=False, with which "
        "what has no state starts afresh."
    )


def _wrong_recipe(label: str, recipe: str) -> str:
    return (
        f"load_recipe_state_dict: expected a recipe that keeps state for {label}, as it was saved with, got {recipe}. Compile the model with that recipe, such as "
        "tandem.recipe.DelayedScaling(), or pass strict=False."
    )


def _parsed(key: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Site, tuple[str, str]]:
    label, *part = key.rsplit(".", 2)
    joined, _, use = label.partition("#")
    named = joined.split("+")
    if tuple(part) not in _PARTS or (use and not use.isdigit()) or not all(name in tensors for name in named):
        raise ValueError(
            f"load_recipe_state_dict: expected names of parameters of the model, each with .forward or .backward and .scale or .amax_history behind it, got {key!r}. "
            "Load the state of the same model."
        )
    return Site.of([tensors[name] for name in named], int(use or 1)), (part[0], part[1])


def _check(label: str, parts: Mapping[tuple[str, str], Any]) -> None:
    for direction, part in _PARTS:
        if (direction, part) not in parts:
            raise ValueError(_missing(f"{label}.{direction}.{part}"))
    for direction, slots in (("forward", 2), ("backward", 1)):
        scale, history = (parts[direction, part] for part in ("scale", "amax_history"))
        shapes = [list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in (scale, history)]
        if shapes[0] != [slots] or len(shapes[1]) != 2 or shapes[1][1] != slots or shapes[1][0] == 0:
            raise ValueError(
                f"load_recipe_state_dict: expected {label}.{direction} with scale [{slots}] and amax_history [length, {slots}], got {shapes[0]} and {shapes[1]}. "
                "Load what recipe_state_dict has given."
            )


def _tensors(model: torch.nn.Module, of: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers that products of a model read, under each of their names. For `fully_shard` these are the gathered parameters."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{of}: expected a module, got {type(model).__name__}. Pass the model, or what torch.compile has made of it.")
    found = dict(_named(model))
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            found |= {name: tensor for name, tensor in _named(model) if not isinstance(tensor, DTensor)}
            module.reshard()
    return found


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for each in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        yield from ((name.replace("_orig_mod.", ""), tensor) for name, tensor in each)


def _names(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """The first name of each tensor, by identity."""
    return {id(tensor): name for name, tensor in reversed(tensors.items())}


def _once(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*{id(tensor): tensor for tensor in tensors.values()}.values()]
