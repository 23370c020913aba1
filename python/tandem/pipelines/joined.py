"""One operand of a product as several parameters with names of their own, stacked along the first dimension.

They are adjacent in one memory, each with a storage of its own, so that joining them needs no copy. If something moves them apart (a parameter is
replaced, a wrapper keeps parameters elsewhere), each call copies them, unless its products multiply each part where it lies; nothing else changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from tandem import _C
from tandem.pipelines.foreign import has_own_product
from tandem.quantized.tensor import QuantizedTensor, distinct

Split = Mapping[str, int] | Sequence[str]


def split_sizes(op: str, size_name: str, parts: Split, size: int, ranks: int = 1) -> dict[str, int]:
    """The sizes of the named parts on one of `ranks` ranks. Raises ValueError or TypeError for parts that do not fit.

    Args:
        op: name of the op, for errors.
        size_name: name of the size that is divided, for errors.
        parts: sizes by name, or names of parts of equal size. Underscores at the end of a name are removed.
        size: sum of all parts on all ranks.
        ranks: number of ranks that share each part evenly.
    """
    if not parts or isinstance(parts, str) or not isinstance(parts, (Mapping, Sequence)):
        kind = ValueError if isinstance(parts, (Mapping, Sequence)) else TypeError  # the types that TransformerEngine raises
        raise kind(f"{op}: expected parameters_split to be names, or sizes by name, got {parts!r}. Name the parts in their order.")
    given = list(parts)
    if wrong := [name for name in given if not isinstance(name, str) or not name.rstrip("_").isidentifier()]:
        raise ValueError(f"{op}: expected names in parameters_split that can be those of attributes, got {wrong[0]!r}. Use letters, digits and _.")
    names = [name.rstrip("_") for name in given]
    if len(set(names)) != len(names):
        raise ValueError(f"{op}: expected names in parameters_split that differ, got {', '.join(names)}. Rename one.")
    if isinstance(parts, Mapping):
        sizes = [parts[name] for name in given]
    elif size % len(names):
        raise ValueError(f"{op}: expected {size_name} that {len(names)} parts share evenly, got {size}. Give parameters_split as sizes by name.")
    else:
        sizes = [size // len(names)] * len(names)
    if any(isinstance(each, bool) or not isinstance(each, int) or each <= 0 for each in sizes) or sum(sizes) != size:
        raise ValueError(f"{op}: expected sizes in parameters_split > 0 that sum up to {size_name}, {size}, got {sizes}. Give those of the rows.")
    if any(each % ranks for each in sizes):
        raise ValueError(f"{op}: expected sizes in parameters_split that {ranks} ranks share evenly, got {sizes}. Use multiples of {ranks}.")
    return {name: each // ranks for name, each in zip(names, sizes, strict=True)}


def are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts follow each other in one memory."""
    if any(type(part) not in (torch.Tensor, torch.nn.Parameter) or part.is_meta or part.dim() == 0 for part in parts):
        return False
    return _C.memory_of_parts(parts) is not None


def laid_together(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Adjacent copies of the parts in one memory, each with a storage of its own; separate copies if the parts are on the meta device or fake."""
    if parts[0].is_meta or type(parts[0]) is not torch.Tensor:
        return [part.clone() for part in parts]
    return _C.laid_together(list(parts))


class _Whole(torch.Tensor):
    """Adjacent parts as one tensor, created at each read. Assigning its `data` copies the value into the parts."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        memory: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return memory

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        memory = self.data
        if value.shape != memory.shape or value.dtype != memory.dtype:
            raise ValueError(
                f"data: expected numbers for parts that stay the parameters they are, of shape {list(memory.shape)} and {memory.dtype}, got shape "
                f"{list(value.shape)} and {value.dtype}. Set the parts."
            )
        memory.copy_(value)


class _Together(torch.autograd.Function):
    """Adjacent parts as one tensor without a copy; backward splits its gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        return _C.memory_of_parts(parts).as_subclass(_Whole)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].split(ctx.rows)


def together(parts: Sequence[torch.Tensor], what: str = "") -> torch.Tensor:
    """The parts as one tensor: their memory if they are adjacent, otherwise a copy. If `what` is given, a warning says that it is a copy."""
    if torch.compiler.is_compiling():
        return torch.cat(list(parts))
    if not are_adjacent(parts):
        if what and not any(part.is_meta for part in parts):
            how = "are in codes" if any(isinstance(part, QuantizedTensor) for part in parts) else "lie apart"
            warnings.warn(
                f"tandem: expected {what} to be read of parts that lie one behind the other, got parts that {how}: what is read is a copy, and "
                "writing to it changes no part. Write to the parts.",
                stacklevel=3,
            )
        return torch.cat(list(parts))
    joined: torch.Tensor = _Together.apply(*parts)  # type: ignore[no-untyped-call]
    return joined


def bring_together(parts: Sequence[torch.nn.Parameter | None]) -> None:
    """Moves parameters, or their codes if these have the shape of the parameters, so that they are adjacent. The parameters stay the same objects.

    Each has a storage of its own over its part of the memory: libraries that save weights recognize shared ones by their storage, and keep one of them.
    Memory that is shared between processes is not moved.
    """
    if parts and all(isinstance(part, QuantizedTensor) for part in parts):
        return _bring_codes_together(parts)  # type: ignore[arg-type]
    present = [part for part in parts if part is not None and type(part) is torch.nn.Parameter]
    first = present[0] if present else None
    if first is None or len(present) != len(parts) or first.is_meta or are_adjacent(present):
        return
    if any(part.dtype != first.dtype or part.device != first.device or part.shape[1:] != first.shape[1:] for part in present):
        return
    if any(_is_shared(part) for part in present):
        return
    for part, own in zip(present, _C.laid_together(present), strict=True):
        part.data = own


def _is_shared(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_shared()


def _bring_codes_together(parts: Sequence[QuantizedTensor]) -> None:
    first = parts[0]
    alike = [(part.quantizer, part.dtype, part.device, part.shape[1:], [*distinct(part)]) for part in parts]
    if first.is_meta or any(each != alike[0] for each in alike):
        return
    for name in distinct(first):
        pieces = [getattr(part, name) for part in parts]
        if not name.endswith("data") or any(piece.shape != part.shape for piece, part in zip(pieces, parts, strict=True)) or are_adjacent(pieces):
            continue
        if any(_is_shared(piece) for piece in pieces):
            continue
        for part, own, piece in zip(parts, _C.laid_together(pieces), pieces, strict=True):
            for each in ("rowwise_data", "columnwise_data"):  # both may be one tensor
                if getattr(part, each) is piece:
                    setattr(part, each, own)


class JoinedMixin:
    """For modules with operands that are several parameters. `_joined` holds the names of these parameters by operand."""

    def _take(self: Any, part: Any, parts: Mapping[str, int] | None, names: Mapping[str, str], device: torch.device | str | None) -> dict[str, str]:
        """Creates parameters like those of `part`, an op on the meta device, and returns their names by the op's. `names` are the module's names by the
        op's, and `parts` the rows by name of what a parameter is split into, in the op too; None: no parameter is."""
        in_owner, known = {}, self.__dict__
        for own, ours in names.items():
            like = part.get_parameter(own)
            value = torch.empty(like.shape, device=device, dtype=like.dtype)
            if parts is None or not isinstance(part, JoinedMixin):
                self.register_parameter(ours, torch.nn.Parameter(value))
                in_owner[own] = ours
                continue
            rows = {f"{each}_{ours}": size for each, size in parts.items()}
            for name, each in zip(rows, laid_together(value.split([*rows.values()])), strict=True):
                self.register_parameter(name, torch.nn.Parameter(each))
                in_owner[name] = name
            part.__dict__.update(_parameter_names=tuple(rows), _joins=(len(rows),), _joined={own: tuple(rows)})
            known.update(_joined={**known.get("_joined", {}), own: tuple(rows)}, _rows_of_parts={**known.get("_rows_of_parts", {}), **rows})
        return in_owner

    def _check_parts(self) -> None:
        """Raises ValueError if a part has another number of rows than at construction. Callers use it after a call has failed."""
        for name, rows in self.__dict__.get("_rows_of_parts", {}).items():
            part = getattr(self, name, None)
            if part is not None and (part.dim() == 0 or part.shape[0] != rows):
                raise ValueError(
                    f"{type(self).__name__}: expected {name} with {rows} rows, as parameters_split says, got shape {list(part.shape)}. Assign a "
                    "tensor with as many, or build another module."
                )

    def _bring_together(self: Any) -> None:
        for operand in self.__dict__.get("_joined", {}):
            bring_together(self._parts_of(operand))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._bring_together()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._bring_together()

    def __setattr__(self, name: str, value: Any) -> None:
        joined = self.__dict__.get("_joined")
        if joined and name in joined and value is not None:
            raise AttributeError(
                f"{type(self).__name__}: expected a value for one of {', '.join(joined[name])}, which {name} consists of, got one for {name}. "
                f"Set the parts, or copy into {name}."
            )
        before = self.__dict__.get("_parameters", {}).get(name) if name == "weight" else None
        super().__setattr__(name, value)
        if name == "weight" and (has_own_product(value) or has_own_product(before)):
            self._tell()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        joined = self.__dict__.get("_joined")
        if joined and name in joined:
            return together([getattr(self, each) for each in joined[name]], f"{type(self).__name__}.{name}")
        return super().__getattr__(name)  # type: ignore[misc]
