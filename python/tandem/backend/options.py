"""The options of the backend."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from tandem.recipe import Recipe
from tandem.regions.memory_budget import budget_text


def _advice(name: object, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"Did you mean {near[0]}?" if near else "Leave it out."


@dataclass(frozen=True)
class Options:
    """How the backend builds pipelines for a model. Wrong types raise TypeError, other wrong values ValueError.

    Args:
        recipe: a recipe for all products, or a function of a module's path that returns a recipe or None; None: products are not quantized.
        memory_budget: limit on bytes that a pipeline keeps for backward per row of its main operand; None: the limit of `tandem.memory_budget`.
        exclude: paths of modules that no pipeline replaces, nor anything inside them; `*` matches any characters.
        rest: what runs the rest of the graph: "eager" or "inductor".
        logits: whether a model that returns logits and their loss returns the logits; False: it returns None for them, and they take no memory.
        verify: whether the first call of each pipeline compares results and gradients with the part of the graph that it replaces.
        require: least share of a graph's products that must be in pipelines, from 0 to 1, else compiling raises RuntimeError; None: any share.
    """

    recipe: Recipe | Callable[[str], Recipe | None] | None = None
    memory_budget: float | None = None
    exclude: tuple[str, ...] = ()
    rest: str = "eager"
    logits: bool = True
    verify: bool = False
    require: float | None = None

    def __post_init__(self) -> None:
        if self.recipe is not None and not isinstance(self.recipe, Recipe) and (not callable(self.recipe) or isinstance(self.recipe, type)):
            raise TypeError(f"compile: expected recipe to be a recipe, a function of a module's name or None, got {self.recipe!r}. Pass tandem.recipe.MXFP8BlockScaling(), or another.")
        if callable(self.recipe):
            try:
                inspect.signature(self.recipe).bind("")
            except TypeError as error:
                raise TypeError(f"compile: expected recipe to be a function of a module's name, got one that is called otherwise: {error}. Let it take the name alone.") from None
            except ValueError:  # of a function that has no signature
                pass
        budget_text(self.memory_budget)
        names = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
        names = tuple(names) if isinstance(names, Iterable) else (names,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"compile: expected exclude to be names of modules, got {self.exclude!r}. Pass names such as 'lm_head' or 'model.layers.0.*'.")
        object.__setattr__(self, "exclude", names)
        if self.rest not in ("eager", "inductor"):
            raise ValueError(f'compile: expected rest to be "eager" or "inductor", got {self.rest!r}. Name one of them.')
        for name in ("logits", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"compile: expected {name} to be True or False, got {getattr(self, name)!r}. Pass a bool.")
        if self.require is not None and (isinstance(self.require, bool) or not isinstance(self.require, (int, float)) or not 0 <= self.require <= 1):
            raise ValueError(f"compile: expected require to be a share from 0 to 1 or None, got {self.require!r}. Pass 0.9 for nine tenths of the products.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """The options in a mapping. An unknown name raises TypeError."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"compile: expected options among {', '.join(known)}, got {name!r}. {_advice(name, known)}")
        return cls(**given)

    def excludes(self, module: str) -> bool:
        """Whether a module, or a module that contains it, is excluded."""
        parts = module.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[:end]), name) for end in range(1, len(parts) + 1) for name in self.exclude)

    def names_of_no_module(self, modules: Iterable[str]) -> list[str]:
        """A message for each name in `exclude` that matches none of these modules."""
        known = sorted({name.replace("_orig_mod.", "") for name in modules} - {"", "_orig_mod"})
        wrong = [name for name in self.exclude if not any(fnmatch.fnmatchcase(module, name) for module in known)]
        return [f"compile: expected names of modules in exclude, got {name!r}, which matches none. {_advice(name, known)}" for name in wrong]

    def recipe_of(self, module: str) -> Recipe | None:
        """The recipe for products of a module."""
        if self.recipe is None or isinstance(self.recipe, Recipe):
            return self.recipe
        recipe = self.recipe(module)
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"compile: expected a recipe or None of the function recipe for {module!r}, got {recipe!r}. Return tandem.recipe.MXFP8BlockScaling(), or another.")
        return recipe


class GivenOptions(TypedDict, total=False):
    """`Options` as keyword arguments, for type checkers."""

    recipe: Recipe | Callable[[str], Recipe | None] | None
    memory_budget: float | None
    exclude: str | Iterable[str]
    rest: Literal["eager", "inductor"]
    logits: bool
    verify: bool
    require: float | None
