"""The state of recipes of compiled models: scales and histories of amaxes of their products.

It lies beside the tensors that a product reads, not in a graph: graphs of other shapes and of evaluation go on with it, and it ends with the model.
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
    """A product: the tensors of the model that its weight is or is computed of, and which of the products of its graph that read these it is."""

    tensors: tuple[WeakIdRef, ...]
    use: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], use: int) -> Site:
        return cls(tuple(map(WeakIdRef, tensors)), use)

    def told(self, names: Mapping[int, str]) -> str | None:
        """Its name, by those of the model's tensors; None where it is another model's."""
        found = [names.get(id(tensor())) for tensor in self.tensors]
        return None if None in found else "+".join(map(str, found)) + (f"#{self.use}" if self.use > 1 else "")


class Beside:
    """What lies beside a tensor: that of the products whose first it is."""

    def __init__(self) -> None:
        self.states: dict[Site, RecipeState] = {}
        self.used: set[Site] = set()  # products that a call has given it
        self.stateless: dict[Site, str] = {}  # products under recipes without state, with the recipe's name
        self.loaded_as = ""  # the tensor's name in a model for which all state has been loaded


_all: Any = WeakTensorKeyDictionary()
_lock = threading.RLock()


def _beside(tensor: torch.Tensor) -> Beside:
    found: Beside = _all.setdefault(tensor, Beside())
    return found


def give(product: ops.Linear, tensors: Sequence[torch.Tensor], use: int, recipe: str) -> None:
    """Gives a product of a pipeline its state, where the recipe, as JSON, has one. Without `tensors`, see `Site`, it alone has it."""
    if not tensors:
        return
    length, site = recipe_state.history_length(recipe), Site.of(tensors, use)
    with _lock:
        beside = _beside(tensors[0])
        held = beside.states.get(site)
        told = site.told({id(tensor): _beside(tensor).loaded_as for tensor in tensors}) if beside.loaded_as else ""
        if not length:
            beside.stateless[site] = (json.loads(recipe) or {"name": "none"})["name"]
            if held is not None and told and site not in beside.used:
                warnings.warn(_wrong_recipe(str(told), beside.stateless[site]), stacklevel=2)  # no error: validation may come first, under another recipe
            return
        if held is None and told:
            raise ValueError(_missing(str(told)))
        if held is not None:
            product._modules[recipe_state.NAME] = held
        beside.states[site] = recipe_state.of(vars(product), product._quantize_slots(), length)
        beside.used.add(site)


def recipe_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state that recipes keep for the products of a compiled model: under `DelayedScaling` their scales and histories of amaxes. It lies beside the
    model, in none of its buffers and not in its `state_dict()`: who saves a training run saves both.

    >>> import torch, tandem
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    >>> compiled = tandem.compile(model, recipe=tandem.recipe.DelayedScaling(amax_history_len=4))
    >>> compiled(torch.randn(4, 16)).sum().backward()
    >>> {name: list(tensor.shape) for name, tensor in tandem.recipe_state_dict(model).items()}
    {'0.weight.forward.scale': [2], '0.weight.forward.amax_history': [4, 2], '0.weight.backward.scale': [1], '0.weight.backward.amax_history': [4, 1]}

    Args:
        model: the module, or what `torch.compile` has made of it. Where `fully_shard` shards it all ranks call this: parameters are gathered.

    Returns:
        nothing before the first call; then copies, by the name of the parameter that the product multiplies by: "up.weight.forward.scale". Of products of one x, which are one, it is the names of all,
        "q.weight+k.weight", and so of a weight that is computed of several. "#2" follows where a graph multiplies by a parameter again.
    """
    tensors = _tensors(model, "recipe_state_dict")
    names = _names(tensors)
    with _lock:
        states = {told: state for tensor in _once(tensors) for site, state in _beside(tensor).states.items() if (told := site.told(names))}
    return {f"{told}.{direction}.{part}": getattr(state._modules[direction], part).clone() for told, state in states.items() for direction, part in _PARTS}


def load_recipe_state_dict(model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Loads what `recipe_state_dict` has given, before or after the first call of the compiled model. An error leaves all as it was.

    Args:
        model: as for `recipe_state_dict`.
        state: what was saved. Of a history that is longer than the recipe's the newest rows count.
        strict: whether the state of each product must be there, and each product for which there is one must run under a recipe that keeps it. Of products that
            were not called yet their first call tells, of another recipe by a warning. False: the state of others is left as it is.

    Throws:
        ValueError: unknown and missing keys, other shapes, a recipe without state; an empty dict, but where a call has shown that the recipe keeps none.
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
        _check(str(site.told(names)), parts)
    with _lock:
        for beside in map(_beside, _once(tensors)) if strict else ():
            for site in beside.states.keys() - given.keys():
                if told := site.told(names):
                    raise ValueError(_missing(told))
            for site in (given.keys() & beside.stateless.keys()) - beside.states.keys():
                raise ValueError(_wrong_recipe(str(site.told(names)), beside.stateless[site]))
        for site, parts in given.items():
            length, slots = parts["forward", "amax_history"].shape
            fresh = RecipeState((slots, parts["backward", "scale"].shape[0]), length, "cpu")
            held = _beside(site.tensors[0]()).states.setdefault(site, fresh)
            held.load_state_dict({f"{direction}.{part}": tensor for (direction, part), tensor in parts.items()})
        for tensor in _once(tensors):
            _beside(tensor).loaded_as = names[id(tensor)] if strict else ""


def _missing(told: str) -> str:
    return (
        f"load_recipe_state_dict: expected the state of all products, got none of {told}. Load what was saved after a call of it, or pass strict=False, with which "
        "what has no state starts afresh."
    )


def _wrong_recipe(told: str, recipe: str) -> str:
    return (
        f"load_recipe_state_dict: expected a recipe that keeps state for {told}, as it was saved with, got {recipe}. Compile the model with that recipe, such as "
        "tandem.recipe.DelayedScaling(), or pass strict=False."
    )


def _parsed(key: str, tensors: Mapping[str, torch.Tensor]) -> tuple[Site, tuple[str, str]]:
    told, *part = key.rsplit(".", 2)
    joined, _, use = told.partition("#")
    named = joined.split("+")
    if tuple(part) not in _PARTS or (use and not use.isdigit()) or not all(name in tensors for name in named):
        raise ValueError(
            f"load_recipe_state_dict: expected names of parameters of the model, each with .forward or .backward and .scale or .amax_history behind it, got {key!r}. "
            "Load the state of the same model."
        )
    return Site.of([tensors[name] for name in named], int(use or 1)), (part[0], part[1])


def _check(told: str, parts: Mapping[tuple[str, str], Any]) -> None:
    for direction, part in _PARTS:
        if (direction, part) not in parts:
            raise ValueError(_missing(f"{told}.{direction}.{part}"))
    for direction, slots in (("forward", 2), ("backward", 1)):
        scale, history = (parts[direction, part] for part in ("scale", "amax_history"))
        shapes = [list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in (scale, history)]
        if shapes[0] != [slots] or len(shapes[1]) != 2 or shapes[1][1] != slots or shapes[1][0] == 0:
            raise ValueError(
                f"load_recipe_state_dict: expected {told}.{direction} with scale [{slots}] and amax_history [length, {slots}], got {shapes[0]} and {shapes[1]}. "
                "Load what recipe_state_dict has given."
            )


def _tensors(model: torch.nn.Module, of: str) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model as products read them, by all their names."""
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
    """The first name of each."""
    return {id(tensor): name for name, tensor in reversed(tensors.items())}


def _once(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*{id(tensor): tensor for tensor in tensors.values()}.values()]
