"""Runs a pipeline of Tandem in the mode of a case, and returns outputs and the requested gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import tandem
from differential.build import Built, user_fusions
from differential.case import Case
from layouts import laid


@dataclass
class Outcome:
    """The results of a run. `grads` has one entry for each leaf; None: not requested, or autograd returned none."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    given: list[torch.Tensor | None] = field(default_factory=list)  # for each output the gradient that backward got, or None
    requested: list[int] = field(default_factory=list)
    error: Exception | None = None
    notes: list[str] = field(default_factory=list)  # errors other than wrong numbers
    in_place_error: Exception | None = None
    aliases: list[bool] = field(default_factory=list)  # for each output: whether it shares memory with the one that was written in place


def recipe_of(options: Case) -> tandem.recipe.Recipe:
    formats = tandem.recipe.Format
    format_of_blocks = formats.E4M3 if options.get("format") == "E4M3" else formats.HYBRID
    if options.get("kind") == "block":
        return tandem.recipe.Float8BlockScaling(use_f32_scales=bool(options.get("f32", 0)), fp8_format=format_of_blocks)
    if options.get("kind") == "delayed":
        return tandem.recipe.DelayedScaling(amax_history_len=4, fp8_format=format_of_blocks)
    if options.get("kind") == "mxfp8":
        return tandem.recipe.MXFP8BlockScaling(fp8_format=format_of_blocks)
    if options.get("kind") == "nvfp4":
        return tandem.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    return tandem.recipe.Float8CurrentScaling(
        use_power_2_scales=bool(options.get("pow2", 0)),
        fp8_format=formats.E4M3 if options.get("format") == "E4M3" else formats.HYBRID,
        amax_epsilon_input=options.get("eps_input", 0.0),
        amax_epsilon_weight=options.get("eps_weight", 0.0),
        amax_epsilon_grad_output=options.get("eps_grad_output", 0.0),
    )


@contextlib.contextmanager
def regions(mode: Case):
    """The contexts around forward: grad mode, torch.autocast, recipe and hooks."""
    with contextlib.ExitStack() as stack:
        if mode.get("grad") == "no_grad":
            stack.enter_context(torch.no_grad())
        if mode.get("grad") == "inference":
            stack.enter_context(torch.inference_mode())
        if "ac" in mode:
            stack.enter_context(torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "f16": torch.float16}[mode["ac"]]))
        if mode.get("recipe") is not None:
            stack.enter_context(tandem.autocast(recipe=recipe_of(mode["recipe"])))
        hooks = mode.get("hooks")
        if hooks == "copy":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t))
        elif hooks == "numpy":
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked))
        elif hooks == "cpu":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        yield


def _packed(t: torch.Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
    # An empty tensor may have strides that view(dtype) refuses.
    data = t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return data, t.dtype, t.shape


def _unpacked(packed: tuple[bytes, torch.dtype, torch.Size]) -> torch.Tensor:
    data, dtype, shape = packed
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _arguments(built: Built, case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The arguments of the call. A tensor that is written in place is replaced by a clone that autograd tracks."""
    written: dict[int, torch.Tensor] = {}
    extras, index = list(built.extras), 0
    for op in built.resolved:
        for _ in op["extras"]:
            if op["k"] == "add" and op.get("ip") and not op.get("leaf"):
                extras[index] = extras[index].clone()
            index += 1
    x = built.x
    if case["mode"].get("mut") is not None and not case["mode"].get("leaf"):
        x = written.setdefault(id(x), x.clone())
        extras = [written.setdefault(id(e), e.clone()) if e is original else e for e, original in zip(extras, built.extras, strict=True)]
    return x, extras


def _targets(built: Built) -> list[torch.Tensor]:
    """The leaves that the pipeline writes in place in this case."""
    extras = iter(built.extras)
    return [extra for op in built.resolved for _, extra in zip(op["extras"], extras) if op.get("ip") and op.get("leaf")]  # noqa: B905


def _restore(module: torch.nn.Module, params: dict[str, torch.Tensor]) -> None:
    """Restores parameters, as functional_call leaves its own tensors in a module that is listed twice."""
    for name, param in params.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._parameters[last] = param


def _call(built: Built, case: Case) -> Callable[..., list[torch.Tensor]]:
    mode, module = case["mode"], built.module
    run = mode.get("run", "eager")
    if run == "compile":
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = mode.get("bw") != "retain"  # donated buffers allow one backward only
        compiled = torch.compile(module, backend=mode.get("backend", "aot_eager"), dynamic=mode.get("dynamic"), fullgraph=True)
        return lambda x, *e: _as_list(compiled(x, *e))
    if run in ("ckpt", "ckpt_re"):
        return lambda x, *e: _as_list(checkpoint(module, x, *e, use_reentrant=run == "ckpt_re"))
    if mode.get("func") == "call":
        params = dict(module.named_parameters())


        def functional(x: torch.Tensor, *e: torch.Tensor) -> list[torch.Tensor]:
            try:
                return _as_list(torch.func.functional_call(module, params, (x, *e)))
            finally:
                _restore(module, params)

        return functional
    return lambda x, *e: _as_list(module(x, *e))


def gradient_like(shape: torch.Size, dtype: torch.dtype, layout: str, generator: torch.Generator) -> torch.Tensor:
    if layout == "expand":
        return torch.randn((), generator=generator, dtype=torch.float64).to(dtype).expand(shape)
    if layout == "strided" and len(shape) >= 1:
        return torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator, dtype=torch.float64).to(dtype)[..., ::2]
    if layout == "t" and len(shape) >= 2:
        return torch.randn((*shape[:-2], shape[-1], shape[-2]), generator=generator, dtype=torch.float64).to(dtype).mT
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return laid(values, generator) if layout == "wild" else values


def execute(built: Built, case: Case, call: Callable[..., list[torch.Tensor]] | None = None) -> Outcome:
    """Runs forward and backward. `call` replaces the call of the module, such as by a call without fusions."""
    outcome, mode = Outcome(), case["mode"]
    with user_fusions(mode.get("fuse")):
        try:
            if mode.get("eval"):
                built.module.eval()
            if call is None and mode.get("warm"):
                _warm(built, mode)
            _run(outcome, built, case, call)
        except Exception as error:  # the judge decides whether the error is right
            outcome.error = error
    return outcome


def _warm(built: Built, mode: Case) -> None:
    """Calls the module once without gradients, so that a plan for other flags exists."""
    with torch.no_grad():
        if not any(op.get("ip") for op in built.resolved):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):
                built.module(built.x, *built.extras)
                if built.x.dim() > 1 and mode["warm"] == 2:  # other sizes too
                    built.module(built.x[:1], *[e[:1] if e.dim() else e for e in built.extras])


def _run(outcome: Outcome, built: Built, case: Case, call: Callable[..., list[torch.Tensor]] | None) -> None:
    mode = case["mode"]
    torch.manual_seed(case.get("seed", 0) % 2**31)
    generator = torch.Generator().manual_seed(case.get("seed", 0) + 1)
    if mode.get("func") in ("vjp", "grad"):
        _functional(outcome, built, case, generator)
        return
    x, extras = _arguments(built, case)
    with regions(mode):
        live = (call or _call(built, case))(x, *extras)
    outcome.outputs = [t.detach().clone() for t in live]
    for leaf, old in zip(built.leaves, built.values, strict=True):
        is_target = any(leaf is e for e in _targets(built))
        if not is_target and not torch.equal(leaf.detach(), old) and not leaf.isnan().any():
            outcome.notes.append("an argument was written")
    _check_in_place(outcome, built, extras, live, mode)
    differentiable = mode.get("grad", "grad") == "grad"
    outcome.aliases = [False] * len(live)
    if mode.get("mut") is not None:
        live = _write_output(outcome, live, mode["mut"] % len(live), [x, *extras])
    if outcome.in_place_error is not None or not differentiable:
        if not differentiable and any(t.requires_grad and not any(t is leaf for leaf in (x, *extras)) for t in live):
            outcome.notes.append("an output requires grad outside of grad mode")
        return
    outcome.given = [None] * len(live)
    give = mode.get("give")
    for i, t in enumerate(live):
        wanted = give is None or i in give
        if t.requires_grad and wanted:
            outcome.given[i] = gradient_like(t.shape, t.dtype, mode.get("gl", "plain"), generator)
    # An in-place write turns a leaf that requires no gradient into a non-leaf.
    candidates = [i for i, leaf in enumerate(built.leaves) if leaf.requires_grad and leaf.is_leaf]
    ask = mode.get("ask")
    outcome.requested = [i for i in candidates if ask is None or i in ask]
    outcome.grads = [None] * len(built.leaves)
    outputs = [t for t, g in zip(live, outcome.given, strict=True) if g is not None]
    grads = [g for g in outcome.given if g is not None]
    if not outputs or not outcome.requested:
        return
    with regions({"recipe": mode["recipe"]}) if mode.get("inside") and "recipe" in mode else contextlib.nullcontext():
        _backward(outcome, built, mode, outputs, grads)


def _memory(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's memory; of a quantized tensor, that of its codes."""
    if isinstance(tensor, tandem.QuantizedTensor):
        tensor = next(part for name in tensor.__tensor_flatten__()[0] if (part := getattr(tensor, name)) is not None)
    return tensor.untyped_storage().data_ptr()


def _write_output(outcome: Outcome, live: list[torch.Tensor], which: int, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    target = live[which]
    memory = _memory(target)  # without gradients, two outputs may be one tensor
    outcome.aliases = [i != which and _memory(t) == memory and t.numel() > 0 for i, t in enumerate(live)]
    if not target.is_floating_point():
        return live
    try:
        target.mul_(2)
    except RuntimeError as error:
        outcome.in_place_error = error
        return live
    outcome.outputs = [t.detach().clone() for t in live]
    return live


def _check_in_place(outcome: Outcome, built: Built, extras: list[torch.Tensor], live: list[torch.Tensor], mode: Case) -> None:
    """Notes an error unless an in-place sum at the end of the pipeline lies in the caller's tensor."""
    last = built.resolved[-1] if built.resolved else {}
    if mode.get("run", "eager") != "eager" or mode.get("func") or last.get("k") != "add" or not last.get("ip") or "read" in last:
        return
    if extras[-1].data_ptr() != live[0].data_ptr() and live[0].numel() > 0:
        outcome.notes.append("an in-place sum is not in the caller's memory")


def _backward(outcome: Outcome, built: Built, mode: Case, outputs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    requested = [built.leaves[i] for i in outcome.requested]
    kind = mode.get("bw", "plain")
    if kind == "batched":
        stacked = [torch.stack([g, -2 * g, 0 * g]) for g in grads]
        found = torch.autograd.grad(outputs, requested, stacked, is_grads_batched=True, allow_unused=True)
        for f in found:
            dtypes = {leaf.dtype for leaf in built.leaves} | ({torch.float16} if mode.get("ac") == "f16" else set())
            recipe = mode.get("recipe") or {}
            # Otherwise multiples of a gradient are quantized to other codes, for which a rounding in float16's subnormal range suffices.
            is_linear = not recipe.get("eps_grad_output") and "kind" not in recipe and (mode.get("recipe") is None or torch.float16 not in dtypes)
            if f is not None and is_linear and not _are_multiples(f, dtypes):
                outcome.notes.append("rows of a batched gradient do not agree")
        found = tuple(None if f is None else f[0] for f in found)
    elif kind == "acc":
        for leaf in built.leaves:
            leaf.grad = None
        torch.autograd.backward(outputs, grads, inputs=requested if mode.get("ask") is not None else None)
        found = tuple(leaf.grad for leaf in requested)
    elif kind == "thread":
        found = _in_thread(lambda: torch.autograd.grad(outputs, requested, grads, allow_unused=True))
    elif kind == "retain":
        first = torch.autograd.grad(outputs, requested, grads, allow_unused=True, retain_graph=True)
        found = torch.autograd.grad(outputs, requested, grads, allow_unused=True)
        for a, b in zip(first, found, strict=True):
            if (a is None) != (b is None) or (a is not None and not torch.equal(a.nan_to_num(), b.nan_to_num())):
                outcome.notes.append("a second backward differs from the first")
    else:
        found = torch.autograd.grad(outputs, requested, grads, allow_unused=True)
    for index, gradient in zip(outcome.requested, found, strict=True):
        outcome.grads[index] = gradient


def _are_multiples(rows: torch.Tensor, dtypes: set[torch.dtype]) -> bool:
    """Whether the second row is -2 times the first up to roundings, which include those in the subnormal range of any dtype on the way."""
    if rows.numel() == 0:
        return True
    least = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in dtypes | {rows.dtype} if dtype.is_floating_point)
    largest = rows.double().abs().nan_to_num(0.0).max().item()
    return torch.allclose(rows[1], -2 * rows[0], rtol=2.0**-5, atol=1e-4 * largest + 8 * least, equal_nan=True)


def _in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _functional(outcome: Outcome, built: Built, case: Case, generator: torch.Generator) -> None:
    """Runs torch.func.vjp over all floating-point leaves, with random gradients of the outputs."""
    mode = case["mode"]
    params = dict(built.module.named_parameters())
    positions = {name: next(i for i, leaf in enumerate(built.leaves) if leaf is p) for name, p in params.items()}
    places = [next(i for i, leaf in enumerate(built.leaves) if leaf is t) for t in (built.x, *built.extras)]
    floating = [i for i, leaf in enumerate(built.leaves) if leaf.is_floating_point()]

    def run(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at = dict(zip(floating, leaves, strict=True))
        tensors = [at.get(i, leaf) for i, leaf in enumerate(built.leaves)]
        arguments = tuple(tensors[i] for i in places)
        return tuple(_as_list(torch.func.functional_call(built.module, {n: tensors[i] for n, i in positions.items()}, arguments)))

    primals = [built.leaves[i].detach() for i in floating]
    with regions(mode):
        try:
            outputs, pullback = torch.func.vjp(run, *primals)
        finally:
            _restore(built.module, params)
        outcome.outputs = [t.detach().clone() for t in outputs]
        outcome.given = [gradient_like(t.shape, t.dtype, "plain", generator) if t.is_floating_point() else None for t in outputs]
        cotangents = tuple(torch.zeros_like(t) if g is None else g for t, g in zip(outputs, outcome.given, strict=True))
        found = pullback(cotangents)
    outcome.requested = floating
    outcome.grads = [None] * len(built.leaves)
    for i, gradient in zip(floating, found, strict=True):
        outcome.grads[i] = gradient


def unfused(built: Built, training: bool) -> Callable[..., list[torch.Tensor]]:
    """A function that runs the pipeline without fusions, from its description."""
    import json

    def call(x: torch.Tensor, *extras: torch.Tensor) -> list[torch.Tensor]:
        built.module._prepare()
        run = built.module._runs[0].now
        flags = tuple(op.training for op in run.training_ops)
        text = run.pipeline(flags).description(run.library_training(flags, training))
        fields = {key: value for key, value in json.loads(text).items() if key != "memory_budget"}
        description = json.dumps({**fields, "fuse": False})
        params = [module._parameters[name] for module, name in run.places]
        state = run.state(tandem._C.in_force.recipe)
        return list(torch.ops.tandem.pipeline(x, list(extras), params, [], state, [], description))

    return call


__all__ = ["Outcome", "execute", "recipe_of", "unfused"]
