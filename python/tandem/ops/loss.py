"""The losses of a model with many classes, as ops."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from tandem.arguments import Fixed, flag, parameter_dtype, positive
from tandem.op_base.deferred import DeferredMixin
from tandem.ops.collective import CollectivesMixin, collectives, share
from tandem.ops.op import BasicOperation

Reduction = Literal["mean", "sum", "none"]


class CrossEntropy(BasicOperation):
    """y = mean of cross_entropy(x, targets), where x [..., num_classes] holds logits, as of a model that returns them too.

    The extra input `targets` holds the class, int64, of each row. With `reduction` "none" y has the shape of the targets. "sum" adds the losses of all
    rows, and "mean" divides this sum by the sum of the rows' factors: 1 or the `class_weight` of the target, and 0 for an ignored row. The mean of
    no rows is NaN, with gradients of zeros. y is float32, or float64 if x is float64; 16-bit logits are read as they are. Forward computes loss and
    gradient in one pass, so that backward has only a factor to multiply by. `LinearCrossEntropy` computes the logits too, and never has all in memory.

    With a `tensor_parallel_group` its ranks share the classes: x and `class_weight` hold those of this rank, in the order of ranks. All ranks pass the
    same targets, which count all classes, and get the same losses.

    >>> import torch
    >>> from tandem import ops
    >>> loss = ops.Sequential(ops.Linear(16, 1000), ops.CrossEntropy(label_smoothing=0.1))
    >>> loss(torch.randn(2, 5, 16), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """

    has_class_weight, tensor_parallel_size = Fixed(), Fixed()

    _option_names = ("reduction", "ignore_index", "label_smoothing", "soft_cap", "z_loss")

    def __init__(
        self,
        *,
        class_weight: torch.Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        soft_cap: float = 0.0,
        z_loss: float = 0.0,
        tensor_parallel_group: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Makes a loss.

        Args:
            class_weight: factors of the losses of this rank's classes, a parameter without gradient; None: no factors.
            reduction: "mean", "sum" or "none".
            ignore_index: rows with this target have loss 0 and no gradient.
            label_smoothing: from 0 to 1; the share of a target that is spread over all classes.
            soft_cap: at least 0; logits become soft_cap tanh(logits / soft_cap); 0: logits stay unchanged.
            z_loss: at least 0; the factor of logsumexp(logits)^2 in the loss of a row; class weights do not multiply this term.
            tensor_parallel_group: the group whose ranks share the classes; None: this process has all.
            device: device of `class_weight`; None: where it is.
        """
        super().__init__()
        name = type(self).__name__
        self.tensor_parallel_size = collectives(name, None if tensor_parallel_group is None else "column", tensor_parallel_group, False)[2]
        self._group = tensor_parallel_group if self.tensor_parallel_size > 1 else None
        self.has_class_weight = class_weight is not None
        self.reduction, self.ignore_index, self.label_smoothing, self.soft_cap, self.z_loss = reduction, ignore_index, label_smoothing, soft_cap, z_loss
        if class_weight is not None:
            _check_class_weight(name, class_weight, None)
            self.class_weight = torch.nn.Parameter(class_weight.detach().to(device=device), requires_grad=False)
        self._parameter_names = ("class_weight",) * self.has_class_weight

    def _options(self) -> dict[str, Any]:
        options = {**super()._options(), "class_weight": self.has_class_weight}
        return options if self._group is None else {**options, **shared_classes(self._group)}

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class LinearCrossEntropy(CollectivesMixin, DeferredMixin, BasicOperation):
    """y = mean of cross_entropy(x weight^T + bias, targets), without all logits in memory at once.

    The extra input `targets` holds the class, int64, of each row of x [..., in_features]. With `reduction` "none" y has the shape of the targets.
    "sum" adds the losses of all rows, and "mean" divides this sum by the sum of the rows' factors: 1 or the `class_weight` of the target, and 0 for
    an ignored row. The mean of no rows is NaN, with gradients of zeros. y is float32, or float64 if `weight` is float64. Recipes do not
    quantize this product. Forward computes the gradients of logits, so in float16 it loses those below 6e-8, whatever a GradScaler scales y by.

    With a `tensor_parallel_group` its ranks share the classes: each holds num_classes / size rows of weight, bias and class_weight, in the order of
    ranks. All ranks pass the same targets, which count all classes, and get the same losses and predictions. The ranks exchange a few numbers
    for each row, never logits.

    >>> import torch
    >>> from tandem import ops
    >>> loss = ops.Sequential(ops.RMSNorm(16), ops.LinearCrossEntropy(16, 1000))
    >>> loss(torch.randn(2, 5, 16), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """

    has_bias, has_class_weight, tensor_parallel_size, sequence_parallel = Fixed(), Fixed(), Fixed(), Fixed()

    weight: torch.nn.Parameter

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
            num_classes: number of classes on all ranks together.
            bias: whether logits have a bias, which starts at zero.
            class_weight, reduction, ignore_index, label_smoothing, soft_cap, z_loss, tensor_parallel_group: as for `CrossEntropy`.
            sequence_parallel: whether the ranks also share the first dimension of x, which is gathered; the targets are those of all rows. If
                False, each rank passes all rows of x and gets the whole gradient of x.
            device: device of the parameters; None: torch's default device.
            dtype: dtype of weight and bias; None: `torch.get_default_dtype()`.
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
            _check_class_weight(name, class_weight, self.local_num_classes)
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


def _check_class_weight(name: str, value: Any, classes: int | None) -> None:
    """`classes`: the number of classes of this rank; None: any number."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected class_weight to be a tensor with a number for each class, got {type(value).__name__}. Pass torch.tensor(...).")
    if value.dim() != 1 or classes not in (None, len(value)):
        size = "num_classes" if classes is None else classes
        raise ValueError(f"{name}: expected class_weight of shape [{size}], a number for each class of this rank, got {[*value.shape]}. Pass one of this size.")


def shared_classes(group: Any) -> dict[str, Any]:
    """The options of a loss whose classes the ranks of `group` share."""
    return {"group": group.group_name, "group_size": group.size(), "rank": torch.distributed.get_rank(group)}


class LinearCrossEntropyWithPredictions(LinearCrossEntropy):
    """`LinearCrossEntropy` with an extra output: the class of the largest logit of each row, int64, also for ignored rows.

    >>> import torch
    >>> from tandem import ops
    >>> targets = torch.randint(1000, (5,))
    >>> loss, predictions = ops.LinearCrossEntropyWithPredictions(16, 1000)(torch.randn(5, 16), targets)
    >>> accuracy = (predictions == targets).float().mean()
    """

    num_extra_outputs = 1
