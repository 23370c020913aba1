"""The pipeline of a case in torch's float64 operations, with the dtype that each value has in Tandem's pipeline.

`noise` multiplies every value and every gradient by 1 + u r, with u the unit of rounding of its dtype and r random in [-1, 1]. The differences between such
runs show how much roundings matter in a case, independent of where an implementation rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import tandem
from differential.build import Built
from differential.case import HALVES, SCALED, Case

UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LEAST = {torch.float16: 2.0**-24}  # of a dtype whose range is so short that sums underflow
LARGEST_FLOAT16 = 3e4  # half of float16's largest number, as partial sums may be larger than the sum
LARGEST = {torch.float16: LARGEST_FLOAT16, torch.float32: 1e38, torch.bfloat16: 1e38}
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@dataclass
class Valued:
    """A value and the dtype that it has in the pipeline. Integer values keep their dtype, so that torch raises its own errors for them."""

    value: torch.Tensor
    dtype: torch.dtype


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unit, generator):
        ctx.unit, ctx.generator = unit, generator
        return _shaken(x, unit, generator)

    @staticmethod
    def backward(ctx, grad):
        return _shaken(grad, ctx.unit, ctx.generator), None, None


class _Tanh(torch.autograd.Function):
    """tanh whose derivative 1 - y^2 cancels with the roundings of y, as torch computes it."""

    @staticmethod
    def forward(ctx, v, unit, generator):
        ctx.unit, ctx.generator = unit, generator
        y = _shaken(torch.tanh(v), unit, generator)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return _shaken(grad * (1 - y * y), ctx.unit, ctx.generator), None, None


class _Cancelled(torch.autograd.Function):
    """The error of GELU from cancellation in 1 + tanh(u), and of its derivative in 1 - tanh(u)^2, as torch computes them: u = 0.8 (v + 0.045 v^3)."""

    @staticmethod
    def forward(ctx, v, unit, generator):
        ctx.save_for_backward(v)
        ctx.unit, ctx.generator = unit, generator
        return unit * v.abs() * _between(v, generator)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad * ctx.unit * (1 + 0.8 * v.abs() * (1 + 0.134 * v * v)) * _between(v, ctx.generator), None, None


def _between(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers in [-1, 1] of the shape of x."""
    return 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1


def _shaken(x: torch.Tensor, unit: float, generator: torch.Generator) -> torch.Tensor:
    r = _between(x, generator)
    shaken = x * (1 + unit * r)
    return shaken + 2.0**-24 * r if unit == UNIT[torch.float16] else shaken  # float16 underflows early


def quantized(x: torch.Tensor, name: str, recipe: Case, role: str) -> torch.Tensor:
    """x quantized and dequantized, with one scale per tensor from its amax."""
    dtype, largest = FORMATS[name]
    if x.numel() == 0:
        return x
    amax = max(x.abs().max().item(), recipe.get("eps_" + role, 0.0))
    # The specification computes the scale, which is clamped to float32, and its inverse in float32.
    scale = torch.tensor(largest, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
    scale = scale.clamp(max=torch.finfo(torch.float32).max) if amax > 0 else torch.ones(())
    if recipe.get("pow2"):
        scale = 2.0 ** scale.double().log2().floor()
    inverse = (1 / scale.float()).double()
    return (x * scale.double()).clamp(-largest, largest).float().to(dtype).double() * inverse


def in_directions(x: torch.Tensor, recipe: Case, role: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantized values of x under a recipe: of row codes in the shape of x, and of column codes as a matrix."""
    rows = x.reshape(-1, x.shape[-1])
    if recipe.get("kind") == "delayed":  # a case is the first step, in which all scales are 1
        dtype, largest = FORMATS["e5m2" if role == "grad_output" and recipe.get("format") != "E4M3" else "e4m3"]
        q = x.clamp(-largest, largest).float().to(dtype).double()
        return q, q.reshape(rows.shape)
    if "kind" not in recipe:
        gradient = "e4m3" if recipe.get("format") == "E4M3" else "e5m2"
        q = quantized(x, gradient if role == "grad_output" else "e4m3", recipe, role)
        return q, q.reshape(rows.shape)
    made = tandem.quantize(rows.detach().float(), quantizer_of(recipe, role))  # golden vectors test it elsewhere
    return made.dequantize().double().reshape(x.shape), made.dequantize(columnwise=True).double()


def quantizer_of(recipe: Case, role: str) -> tandem.Quantizer:
    wide = role == "grad_output" and recipe.get("format") != "E4M3"
    element, is_weight = torch.float8_e5m2 if wide else torch.float8_e4m3fn, role == "weight"
    if recipe["kind"] == "block":
        pow2 = not recipe.get("f32")
        return tandem.Float8BlockQuantizer(element, rowwise=True, columnwise=True, force_pow_2_scales=pow2, block_scaling_dim=1 + is_weight)
    if recipe["kind"] == "mxfp8":
        return tandem.MXFP8Quantizer(element)
    rotates = not is_weight
    return tandem.NVFP4Quantizer(with_rht=rotates, with_post_rht_amax=rotates, with_2d_quantization=is_weight)


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe):
        (x_row, x_col), (w_row, w_col) = as_multiplied(x, recipe, "input"), in_directions(weight, recipe, "weight")
        ctx.save_for_backward(x_col, w_col)
        ctx.recipe = recipe
        return x_row @ w_row.t()

    @staticmethod
    def backward(ctx, grad):
        x_col, w_col = ctx.saved_tensors
        g_row, g_col = as_multiplied(grad, ctx.recipe, "grad_output")
        return g_row @ w_col, g_col.t() @ x_col, None


class _QuantizedPoint(torch.autograd.Function):
    """The op Quantize: the result has the dequantized values of row codes. Its attribute `columns` has those of column codes of x, for products."""

    @staticmethod
    def forward(ctx, x, recipe, forward, backward):
        ctx.recipe, ctx.backward_too = recipe, backward
        return _with_columns(x, recipe, "input") if forward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (_with_columns(grad, ctx.recipe, "grad_output") if ctx.backward_too else grad), None, None, None


def _with_columns(x: torch.Tensor, recipe: Case, role: str) -> torch.Tensor:
    """x quantized; a tensor that has codes already keeps them."""
    result, columns = as_multiplied(x, recipe, role)
    if result is x:
        result = x.clone()
    result.columns = columns
    return result


def as_multiplied(x: torch.Tensor, recipe: Case, role: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`in_directions` of x, or the dequantized values of the codes that an op Quantize has computed."""
    columns = getattr(x, "columns", None)
    return in_directions(x, recipe, role) if columns is None else (x, columns)


class Reference:
    """One evaluation of a case. `leaves` are float64 copies of the leaves of `built`; `outputs` of the pipeline show the masks of dropouts."""

    def __init__(self, built: Built, mode: Case, outputs: list[torch.Tensor] | None, noise: int | None = None, masked: int = -1) -> None:
        self.built, self.mode, self.given = built, mode, outputs
        self.masked, self.untold = masked, 0  # a bit for each element of masks that outputs do not show, as x is zero there; their number
        self.autocast = {"bf16": torch.bfloat16, "f16": torch.float16}.get(mode.get("ac"))
        self.recipe = mode.get("recipe")
        self.training = not mode.get("eval")
        self.generator = None if noise is None else torch.Generator().manual_seed(noise)
        self.leaves = [self._leaf(t, value) for t, value in zip(built.leaves, built.values, strict=True)]
        self.results: list[Valued] = []
        self.refuses_float64 = False
        self.refuses_dtype = False  # a Python op returns another dtype than its tensors promote to
        self.overflows = False  # a value that its dtype cannot hold, or a gradient that float16 cannot
        self.masks: list[torch.Tensor] = []
        self.notes: list[str] = []

    def _leaf(self, t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # After the call: an in-place write turns a leaf without gradient into a result with one.
        return value.double().clone().requires_grad_(t.requires_grad and t.is_leaf) if t.is_floating_point() else value

    def _of(self, t: torch.Tensor) -> Valued:
        for original, leaf in zip(self.built.leaves, self.leaves, strict=True):
            if original is t:
                return Valued(leaf, t.dtype)
        raise KeyError("a tensor that is no leaf")

    def run(self) -> list[Valued]:
        x = self._of(self.built.x)
        extras = iter(self.built.extras)
        channels: dict[str, Valued] = {}
        extra_results: list[Valued] = []
        for op, module in zip(self.built.resolved, self.built.modules, strict=True):
            given = channels[op["read"]] if "read" in op else None
            if op["extras"]:
                given = self._of(next(extras))
            x, made = self.op(op, module, x, given, 1 + len(extra_results))
            names = list(op["outputs"])
            if "write" in op:
                channels[op["write"]] = made[0]
                if not op["to_caller"]:
                    made = made[1:]
            extra_results += made[: len(names)]
        self.results = [x, *extra_results]
        return self.results

    def noisy(self, value: torch.Tensor, dtype: torch.dtype, is_a: torch.dtype | None = None) -> Valued:
        """The value of an op that rounds to `dtype`. `is_a` is the dtype of the result, if it differs."""
        if self.generator is not None and dtype.is_floating_point and value.is_floating_point():
            value = _Noise.apply(value, UNIT[dtype], self.generator)
        elif dtype == torch.float16 and value.requires_grad:
            value.register_hook(self._watch)
        if dtype in LARGEST and value.numel() and value.detach().abs().max() > LARGEST[dtype]:
            self.overflows = True
        return Valued(value, is_a or dtype)

    def _watch(self, grad: torch.Tensor) -> None:
        self.overflows |= bool(grad.numel() and grad.abs().max() > LARGEST_FLOAT16)

    # How ops choose the dtype in which they compute.

    def compute(self, x: Valued, weight: torch.dtype | None) -> Valued:
        """x in the dtype in which an op computes: the dtype of autocast, else of its weight, else of x."""
        if self.autocast is not None and x.dtype != torch.float64:
            dtype = self.autocast
        else:
            dtype = weight if weight is not None else x.dtype
        if x.dtype == dtype:
            return x
        value = x.value if x.value.is_floating_point() else x.value.double()
        return self.noisy(value, dtype) if dtype.is_floating_point else x

    def param(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        leaf = self._of(t)
        return leaf.value if dtype == leaf.dtype and self.generator is None else self.noisy(leaf.value, dtype).value

    def promoted(self, x: Valued, other: Valued) -> torch.dtype:
        return torch.promote_types(x.dtype, other.dtype)

    def op(self, op: Case, module: Any, x: Valued, extra: Valued | None, position: int) -> tuple[Valued, list[Valued]]:
        kind = op["k"]
        if kind in ("identity", "nn_neg"):
            return (x if kind == "identity" else self.noisy(-x.value, x.dtype)), []
        if kind == "nn_tanh":
            if not x.value.is_floating_point():
                return self.noisy(torch.tanh(x.value.double()), torch.get_default_dtype()), []
            if self.generator is not None:
                return Valued(_Tanh.apply(x.value, UNIT[x.dtype], self.generator), x.dtype), []
            return self._plain(torch.tanh, x), []
        if kind == "nested":
            for inner, part in zip(op["resolved"], module, strict=True):
                x, _ = self.op(inner, part, x, None, 0)
            return x, []
        if kind in ("linear", "basic"):
            return self._linear(module, x), []
        if kind == "grouped":
            return self._grouped(op, module, x), []
        if kind == "bias":
            return self._bias(module.bias, x), []
        if kind in ("rms", "ln"):
            return self._norm(op, module, x), []
        if kind == "l2":
            return self._l2_norm(op, x), []
        if kind in ("gelu", "silu", "relu", "qgelu", "srelu") or kind in HALVES or kind in SCALED:
            return self._activation(op, self.compute(x, None), extra), []
        if kind == "scale":
            factor = op.get("f", 2.0)
            dtype = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
            return self.noisy(x.value.double() * factor, dtype), []
        if kind == "reshape":
            return Valued(x.value.reshape(op["shape"]), x.dtype), []
        if kind == "quantize":
            return self._quantize(op, x), []
        if kind == "dropout":
            return self._dropout(op, x, position)
        if kind == "make":
            return x, [x]
        if kind == "add":
            return self._add(op, x, extra), []
        if kind == "modulate":
            if not (x.value.is_floating_point() and extra.value.is_floating_point()):
                raise TypeError("modulation of integers")
            return self.noisy(x.value * (extra.value + op.get("zc", 0)), self.promoted(x, extra)), []
        declared = x.dtype if extra is None else self.promoted(x, extra)
        if self.autocast is None:
            for param in module.parameters():
                declared = torch.promote_types(declared, param.dtype)
        y, made = self._python(kind, module, x, extra)
        self.refuses_dtype |= any(result.dtype != declared for result in (y, *made))
        return y, made

    def _plain(self, function: Any, x: Valued) -> Valued:
        y = function(x.value)
        return self.noisy(y, x.dtype if x.value.is_floating_point() else y.dtype)

    def _linear(self, module: Any, x: Valued) -> Valued:
        x = self.compute(x, module.weight.dtype)
        result = self._product(x, self.param(module.weight, x.dtype), module.weight.dtype)
        bias = getattr(module, "bias", None)
        return result if bias is None else self._bias(bias, result)

    def _grouped(self, op: Case, module: Any, x: Valued) -> Valued:
        params = dict(module.named_parameters())
        own = next(iter(params.values())).dtype
        x = self.compute(x, own)
        self.refuses_float64 |= self.recipe is not None and torch.float64 in (x.dtype, own)
        values = {name: self.param(param, x.dtype) for name, param in params.items()}
        rows, parts, first = x.value.reshape(-1, op["in"]), [], 0
        names = ("weight", "bias")[: 1 + op.get("bias", 1)]
        for g, count in enumerate(op["splits"]):
            of_group = {name: values[f"{name}{g}"] if f"{name}{g}" in values else values[name][g] for name in names}
            part = Valued(rows[first : first + count], x.dtype)
            first += count
            part = self._product(part, of_group["weight"], own) if count else Valued(part.value @ of_group["weight"].t(), x.dtype)
            if op.get("bias", 1):
                part = self.noisy(part.value + of_group["bias"], x.dtype)
            parts.append(part.value)
        parts.append(torch.zeros(rows.shape[0] - first, op["out"], dtype=torch.float64))
        return Valued(torch.cat(parts).reshape(*x.value.shape[:-1], op["out"]), x.dtype)

    def _product(self, x: Valued, weight: torch.Tensor, own: torch.dtype) -> Valued:
        """x weight^T for a weight whose parameter has the dtype `own`."""
        if self.recipe is not None:
            self.refuses_float64 |= torch.float64 in (x.dtype, own)
            y = _QuantizedProduct.apply(x.value, weight, self.recipe)
        else:
            y = x.value @ weight.t()
        if self.generator is not None:  # if terms cancel, the roundings of partial sums remain
            terms = x.value.detach().abs() @ weight.detach().abs().t()
            r = _between(y, self.generator)
            y = y + UNIT[torch.float64 if x.dtype == torch.float64 else torch.float32] * terms * r
        return self.noisy(y, x.dtype)

    def _bias(self, bias: torch.Tensor, x: Valued) -> Valued:
        own = x.dtype if self.autocast is not None and x.dtype.is_floating_point else bias.dtype  # under autocast the bias follows x
        if self.autocast is not None and not x.dtype.is_floating_point:  # the fusion of bias and relu does not cast, unlike relu
            self.refuses_dtype |= "bias_relu" in self.mode.get("fuse", ())
        dtype, value = torch.promote_types(x.dtype, own), self.param(bias, own)
        return self.noisy(x.value + value, dtype)

    def _norm(self, op: Case, module: Any, x: Valued) -> Valued:
        x = self.compute(x, module.weight.dtype)
        weight = self.param(module.weight, x.dtype)
        if op.get("zc", 0):
            weight = weight + 1
        eps, v = op.get("eps", 1e-5), x.value
        statistics = x.dtype if x.dtype == torch.float64 else torch.float32
        if op["k"] == "ln":
            v = self.noisy(v - self.noisy(v.mean(-1, keepdim=True), statistics).value, statistics).value
        inverse = self.noisy(torch.rsqrt((v * v).mean(-1, keepdim=True) + eps), statistics).value
        x_hat = self.noisy(v * inverse, statistics)
        y = (self.noisy(x_hat.value, x.dtype) if op.get("rw", 0) else x_hat).value * weight
        return self.noisy(y if op["k"] == "rms" else y + self.param(module.bias, x.dtype), x.dtype)

    def _l2_norm(self, op: Case, x: Valued) -> Valued:
        dtype, v = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype(), x.value.double()
        statistics = dtype if dtype == torch.float64 else torch.float32
        inverse = self.noisy(torch.rsqrt((v * v).sum(-1, keepdim=True) + op.get("eps", 1e-6)), statistics).value
        return self.noisy(v * inverse, dtype)

    def _activation(self, op: Case, x: Valued, scales: Valued | None) -> Valued:
        kind, unit = op["k"].removeprefix("s_"), UNIT[torch.float64 if x.dtype == torch.float64 else torch.float32]

        def gelu(v: torch.Tensor) -> torch.Tensor:
            if not v.is_floating_point():
                return F.gelu(v, approximate="tanh")  # raises
            # The product with a sigmoid does not cancel; `_Cancelled` adds the error of torch's formula.
            y = v * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))
            return y if self.generator is None else y + _Cancelled.apply(v, unit, self.generator)

        def of_fractions(function: Any) -> Any:
            def apply(*v: torch.Tensor) -> torch.Tensor:
                if not v[0].is_floating_point():
                    raise TypeError("an activation follows its input, which has no fractions")
                return function(*v)

            return apply

        def gate(v: torch.Tensor, rate: float) -> torch.Tensor:
            return v * torch.sigmoid(rate * v)

        def situ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            first, second = op.get("n", (4.0, 25.0))
            return first * torch.tanh(a / first) * torch.sigmoid(a) * second * torch.tanh(b / second)

        def clamped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            limit, alpha, offset = op.get("n", (7.0, 1.702, 1.0))
            return gate(a.clamp(max=limit), alpha) * (b.clamp(-limit, limit) + offset)

        qgelu = of_fractions(lambda v: gate(v, 1.702))
        plain = {"gelu": gelu, "silu": F.silu, "relu": F.relu, "qgelu": qgelu, "srelu": lambda v: F.relu(v) ** 2}
        gates = {"swiglu": F.silu, "geglu": gelu, "glu": of_fractions(torch.sigmoid), "qgeglu": qgelu, "reglu": F.relu, "sreglu": plain["srelu"]}
        if kind in plain:
            y = plain[kind](x.value)
        else:
            a, b = self._parts(x.value, op.get("il"))
            y = gates[kind](a) * b if kind in gates else of_fractions({"situ": situ, "clamped": clamped}[kind])(a, b)
        if scales is not None:
            if not torch.can_cast(scales.dtype, x.dtype):
                raise TypeError("scales have fractions that x cannot have")
            factor = scales.value if scales.dtype == x.dtype else self.noisy(scales.value.to(x.value.dtype), x.dtype).value
            y = y * factor.unsqueeze(-1)
        return self.noisy(y, x.dtype if x.value.is_floating_point() else y.dtype)

    @staticmethod
    def _parts(v: torch.Tensor, block: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b of a gated unit: halves of the last dimension, or interleaved blocks of it."""
        if block is None:
            a, b = v.chunk(2, -1)
            return a, b
        a, b = v.unflatten(-1, (-1, 2, block)).unbind(-2)
        return a.flatten(-2), b.flatten(-2)

    def _quantize(self, op: Case, x: Valued) -> Valued:
        if self.recipe is None or not x.dtype.is_floating_point:
            return x
        self.refuses_float64 |= x.dtype == torch.float64
        y = _QuantizedPoint.apply(x.value, self.recipe, bool(op.get("fwd", 1)), bool(op.get("bwd", 0)))
        result = self.noisy(y, torch.float32 if x.dtype == torch.float64 else x.dtype, x.dtype)
        if hasattr(y, "columns"):
            result.value.columns = y.columns
        return result

    def _dropout(self, op: Case, x: Valued, position: int) -> tuple[Valued, list[Valued]]:
        p = op.get("p", 0.5)
        if not self.training or op.get("eval"):
            return x, ([x] if op["outputs"] else [])
        if not x.value.is_floating_point():
            F.dropout(x.value, p)  # raises
        if op["outputs"]:
            mask = torch.ones(x.value.shape) if self.given is None else (self.given[position] != 0).double()
            self._check_mask(mask, x.value.detach().abs() > self._least_told(x), 1 - p)
            mask = self._with_untold(mask.double(), x)
        else:
            mask = torch.full(x.value.shape, float(p < 1), dtype=torch.float64)
        y = self.noisy(x.value * mask / (1 - p if p < 1 else 1.0), x.dtype)
        return y, ([y] if op["outputs"] else [])

    def _with_untold(self, mask: torch.Tensor, x: Valued) -> torch.Tensor:
        """The mask, completed where the output does not show it because x is zero or may have been rounded to zero."""
        value = x.value.detach()
        untold = (mask == 0) & (value.abs() <= self._least_told(x))
        count = int(untold.sum())
        if self.masked == -1:
            mask[untold & (value == 0)] = 1.0
        else:
            mask[untold] = torch.tensor([float(self.masked >> (self.untold + k) & 1) for k in range(count)], dtype=torch.float64)
        self.untold += count
        return mask

    @staticmethod
    def _least_told(x: Valued) -> float:
        """The size up to which an element may have been rounded to zero."""
        value = x.value.detach()
        return max(8 * UNIT.get(x.dtype, 0.0) * (value.abs().max().item() if value.numel() else 0), LEAST.get(x.dtype, 0.0))

    def _check_mask(self, mask: torch.Tensor, is_told: torch.Tensor, kept: float) -> None:
        """Notes an error if a mask keeps another share than `kept`, or equals another mask. Masks with fewer than 64 known elements are not checked."""
        told = mask[is_told]
        if self.given is None or self.generator is not None or told.numel() < 64:
            return
        if abs(told.mean().item() - kept) > 6 * (kept * (1 - kept) / told.numel()) ** 0.5:
            self.notes.append(f"a dropout keeps {told.mean().item():.3f} of {told.numel()}, not {kept}")
        if any(m.shape == mask.shape and torch.equal(m, mask) for m in self.masks):
            self.notes.append("two dropouts have one mask")
        self.masks.append(mask)

    def _add(self, op: Case, x: Valued, extra: Valued) -> Valued:
        dtype = self.promoted(x, extra)
        if op.get("ip") and "read" not in op:
            if not torch.can_cast(dtype, extra.dtype):
                raise TypeError("result type cannot be written in place")
            dtype = extra.dtype
        if not dtype.is_floating_point:
            return Valued(x.value + extra.value, dtype)
        return self.noisy(x.value + extra.value, dtype)

    def _python(self, kind: str, module: Any, x: Valued, extra: Valued | None) -> tuple[Valued, list[Valued]]:
        floating = x.dtype if x.dtype.is_floating_point else torch.get_default_dtype()
        if kind in ("py_weighted", "py_child"):
            weight = module.weight if kind == "py_weighted" else module.norm.weight
            follows = self.autocast is not None and x.dtype.is_floating_point  # parameters follow x under autocast
            own = x.dtype if follows else weight.dtype
            factor, result = (1.5, floating) if kind == "py_weighted" else (1.0, x.dtype)
            return self.noisy(x.value * factor * self.param(weight, own), torch.promote_types(result, own)), []
        if kind == "py_buffer":
            return self.noisy(x.value + module.shift.double(), torch.promote_types(x.dtype, module.shift.dtype)), []
        if kind == "py_sin":
            return self.noisy(torch.sin(x.value.double()), floating), []
        if kind in ("py_swap", "py_swap_whole"):
            return self.noisy(extra.value * 2, extra.dtype), [self.noisy(x.value * 3, x.dtype)]
        if kind == "py_product":
            return self.noisy(x.value * extra.value, self.promoted(x, extra)), []
        if kind == "py_outputs":
            return self.noisy(x.value + 1, x.dtype), [self.noisy(x.value * x.value, x.dtype), self.noisy(-x.value, x.dtype)]
        raise KeyError(kind)
