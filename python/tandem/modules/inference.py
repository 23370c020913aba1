"""`InferenceParams`: a cache of keys and values for generation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from tandem.arguments import positive
from tandem.quantized.views import has_tangent, levels


class InferenceParams:
    """A cache of the keys and values of all positions so far, by layer. The caller adds the length of each step to `sequence_len_offset`.

    >>> import torch, tandem
    >>> layer = tandem.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, layer_number=1).eval()
    >>> x, cache = torch.randn(6, 1, 32), tandem.InferenceParams(1, 8)
    >>> with torch.no_grad():
    ...     pieces = []
    ...     for piece in x.split([4, 1, 1]):
    ...         pieces.append(layer(piece, inference_params=cache))
    ...         cache.sequence_len_offset += len(piece)
    ...     torch.allclose(torch.cat(pieces), layer(x), atol=1e-5)
    True
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        """Creates an empty cache. The first call of each layer allocates memory for its keys and values.

        Args:
            max_batch_size: largest number of sequences.
            max_sequence_length: largest number of positions of a sequence.
        """
        self.max_batch_size = positive("InferenceParams", "max_batch_size", max_batch_size)
        self.max_sequence_length = positive("InferenceParams", "max_sequence_length", max_sequence_length)
        self.sequence_len_offset = 0  # positions that earlier steps have written; the caller adds to it, once per step
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._writers: dict[int, weakref.ref[Any]] = {}  # the module that writes under each layer number
        self._recorded: dict[tuple[int, int], int] = {}  # by layer and sequence: the first position whose key or value required a gradient
        self._dual: dict[tuple[int, int], int] = {}  # by layer and sequence: the first position whose key or value had a tangent

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writers": {}}  # a copy of the cache may serve a copy of the model, whose modules are other objects

    def swap_key_value_dict(self, batch_indices: torch.Tensor) -> None:
        """Reorders the cached sequences, for beam search.

        Args:
            batch_indices: integers [max_batch_size]: sequence i of the result is sequence batch_indices[i]. Another length raises ValueError.
        """
        if len(batch_indices) != self.max_batch_size:
            raise ValueError(f"InferenceParams: expected an index for each of {self.max_batch_size} sequences, got {len(batch_indices)}. Name all of them.")
        for layer, (key, value) in self.key_value_memory_dict.items():
            self.key_value_memory_dict[layer] = key[:, batch_indices], value[:, batch_indices]
        for known in (self._recorded, self._dual):
            for (layer, _), first in [*known.items()]:  # any sequence may now hold the position, as the indices are not read
                known.update({(layer, row): min(first, known.get((layer, row), first)) for row in range(self.max_batch_size)})

    def step(self, layer: int, key: torch.Tensor, value: torch.Tensor, writer: object | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values of new positions, and returns the keys and values of all positions so far.

        All tensors are [sequence, batch, heads, features]. Only new positions have gradients and tangents; keys and values of earlier calls are constants.

        Args:
            layer: number of the layer.
            key: keys of the new positions.
            value: values of the new positions.
            writer: the module that calls. While it lives no other module may write under this number; None: no check.

        Raises:
            ValueError: more positions or sequences than there is room for, offsets that are no integers from 0, another module has written the layer.
            RuntimeError: earlier keys or values had tangents, and forward-mode differentiation is on. Backward raises it for earlier gradients.
        """
        for name in ("sequence_len_offset", "batch_size_offset"):
            offset = getattr(self, name)
            if not isinstance(offset, int) or offset < 0:
                raise ValueError(f"InferenceParams: expected {name} to be a whole number of at least 0, got {offset!r}. Count what is there already.")
        begin, end = self.sequence_len_offset, self.sequence_len_offset + key.shape[0]
        first, last = self.batch_size_offset, self.batch_size_offset + key.shape[1]
        if end > self.max_sequence_length or last > self.max_batch_size:
            raise ValueError(
                f"InferenceParams: expected at most {self.max_sequence_length} positions of {self.max_batch_size} sequences, got {end} of {last}. "
                "Make it larger."
            )
        self._claim(layer, writer)
        rows = {(layer, row) for row in range(first, last)}
        is_recording, is_dual = torch.is_grad_enabled(), has_tangent(key) or has_tangent(value)
        has_lost_tangents = _note(self._dual, rows, begin, is_dual)
        if has_lost_tangents and forward_ad._current_level >= 0:  # type: ignore[attr-defined]
            raise RuntimeError(
                "InferenceParams: expected tangents of keys and values of one call, got a call behind one whose keys and values came with tangents, which are "
                "not kept. Call the layer once for the whole sequence, or make earlier calls without tangents."
            )
        has_lost_gradients = _note(self._recorded, rows, begin, is_recording and any(t.requires_grad for t in (*levels(key), *levels(value))))
        if layer not in self.key_value_memory_dict:
            sizes = self.max_sequence_length, self.max_batch_size
            self.key_value_memory_dict[layer] = key.new_zeros(*sizes, *key.shape[2:]), value.new_zeros(*sizes, *value.shape[2:])
        old_key, old_value = self.key_value_memory_dict[layer]
        memory = _writable(old_key, key), _writable(old_value, value)
        self.key_value_memory_dict[layer] = memory
        result = []
        for kept, new in zip(memory, (key, value), strict=True):
            kept[begin:end, first:last] = new.detach()
            if is_recording or is_dual:  # a copy: a later step writes the cache, which backward must not read, and the cache holds no tangents
                y = torch.cat((kept[:begin, first:last].detach().to(new.dtype), new))
                if is_recording and has_lost_gradients:  # the hook sits on the result, as backward never reaches the cached positions
                    for each in [t for t in levels(y) if t.requires_grad] or [y.requires_grad_()]:
                        each.register_hook(_refuse_gradient)
                result.append(y)
            else:
                result.append(kept[:end, first:last].to(new.dtype))
        return result[0], result[1]

    def _claim(self, layer: int, writer: object | None) -> None:
        """Raises ValueError if another module writes under this number. If that module is gone and a sequence begins, the cache of the layer is dropped."""
        known = self._writers.get(layer) if layer in self.key_value_memory_dict else None
        owner = None if known is None else known()
        if writer is None or owner is writer:
            return
        if known is not None and (owner is not None or self.sequence_len_offset):
            raise ValueError(
                f"InferenceParams: expected the layer that has written keys and values under layer_number {layer} before, got another one. Give each "
                "layer a layer_number of its own, and each model InferenceParams of its own."
            )
        if known is not None:
            del self.key_value_memory_dict[layer]
        self._writers[layer] = weakref.ref(writer)


def _note(known: dict[tuple[int, int], int], rows: set[tuple[int, int]], begin: int, comes: bool) -> bool:
    """Whether `known` has a position before `begin` for one of these rows. Positions from `begin` on are overwritten now; if it `comes`, they are noted."""
    for row in [row for row, first in known.items() if row in rows and first >= begin]:
        del known[row]
    is_earlier = any(row in rows for row in known)
    if comes:
        known.update({row: known.get(row, begin) for row in rows})
    return is_earlier


def _writable(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`kept`, or a copy of it: in the wider dtype of `new`, as torch.autocast may give it, or if `kept` is an inference tensor outside of inference mode."""
    wide = torch.promote_types(kept.dtype, new.dtype)
    is_closed = not is_dynamo_compiling() and kept.is_inference() and not torch.is_inference_mode_enabled()  # Dynamo cannot ask
    return kept.to(wide, copy=True) if is_closed else kept.to(wide)


def _refuse_gradient(grad: torch.Tensor) -> None:
    raise RuntimeError(
        "InferenceParams: expected gradients of keys and values of one call, got one of keys and values that an earlier call has written, whose "
        "graph is not kept. Call the layer once for the whole sequence, or make earlier calls under torch.no_grad()."
    )
