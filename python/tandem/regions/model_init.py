"""`quantized_model_init`: modules whose weights are quantized when they are created."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tandem import _C
from tandem.arguments import flag
from tandem.quantized.parameters import codes_of, for_share, in_codes, is_shared, keep_numbers, keeps_numbers, local_of, numbers_of, write
from tandem.quantized.parts import PARTS, rows_of_blocks
from tandem.quantized.quantizer import Quantizer, quantizer_of_text
from tandem.quantized.tensor import QuantizedTensor
from tandem.quantized.traits import traits_of
from tandem.quantized.views import FIRST_NUMBERS
from tandem.recipe import Float8CurrentScaling, Recipe
from tandem.recipe.base import check_recipe


class _Init(NamedTuple):
    recipe: Recipe
    keeps_numbers: bool


_in_force: contextvars.ContextVar[_Init | None] = contextvars.ContextVar("tandem.quantized_model_init", default=None)
_PENDING = "_quantized_init"  # attribute of a module that must quantize its weights once they have values


@contextlib.contextmanager
def quantized_model_init(enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False) -> Iterator[None]:
    """Ops and modules that are created in the `with` block have quantized weights: parameters that are `QuantizedTensor`s.

    Products under a recipe of that format read these codes and quantize no weight. No high-precision copy exists: the training loop steps a master
    weight, and writes it back by `weight.quantize_(master)`. A weight on the meta device stays unquantized until it has values: `load_state_dict`,
    `reset_parameters`, the first call or `finish_quantized_init` quantize it. `load_state_dict(assign=True)` quantizes the assigned tensors.

    >>> import torch, tandem
    >>> recipe = tandem.recipe.MXFP8BlockScaling()
    >>> with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
    ...     layer = tandem.Linear(64, 64)
    >>> layer.weight
    QuantizedTensor([64, 64], dtype=torch.float32, quantizer=MXFP8Quantizer('mxfp8_e4m3', rowwise=True, columnwise=True))
    >>> master = layer.weight.get_high_precision_init_val()
    >>> layer.weight.clear_high_precision_init_val()

    Args:
        enabled: False: modules that are created inside have unquantized weights, also within an outer block.
        recipe: the recipe whose format for weights is used; None: `Float8CurrentScaling()`. With `DelayedScaling` the scale is computed from the weight.
        preserve_high_precision_init_val: whether the initial numbers of a weight are kept on the CPU, for the master weight.
            `weight.get_high_precision_init_val()` returns them, `weight.clear_high_precision_init_val()` drops them. Until then loading and initialisers
            in place read and update them. With `fully_shard` each rank keeps the numbers of its shard.
    """
    for name, value in (("enabled", enabled), ("preserve_high_precision_init_val", preserve_high_precision_init_val)):
        flag("quantized_model_init", name, value, "Pass a recipe as recipe=.")
    check_recipe("quantized_model_init", recipe)
    token = _in_force.set(_Init(recipe or Float8CurrentScaling(), preserve_high_precision_init_val) if enabled else None)
    try:
        yield
    finally:
        _in_force.reset(token)


fp8_model_init = quantized_model_init  # the older name of the function


def _pending_weights(module: Any) -> tuple[list[str], Quantizer | None]:
    """The names of those weights in plain numbers that a module must quantize once they have values, and their quantizer; None if there are none.

    `module._weights_in_codes()` returns the names of all weights and the kind of the op that multiplies by them."""
    init: _Init | None = module.__dict__.get(_PENDING)
    names, kind = module._weights_in_codes() if init is not None else ((), "")
    plain = [name for name in names if isinstance(module._parameters.get(name), torch.Tensor) and codes_of(module._parameters[name]) is None]
    text = _C.recipe_quantizer(init.recipe.to_json(), "weight", kind) if init is not None and plain else ""
    return (plain, quantizer_of_text(traits_of(text).with_own_scale)) if text else ([], None)  # delayed scaling has no scales yet


def _check_blocks(module: Any, parts: list[str], quantizer: Quantizer) -> None:
    """Raises ValueError if a part of a joined weight ends inside a block, as the codes of the parts are one operand. Those that do not join are dequantized."""
    if not traits_of(quantizer.text).joins:
        return
    for name in parts[:-1]:
        rows = module._parameters[name].shape[0]
        if rows % (unit := rows_of_blocks(quantizer.text)):
            raise ValueError(
                f"{module._get_name()}: expected parts in whole blocks inside quantized_model_init, each but the last a multiple of {unit} rows, got {name} with "
                f"{rows}. Build one module for each part, or use a format with smaller blocks."
            )


def note_init(module: Any) -> None:
    """Constructors call it: it notes the block of `quantized_model_init` that the module is created in, if any."""
    if (init := _in_force.get()) is not None:
        module.__dict__[_PENDING] = init


def forget_init(module: Any) -> None:
    """Drops the note of `note_init`: all weights are quantized, or belong to an owner that quantizes them."""
    module.__dict__.pop(_PENDING, None)


def is_pending(module: Any) -> bool:
    """Whether a module must quantize weights once they have values."""
    return _PENDING in module.__dict__


def quantize_weights(module: Any) -> None:
    """Quantizes those weights of a module that have values, if it was created inside `quantized_model_init`."""
    init: _Init | None = module.__dict__.get(_PENDING)
    plain, quantizer = _pending_weights(module)
    if init is None or quantizer is None:
        forget_init(module)
        return
    for parts in module.__dict__.get("_joined", {}).values():
        _check_blocks(module, [name for name in parts if name in plain], quantizer)
    made = [name for name in plain if not module._parameters[name].is_meta]
    for name in made:
        _replace(module, name, in_codes(module._parameters[name], quantizer, init.keeps_numbers))
    if len(made) == len(plain):
        forget_init(module)
    if made and hasattr(module, "_bring_together"):
        module._bring_together()


def give_memory(module: Any, name: str, device: torch.device | str) -> None:
    """Replaces a parameter on the meta device by an uninitialised one on `device`."""
    param = module._parameters[name]
    made = torch.nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    _replace(module, name, made)


def _replace(module: Any, name: str, made: torch.nn.Parameter) -> None:
    """Swaps the contents of a parameter, so that optimizers still hold it. If torch cannot swap, the attribute gets another object."""
    try:
        torch.utils.swap_tensors(module._parameters[name], made)
    except RuntimeError:  # a weak reference, as compilers have, or a graph of shapes holds it
        setattr(module, name, made)


def finish_quantized_init(model: torch.nn.Module) -> torch.nn.Module:
    """Quantizes the weights of a model that `quantized_model_init` left on the meta device and that have values now. Returns the model.

    `load_state_dict`, `reset_parameters` and the first call of a module quantize its weights themselves. Call this function if the values were
    written in another way, such as by `torch.nn.init`, and codes are needed before the first call: by an optimizer that copies master weights, by
    compiled code or by `fully_shard`. Weights on the meta device stay there.

    >>> import torch, tandem
    >>> with tandem.quantized_model_init(recipe=tandem.recipe.MXFP8BlockScaling()):
    ...     layer = tandem.Linear(64, 64, bias=False, device="meta")
    >>> layer = layer.to_empty(device="cpu")
    >>> weight = torch.nn.init.trunc_normal_(layer.weight, std=0.02)
    >>> isinstance(tandem.finish_quantized_init(layer).weight, tandem.QuantizedTensor)
    True

    Args:
        model: a module of any class. The modules of this library inside it are quantized.
    """
    for module in model.modules():
        quantize_weights(module)
    return model


def finish_at_a_call(module: Any) -> None:
    """Quantizes weights at the first call of a module. It raises RuntimeError if `fully_shard` shards them, as then it is too late."""
    hooks = module._load_state_dict_post_hooks.values() if is_pending(module) else ()
    if any((getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.") for hook in hooks):
        raise RuntimeError(
            f"{module._get_name()}: expected weights in codes at the first call, as the module was made inside quantized_model_init and fully_shard shares "
            "them, got plain numbers. Call tandem.finish_quantized_init(model) on all ranks once they have values; load_state_dict and "
            "reset_parameters do it."
        )
    quantize_weights(module)


def resetting(reset: Callable[..., None]) -> Callable[..., None]:
    """Wraps `reset_parameters` of a module whose weights are quantized, or will be.

    The parameters are unquantized while it runs, as an initialiser of several steps would otherwise round at each step. A parameter on the meta
    device gets memory on the assigned device or the default device, or, if `fully_shard` shards it, on the device of its mesh."""

    @functools.wraps(reset)
    def drawn(self: Any, *args: Any, **kwargs: Any) -> None:
        parameters = self._parameters
        for name, param in list(parameters.items()):
            if param is not None and param.is_meta and is_shared(param):
                give_memory(self, name, param.device_mesh.device_type)
            elif param is not None and param.is_meta and self.__dict__.get("_deferred"):
                give_memory(self, name, self.__dict__.get("_device") or torch.get_default_device())
        codes = {name: param for name, param in parameters.items() if param is not None and not param.is_meta and codes_of(param) is not None}
        before = {name: numbers_of(param) for name, param in codes.items()}
        plain = {name: torch.nn.Parameter(numbers.clone(), requires_grad=codes[name].requires_grad) for name, numbers in before.items()}
        parameters.update(plain)
        init = self.__dict__.pop(_PENDING, None)  # a subclass may change the values after the base has drawn them
        try:
            reset(self, *args, **kwargs)
        finally:
            parameters.update(codes)
            if init is not None:
                self.__dict__[_PENDING] = init
        for name, param in codes.items():
            param.__dict__.update(vars(plain[name]))  # attributes that the module has set on it
            if is_shared(param) or not torch.equal(plain[name], before[name]):
                write(param, plain[name].detach())
        quantize_weights(self)

    return drawn


@contextlib.contextmanager
def loading(module: Any, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]) -> Iterator[None]:
    """The context in which a module loads a state dict: when it ends, loaded weights are quantized if they were or must be, whether copied or assigned."""
    init: _Init | None = module.__dict__.get(_PENDING)
    pending, own = _pending_weights(module)
    params = {name: param for name, param in module._parameters.items() if param is not None}
    kept = {name for name, param in params.items() if keeps_numbers(param)} | (set(pending) if init is not None and init.keeps_numbers else set())
    quantizers: dict[str, Quantizer] = {}
    for name, param in params.items():
        if (codes := codes_of(param)) is not None:
            codes.quantizer = for_share(param, codes.quantizer)
            quantizers[name] = codes.quantizer
        elif name in pending and own is not None:
            quantizers[name] = own
            has_parts = any(f"{prefix}{name}.{part}" in state_dict for part in PARTS)
            if has_parts and not is_shared(param) and (metadata.get("assign_to_params_buffers") or not param.is_meta):
                _replace(module, name, in_codes(param, own, False))
    before = dict(module._parameters)
    yield
    for name in quantizers:  # all ranks need one order, as they exchange amaxes
        param = module._parameters[name]
        if prefix + name not in state_dict or param.is_meta:
            continue
        if (codes := codes_of(param)) is None:
            made = in_codes(param, quantizers[name], name in kept)
            if param is before[name]:
                _replace(module, name, made)
            else:  # an assigned parameter may belong to another module, so its contents are not swapped
                setattr(module, name, made)
        elif name in kept and (FIRST_NUMBERS not in codes.__dict__ or param is not before[name] or name in pending):
            given = local_of(state_dict[prefix + name])
            keep_numbers(param, given if given.shape == codes.shape and not isinstance(given, QuantizedTensor) else codes._numbers())
    if pending and all(codes_of(module._parameters[name]) is not None for name in pending):
        forget_init(module)
