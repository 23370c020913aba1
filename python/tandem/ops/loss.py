"""The loss of a model with many classes."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from tandem.ops.arguments import Fixed, flag, parameter_dtype, positive
from tandem.ops.collective import CollectivesMixin, collectives, share
from tandem.ops.deferred import DeferredMixin
from tandem.ops.op import BasicOperation

Reduction = Literal["mean", "sum", "none"]


class LinearCrossEntropy(CollectivesMixin, DeferredMixin, BasicOperation):
    """The cross entropy of x weight^T + bias, without memory for these logits.

    The extra input holds the targets: the number of a class, int64, for each row of x [..., in_features]. With `reduction` "none" the losses are
    like the targets, else there is one: their sum, or that over the sum of what the rows weigh. A row weighs 1, or the `class_weight` of its target;
    one that is ignored weighs nothing. The mean of no rows is NaN, with gradients of zeros. Losses are float32, float64 where the weight is. Recipes do
    not quantize this product.

    With a `tensor_parallel_group` its ranks share the classes: each holds num_classes / size rows of weight, bias and class_weight, rank 0 the
    first. All ranks pass the same targets, which count all classes, and get the same losses and predictions; of each row a few numbers go between
    the ranks, never logits.

    >>> import torch
    >>> from tandem import ops
    >>> loss = ops.Sequential(ops.RMSNorm(16), ops.LinearCrossEntropy(16, 1000))
    >>> loss(torch.randn(2, 5, 16), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """

    num_extra_inputs = 1
    has_bias, has_class_weight, tensor_parallel_size, sequence_parallel = Fixed(), Fixed(), Fixed(), Fixed()

    weight: torch.nn.Parameter

    _kind = "linear_cross_entropy"
    _option_names = ("reduction", "ignore_index", "label_smoothing", "soft_cap", "z_loss")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        class_weight: torch.Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        soft_cap: float = 0.0,
        z_loss: float = 0.0,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes a head, whose weight is drawn as torch.nn.Linear draws it.

        Args:
            in_features: size of the last dimension of x.
            num_classes: how many there are on all ranks.
            bias: whether logits have a bias, which starts at zero.
            class_weight: a number for each class of this rank, by which its losses are multiplied; a parameter that is not trained.
            reduction: "mean", "sum" or "none".
            ignore_index: rows with this target have loss 0 and no gradient.
            label_smoothing: from 0 to 1; the share of a target that is spread over all classes.
            soft_cap: logits become soft_cap tanh(logits / soft_cap); 0: they stay.
            z_loss: at least 0; the factor of logsumexp(logits)^2 in the loss of a row; class weights do not multiply this term.
            tensor_parallel_group: the ranks that share the classes; None: this process has all.
            sequence_parallel: whether the ranks share the first dimension of x too, which is gathered; the targets are those of all ranks. Else all
                ranks hold x, and the gradient of x is the same on all.
            device: where the parameters are made; None: torch's default device.
            dtype: of weight and bias; None: `torch.get_default_dtype()`.
        """
        super().__init__()
        name = type(self).__name__
        self.in_features = positive(name, "in_features", in_features)
        self.num_classes = positive(name, "num_classes", num_classes, "Give the number of classes.")
        group = tensor_parallel_group
        before, after, size = collectives(name, None if group is None else "column", group, flag(name, "sequence_parallel", sequence_parallel))
        self._put_around(before, after)
        self.tensor_parallel_size, self.sequence_parallel = size, sequence_parallel and size > 1
        self.local_num_classes = share(name, "num_classes", self.num_classes, size)
        self.has_bias = flag(name, "bias", bias)
        self.has_class_weight = class_weight is not None
        self.reduction, self.ignore_index, self.label_smoothing, self.soft_cap, self.z_loss = reduction, ignore_index, label_smoothing, soft_cap, z_loss
        like: dict[str, Any] = {"device": device, "dtype": parameter_dtype(name, dtype)}
        self.weight = torch.nn.Parameter(torch.empty(self.local_num_classes, self.in_features, **like))
        if self.has_bias:
            self.bias = torch.nn.Parameter(torch.empty(self.local_num_classes, **like))
        if class_weight is not None:
            if class_weight.shape != (self.local_num_classes,):
                raise ValueError(f"{name}: expected class_weight of shape [{self.local_num_classes}], a number for each class of this rank, got {[*class_weight.shape]}. Pass one of this size.")
            self.class_weight = torch.nn.Parameter(class_weight.detach().to(device=device), requires_grad=False)
        self._parameter_names = ("weight", *["bias"] * self.has_bias, *["class_weight"] * self.has_class_weight)
        self._give_first_values()

    def reset_parameters(self) -> None:
        """Draws the weight from U(-1/sqrt(in_features), 1/sqrt(in_features)) and sets the bias to zero."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.has_bias:
            torch.nn.init.zeros_(self.bias)

    def _options(self) -> dict[str, Any]:
        options = {**super()._options(), "bias": self.has_bias, "class_weight": self.has_class_weight}
        return options if self.tensor_parallel_group is None else {**options, **shared_classes(self.tensor_parallel_group)}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.num_classes}, bias={self.has_bias}, reduction={self.reduction!r}"


def shared_classes(group: Any) -> dict[str, Any]:
    """Options of a loss whose classes the ranks of `group` share."""
    return {"group": group.group_name, "group_size": group.size(), "rank": torch.distributed.get_rank(group)}


class LinearCrossEntropyWithPredictions(LinearCrossEntropy):
    """The same, and as extra output the class of the largest logit of each row, int64, of ignored rows too.

    >>> import torch
    >>> from tandem import ops
    >>> targets = torch.randint(1000, (5,))
    >>> loss, predictions = ops.LinearCrossEntropyWithPredictions(16, 1000)(torch.randn(5, 16), targets)
    >>> accuracy = (predictions == targets).float().mean()
    """

    num_extra_outputs = 1

    _kind = "linear_cross_entropy_with_predictions"
