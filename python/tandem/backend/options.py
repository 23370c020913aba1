"""What a user may ask of the backend."""

from __future__ import annotations

import difflib
import fnmatch
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
    """How pipelines of a model are made.

    Args:
        recipe: what products are quantized by; or a function of a module's name that returns a recipe or None; None: not at all.
        memory_budget: bytes that a pipeline keeps for backward per row of its main input; None: those of `tandem.memory_budget`.
        exclude: names of modules that stay as they are, with all inside them; `*` stands for any characters.
        rest: what runs the rest of the graph: "eager" or "inductor".
        logits: whether models that return a loss of logits return these too; False: None in their place, and no memory for them.
        verify: whether each pipeline is compared, in its first call, with the part of the graph whose place it takes: results and gradients.
        require: the least share of the products of a graph that must be in pipelines, from 0 to 1; None: any.
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
        """Those that a mapping names."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"compile: expected options among {', '.join(known)}, got {name!r}. {_advice(name, known)}")
        return cls(**given)

    def excludes(self, module: str) -> bool:
        """Whether a module, or one that it is in, is excluded."""
        parts = module.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[:end]), name) for end in range(1, len(parts) + 1) for name in self.exclude)

    def names_of_no_module(self, modules: Iterable[str]) -> list[str]:
        """What to say of each name in `exclude` that matches none of these."""
        known = sorted({name.replace("_orig_mod.", "") for name in modules} - {"", "_orig_mod"})
        wrong = [name for name in self.exclude if not any(fnmatch.fnmatchcase(module, name) for module in known)]
        return [f"compile: expected names of modules in exclude, got {name!r}, which matches none. {_advice(name, known)}" for name in wrong]

    def recipe_of(self, module: str) -> Recipe | None:
        """The recipe of products of a module."""
        if self.recipe is None or isinstance(self.recipe, Recipe):
            return self.recipe
        recipe = self.recipe(module)
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"compile: expected a recipe or None of the function recipe for {module!r}, got {recipe!r}. Return tandem.recipe.MXFP8BlockScaling(), or another.")
        return recipe


class GivenOptions(TypedDict, total=False):
    """`Options` as keywords, for who checks types."""

    recipe: Recipe | Callable[[str], Recipe | None] | None
    memory_budget: float | None
    exclude: str | Iterable[str]
    rest: Literal["eager", "inductor"]
    logits: bool
    verify: bool
    require: float | None
