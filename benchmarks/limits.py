"""Limits that no kernel can beat: the times of simple vector loops that move the least bytes, and of the vector exponential."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.timing import interleaved

ROOT = Path(__file__).resolve().parent.parent
_EXP_ELEMENTS = 4096  # they fit into the first-level cache


@functools.cache
def _library() -> ctypes.CDLL:
    found = sorted((ROOT / "build").glob("*/benchmarks/liblimits.so"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"limits: expected {ROOT}/build/release/benchmarks/liblimits.so, got none. Run `make bench`, which builds it.")
    return ctypes.CDLL(str(found[-1]))


def _pointers(tensors: list[torch.Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _aligned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)  # torch aligns to 64 bytes


class Loops:
    """Simple vector loops that read `inputs` arrays and write `outputs` arrays of one shape, with cold inputs, on torch's number of threads.

    Pass `candidates` to `interleaved` together with the kernels. `seconds` is the least time of three loops: they write new outputs, reused outputs, and
    reused outputs around the cache.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, inputs: int, outputs: int, total_bytes: int = 160 << 20) -> None:
        bytes_each = torch.Size(shape).numel() * dtype.itemsize
        sets = total_bytes // (inputs * bytes_each) + 2
        self._inputs = [[torch.ones(shape, dtype=dtype) for _ in range(inputs)] for _ in range(sets)]
        self._pointers = [_pointers(tensors) for tensors in self._inputs]
        self._kept = [_aligned(shape, dtype) for _ in range(outputs)]
        self._kept_pointers = _pointers(self._kept)
        self._shape, self._dtype, self._bytes, self._turn = shape, dtype, bytes_each, 0
        self._threads = torch.get_num_threads()

    def _move(self, outputs: ctypes.Array, around_cache: bool) -> None:
        self._turn = (self._turn + 1) % len(self._inputs)
        inputs = self._pointers[self._turn]
        done = _library().tandem_limits_move(inputs, ctypes.c_size_t(len(inputs)), outputs, ctypes.c_size_t(len(outputs)),
                                             ctypes.c_size_t(self._bytes), int(around_cache), ctypes.c_uint(self._threads))
        if not done:
            raise RuntimeError("limits: expected libtorch's OpenMP runtime, got none. Import torch before this library.")

    def _into_new(self) -> None:
        outputs = [_aligned(self._shape, self._dtype) for _ in self._kept]
        self._move(_pointers(outputs), around_cache=False)

    @property
    def candidates(self) -> dict[str, Callable[[], object]]:
        return {
            "loop, new outputs": self._into_new,
            "loop, kept outputs": lambda: self._move(self._kept_pointers, around_cache=False),
            "loop, around the cache": lambda: self._move(self._kept_pointers, around_cache=True),
        }

    def seconds(self, times: dict[str, float]) -> float:
        return min(times[name] for name in self.candidates)


@functools.cache
def exponential_seconds(elements: int, dtype: torch.dtype) -> float:
    """Seconds for `elements` exponentials of cached data on torch's threads: the faster of torch.exp and the exponential of the kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, y, repeats = torch.rand(_EXP_ELEMENTS), torch.empty(_EXP_ELEMENTS), 200
    own = lambda: _library().tandem_limits_exp(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_size_t(_EXP_ELEMENTS),  # noqa: E731
                                               int(dtype.itemsize == 2), ctypes.c_size_t(repeats))
    own()
    error = (y - torch.exp(-x)).abs().max().item()
    if error > 2**-14:
        raise RuntimeError(f"limits: expected exponentials within 2^-14, got an error of {error}. The loop does not compute what it times.")
    times = interleaved({"torch": lambda: torch.exp(x, out=y), "own": own})
    torch.set_num_threads(threads)
    return min(times["torch"], times["own"] / repeats) / _EXP_ELEMENTS * elements / threads
