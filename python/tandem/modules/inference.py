"""`InferenceParams`: the keys and values of a sequence that is generated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tandem.ops.arguments import positive


class InferenceParams:
    """Keys and values of a sequence that is generated, by layer.

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
        """Makes room for nothing yet: each layer does at its first call.

        Args:
            max_batch_size: how many sequences there may be.
            max_sequence_length: how long they may become.
        """
        self.max_batch_size = positive("InferenceParams", "max_batch_size", max_batch_size)
        self.max_sequence_length = positive("InferenceParams", "max_sequence_length", max_sequence_length)
        self.sequence_len_offset = 0  # positions that are there already; who generates moves it on, once per step
        self.batch_size_offset = 0
        self.key_value_memory_dict: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._writers: dict[int, weakref.ref[Any]] = {}  # of the layers in the dictionary
        self._recorded: set[tuple[int, int]] = set()  # layers and sequences, some of whose keys and values have come with a gradient

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writers": {}}  # a copy may serve a copy of the model

    def swap_key_value_dict(self, batch_indices: torch.Tensor) -> None:
        """Reorders the sequences, as a beam search does."""
        for layer, (key, value) in self.key_value_memory_dict.items():
            self.key_value_memory_dict[layer] = key[:, batch_indices], value[:, batch_indices]
        self._recorded |= {(layer, row) for layer, _ in self._recorded for row in range(self.max_batch_size)}  # any of them, without a look at indices

    def step(self, layer: int, key: torch.Tensor, value: torch.Tensor, writer: object | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes up keys and values [sequence, batch, heads, features] of new positions; those of all positions so far.

        Gradients reach the new positions. Those of earlier calls count as constants, and where they came with a gradient, backward says so.

        Args:
            layer: the number under which they are kept.
            key: of the new positions.
            value: likewise.
            writer: the module that asks, which is then the only one to write under this number; None: any may.
        """
        begin, end = self.sequence_len_offset, self.sequence_len_offset + key.shape[0]
        first, last = self.batch_size_offset, self.batch_size_offset + key.shape[1]
        if end > self.max_sequence_length or last > self.max_batch_size:
            raise ValueError(
                f"InferenceParams: expected at most {self.max_sequence_length} positions of {self.max_batch_size} sequences, got {end} of {last}. "
                "Make it larger."
            )
        self._claim(layer, writer)
        if layer not in self.key_value_memory_dict:
            sizes = self.max_sequence_length, self.max_batch_size
            self.key_value_memory_dict[layer] = key.new_zeros(*sizes, *key.shape[2:]), value.new_zeros(*sizes, *value.shape[2:])
        old_key, old_value = self.key_value_memory_dict[layer]
        memory = _writable(old_key, key), _writable(old_value, value)
        self.key_value_memory_dict[layer] = memory
        rows = {(layer, row) for row in range(first, last)}
        if not begin:
            self._recorded -= rows
        is_recording, is_constant = torch.is_grad_enabled(), self._recorded.isdisjoint(rows)
        if is_recording and (key.requires_grad or value.requires_grad):
            self._recorded |= rows
        result = []
        for kept, new in zip(memory, (key, value), strict=True):
            kept[begin:end, first:last] = new.detach()
            if is_recording:  # what backward reads is no memory that a later step writes
                earlier = kept[:begin, first:last].detach().to(new.dtype)
                if not is_constant:
                    earlier.requires_grad_().register_hook(_refuse_gradient)
                result.append(torch.cat((earlier, new)))
            else:
                result.append(kept[:end, first:last].to(new.dtype))
        return result[0], result[1]

    def _claim(self, layer: int, writer: object | None) -> None:
        """Raises where another module writes under this number. One that is gone makes room where a sequence begins."""
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


def _writable(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`kept`, or a copy where `new` is wider, as behind torch.autocast, or where inference mode has made it and is over."""
    wide = torch.promote_types(kept.dtype, new.dtype)
    is_closed = not is_dynamo_compiling() and kept.is_inference() and not torch.is_inference_mode_enabled()  # Dynamo cannot ask
    return kept.to(wide, copy=True) if is_closed else kept.to(wide)


def _refuse_gradient(grad: torch.Tensor) -> None:
    raise RuntimeError(
        "InferenceParams: expected gradients of keys and values of one call, got one of keys and values that an earlier call has written, whose "
        "graph is not kept. Call the layer once for the whole sequence, or make earlier calls under torch.no_grad()."
    )


__all__ = ["InferenceParams"]
