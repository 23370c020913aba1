"""The ops between the product for queries, keys and values and the product after attention."""

from __future__ import annotations

import torch

from tandem.arguments import Fixed, flag, parameter_dtype, positive
from tandem.op_base.deferred import DeferredMixin
from tandem.ops.op import BasicOperation


class Rotary(BasicOperation):
    """Rotates queries and keys of x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] by angles of their positions; y has the shape and dtype of x.

    The last dimension of x holds the heads of queries, then of keys, then of values, as one `Linear` computes them; values are copied. Pairs of features
    are rotated as by `tandem.apply_rotary_pos_emb`: angles are float32, and each result is rounded once. Forward keeps nothing but `tables`, if given.

    >>> import torch
    >>> from tandem import ops
    >>> heads = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 1}
    >>> block = ops.Sequential(ops.Linear(64, 96), ops.Rotary(**heads), ops.Attention(**heads, causal=True), ops.Linear(64, 64))
    >>> block(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    tables = Fixed()

    _shown_names = ("num_heads", "head_dim", "num_kv_heads", "base")

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
        """Makes the op, which has no parameters.

        Args:
            num_heads: number of heads of queries.
            head_dim: features of a head.
            num_kv_heads: number of heads of keys, and of values; num_heads / num_kv_heads heads of queries share each; 0: num_heads.
            base: at least 1; the angle of pair i at a position is position base^(-2 i / rotated_features). Positions are 0, 1, ... along the last
                dimension but one.
            rotated_features: an even number; the first so many features of each head are rotated; 0: all of them.
            interleaved: whether the two features of a pair are neighbours; otherwise they lie rotated_features / 2 apart.
            tables: whether cosines and sines of the angles are two extra inputs. Models compute them once for all layers, with any scaling of
                positions. Each is [sequence, rotated_features] or broadcasts to [..., sequence, rotated_features], with one number for each
                feature of a pair. The tables must not require a gradient.
        """
        self.__dict__["num_extra_inputs"] = 2 * flag("Rotary", "tables", tables)
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.base, self.rotated_features, self.interleaved, self.tables = base, rotated_features, interleaved, tables


class Attention(BasicOperation):
    """y = softmax(scale q k^T + mask) v for each head: x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] -> y [..., sequence, num_heads head_dim].

    The last dimension of x holds the heads of queries, then of keys, then of values. On the CPU torch's flash attention runs both directions, so that not
    all scores are in memory at once: backward keeps x, y and one number for each row and head. A query that sees no key has y = 0.
    y has the dtype of autocast or x.

    >>> import torch
    >>> from tandem import ops
    >>> attention = ops.Attention(4, 16, mask=True)
    >>> is_word = torch.tensor([[True] * 10, [True] * 7 + [False] * 3])
    >>> attention(torch.randn(2, 10, 192), is_word[:, None, None]).shape
    torch.Size([2, 10, 64])
    """

    mask = Fixed()

    _shown_names = ("num_heads", "head_dim", "num_kv_heads", "causal")

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
        """Makes the op, which has no parameters.

        Args:
            num_heads, head_dim, num_kv_heads: as for `Rotary`.
            causal: whether each query sees only keys up to its own position.
            scale: at least 0; the factor of q k^T; 0: 1 / sqrt(head_dim).
            soft_cap: at least 0; scores become soft_cap tanh(scores / soft_cap) before any mask, and all of them are in memory at once; 0: scores
                stay unchanged.
            mask: whether a mask is an extra input, which broadcasts to [..., num_heads, sequence, sequence]: booleans, True where a query sees
                a key, or numbers that are added to scores. To compute the gradient of such numbers, all scores are in memory at once.
        """
        self.__dict__["num_extra_inputs"] = int(flag("Attention", "mask", mask))
        super().__init__()
        self.num_heads, self.head_dim, self.num_kv_heads = num_heads, head_dim, num_kv_heads
        self.causal, self.scale, self.soft_cap, self.mask = causal, scale, soft_cap, mask


class QKNorm(DeferredMixin, BasicOperation):
    """y = head / sqrt(mean(head^2) + eps) * weight, for each head of queries and of keys in x [..., sequence, (num_heads + 2 num_kv_heads) head_dim].

    `weight` is query_weight or key_weight, [head_dim] each; with `zero_centered_gamma` the factor is 1 + weight. y has the shape of x, and the dtype of
    autocast or of the weights; values are copied. The last dimension of x holds queries, keys and values as for `Rotary`, which follows this op.
    Forward keeps x and the weights.
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

    _shown_names = ("num_heads", "head_dim", "num_kv_heads", "eps", "zero_centered_gamma")

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
        """Makes norms whose factors are 1.

        Args:
            num_heads, head_dim, num_kv_heads: as for `Rotary`.
            eps: at least 0; added to the mean square of a head, in units of x squared.
            device: device of the parameters; None: torch's default device.
            dtype: dtype of the parameters; None: `torch.get_default_dtype()`.
            zero_centered_gamma: whether the factors are 1 + weight rather than weight.
            rounds_before_weight: as for `RMSNorm`.
        """
        super().__init__()
        self.head_dim = positive("QKNorm", "head_dim", head_dim, "Give the features of a head.")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.eps, self.zero_centered_gamma, self.rounds_before_weight = eps, zero_centered_gamma, rounds_before_weight
        dtype = parameter_dtype("QKNorm", dtype)
        for parameter in self._parameter_names:
            self.register_parameter(parameter, torch.nn.Parameter(torch.empty(self.head_dim, device=device, dtype=dtype)))
        self._give_first_values()
