"""What stands between the product of queries, keys and values and the product behind attention."""

from __future__ import annotations

import torch

from tandem.ops.arguments import Fixed, flag, parameter_dtype, positive
from tandem.ops.deferred import DeferredMixin
from tandem.ops.op import BasicOperation


class Rotary(BasicOperation):
    """Queries and keys of x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] turned by the angles of their positions; y like x.

    x holds queries, keys and values side by side, a head behind the other, as one `Linear` makes them; values stay. Pairs of features are turned as by
    `tandem.apply_rotary_pos_emb`: angles are float32, and what is turned is rounded once. Backward keeps nothing but tables that are given.

    >>> import torch
    >>> from tandem import ops
    >>> heads = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 1}
    >>> block = ops.Sequential(ops.Linear(64, 96), ops.Rotary(**heads), ops.Attention(**heads, causal=True), ops.Linear(64, 64))
    >>> block(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    num_extra_inputs = 0
    tables = Fixed()

    _kind = "rotary"
    _option_names = ("num_heads", "head_dim", "num_kv_heads", "base", "rotated_features", "interleaved", "tables")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int = 0,
        base: float = 10000.0,
        rotated_features: int = 0,
        interleaved: bool = False,
        tables: bool = False,
    ) -> None:
        """Makes the op; it has no parameters.

        Args:
            num_heads: heads of queries.
            head_dim: features of a head.
            num_kv_heads: heads of keys and of values, which as many queries each share; 0: num_heads.
            base: at least 1; the angle of pair i at a position is position base^(-2 i / rotated_features), for positions 0, 1, ... along the last
                dimension but one.
            rotated_features: how many features of a head are turned, the first ones, an even number; 0: all.
            interleaved: whether the features of a pair are neighbours; else they are half of what is turned apart.
            tables: whether cosines and sines of the angles are extra inputs, as most models make them once for all of their layers and however
                positions are scaled: each [sequence, rotated_features] or what broadcasts to [..., sequence, rotated_features], a number for
                both features of a pair. They must need no gradient.
        """
        self.__dict__["num_extra_inputs"] = 2 * flag("Rotary", "tables", tables)
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.base, self.rotated_features, self.interleaved, self.tables = base, rotated_features, interleaved, tables

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}, base={self.base}"


class Attention(BasicOperation):
    """y [..., sequence, num_heads head_dim] of x [..., sequence, (num_heads + 2 num_kv_heads) head_dim]: softmax(scale q k^T + mask) v, head by head.

    x holds queries, keys and values as for `Rotary`. By torch's flash attention on the CPU, in both directions and for shared keys, no scores come to memory: backward
    keeps x, y and a number for each row and head. A query that sees no key has y = 0.

    >>> import torch
    >>> from tandem import ops
    >>> attention = ops.Attention(4, 16, mask=True)
    >>> is_word = torch.tensor([[True] * 10, [True] * 7 + [False] * 3])
    >>> attention(torch.randn(2, 10, 192), is_word[:, None, None]).shape
    torch.Size([2, 10, 64])
    """

    num_extra_inputs = 0
    mask = Fixed()

    _kind = "attention"
    _option_names = ("num_heads", "head_dim", "num_kv_heads", "causal", "scale", "soft_cap", "mask")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int = 0,
        causal: bool = False,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        mask: bool = False,
    ) -> None:
        """Makes the op; it has no parameters.

        Args:
            num_heads, head_dim, num_kv_heads: as of `Rotary`.
            causal: whether no query sees keys behind it.
            scale: at least 0; the factor of q k^T; 0: 1 / sqrt(head_dim).
            soft_cap: at least 0; scores become soft_cap tanh(scores / soft_cap) before any mask, and come to memory, all of them at once; 0: they
                stay.
            mask: whether a mask is an extra input, which broadcasts to [..., num_heads, sequence, sequence]: booleans, True where a query sees
                a key, or numbers that are added to scores, whose gradient has all scores in memory.
        """
        self.__dict__["num_extra_inputs"] = int(flag("Attention", "mask", mask))
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.causal, self.scale, self.soft_cap, self.mask = causal, scale, soft_cap, mask

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}, causal={self.causal}"


class QKNorm(DeferredMixin, BasicOperation):
    """Each head of queries and keys of x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] over its root mean square, times a weight; y like x.

    For each head y = head / sqrt(mean(head^2) + eps) * query_weight or key_weight [head_dim], or * (1 + weight) with `zero_centered_gamma`. x holds
    queries, keys and values as for `Rotary`, before which this stands; values stay. Backward keeps x alone.

    >>> import torch
    >>> from tandem import ops
    >>> heads = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 1}
    >>> block = ops.Sequential(ops.Linear(64, 96), ops.QKNorm(**heads), ops.Rotary(**heads), ops.Attention(**heads, causal=True))
    >>> block(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    query_weight: torch.nn.Parameter
    key_weight: torch.nn.Parameter
    head_dim = Fixed()

    _kind = "qk_norm"
    _parameter_names = ("query_weight", "key_weight")
    _option_names = ("num_heads", "num_kv_heads", "eps", "zero_centered_gamma", "rounds_before_weight")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int = 0,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        rounds_before_weight: bool = False,
    ) -> None:
        """Makes norms that do not scale.

        Args:
            num_heads, head_dim, num_kv_heads: as of `Rotary`.
            eps: at least 0; added to the mean square of a head, in units of x squared.
            device: where the parameters are made; None: torch's default device.
            dtype: of the parameters; None: `torch.get_default_dtype()`.
            zero_centered_gamma: whether the factors are 1 + weight rather than weight.
            rounds_before_weight: as of `RMSNorm`.
        """
        super().__init__()
        self.head_dim = positive("QKNorm", "head_dim", head_dim, "Give the features of a head.")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.eps, self.zero_centered_gamma, self.rounds_before_weight = eps, zero_centered_gamma, rounds_before_weight
        dtype = parameter_dtype("QKNorm", dtype)
        for parameter in self._parameter_names:
            self.register_parameter(parameter, torch.nn.Parameter(torch.empty(self.head_dim, device=device, dtype=dtype)))
        self._give_first_values()

    def reset_parameters(self) -> None:
        """Sets the parameters so that the norms do not scale."""
        for parameter in (self.query_weight, self.key_weight):
            torch.nn.init.constant_(parameter, 0.0 if self.zero_centered_gamma else 1.0)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}, eps={self.eps}, "
            f"zero_centered_gamma={self.zero_centered_gamma}"
        )
