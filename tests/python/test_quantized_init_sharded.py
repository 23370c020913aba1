"""`quantized_model_init` on the meta device under fully_shard of FSDP2, in the orders in which model libraries give values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from recipes import RECIPES
from test_quantized_model_init import QUANTIZERS, numbers_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import tandem
from tandem import ops

QUANTIZER_OF = {type(recipe): quantizer for recipe, quantizer in QUANTIZERS.items()}
UNEVEN = {"current": 4, "delayed": 4, "mxfp8": 94, "blocks": 382, "nvfp4": 46}  # rows in whole blocks but for the last
NAMES = ["0.weight", "2.fc1_weight", "2.fc2_weight"]


def model_of(device=None):
    return ops.Sequential(ops.Linear(64, 256, device=device), ops.RMSNorm(256, device=device), tandem.LayerNormMLP(256, 256, device=device))


def sharded(recipe, keeps=True):
    with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=keeps):
        model = model_of("meta")
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def wanted_of(recipe, numbers):
    wanted = model_of()
    wanted.load_state_dict(numbers)
    for name in NAMES:
        module, _, last = name.rpartition(".")
        setattr(wanted.get_submodule(module), last, torch.nn.Parameter(tandem.quantize(numbers[name], QUANTIZER_OF[type(recipe)])))
    return wanted


def check(model, recipe, numbers, rank, size, keeps=True):
    """Shards are those of the codes of these numbers, are gathered as codes, and give what one process computes and learns."""
    wanted = wanted_of(recipe, numbers)
    for name, param in model.named_parameters():
        local = param.to_local()
        assert not local.is_meta and isinstance(local, tandem.QuantizedTensor) == (name in NAMES), name
        if name in NAMES and keeps:
            assert torch.equal(param.get_high_precision_init_val(), numbers[name].chunk(size)[rank]), name
    with tandem.autocast(recipe=recipe):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        y = model(x)
        expected = wanted(x)
    assert torch.equal(y, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    for name, param in wanted.named_parameters():
        grad = param.grad.clone()
        dist.all_reduce(grad)
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), grad / size, rtol=1e-4, atol=1e-6)
    model.unshard()
    for layer in (model[0], model[2]):
        layer.unshard()
    for name in NAMES:
        param, other = model.get_parameter(name), wanted.get_parameter(name)
        assert isinstance(param, tandem.QuantizedTensor)
        for part in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            assert torch.equal(getattr(param, part), getattr(other, part)), (name, part)


def some_numbers():
    torch.manual_seed(7)
    return numbers_of(model_of())


def check_full_state_dict(rank, size, name, broadcast, emptied):
    """From rank 0, or from each."""
    recipe, numbers = RECIPES[name], some_numbers()
    model = sharded(recipe)
    if emptied:
        model.to_empty(device="cpu")
    given = numbers if rank == 0 or not broadcast else {}
    set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    check(model, recipe, numbers, rank, size)


def check_second_load(rank, size, name):
    """Before and behind the first call: into what is in codes."""
    recipe, numbers = RECIPES[name], some_numbers()
    model = sharded(recipe).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for factor in (3.0, 1.0):
        set_model_state_dict(model, {key: value * factor for key, value in numbers.items()} if rank == 0 else {}, options=options)
    check(model, recipe, numbers, rank, size)
    for layer in (model, model[0], model[2]):
        layer.reshard()
    model.zero_grad()
    doubled = {key: value * 2 for key, value in numbers.items()}
    set_model_state_dict(model, dict(doubled) if rank == 0 else {}, options=options)
    check(model, recipe, doubled, rank, size)


def check_reset(rank, size, name, emptied):
    """As TransformerEngine's examples: shard, then reset each module. Values are drawn by each rank on the CPU, so they are written first to be known."""
    recipe = RECIPES[name]
    model = sharded(recipe)
    if emptied:
        model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters") and [*module.parameters(recurse=False)]:
            module.reset_parameters()
    numbers = {}
    for key, param in model.named_parameters():
        own = param.get_high_precision_init_val() if key in NAMES else param.to_local().detach()
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.contiguous())
        numbers[key] = torch.cat(parts)
        bound = 1 / numbers[key].shape[-1] ** 0.5 if key == "0.weight" else None
        assert bound is None or 0.9 * bound < numbers[key].abs().max() <= bound
    check(model, recipe, numbers, rank, size)


def check_written_in_place(rank, size, name):
    recipe, numbers = RECIPES[name], some_numbers()
    for finish in (True, False):
        model = sharded(recipe, keeps=False).to_empty(device="cpu")
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.to_local().copy_(numbers[key].chunk(size)[rank])
        if finish:
            tandem.finish_quantized_init(model)
            check(model, recipe, numbers, rank, size, keeps=False)
            assert not hasattr(model[0].weight, "get_high_precision_init_val")
            continue
        with pytest.raises(RuntimeError, match="Linear: expected weights in codes at the first call, as the module was made inside quantized_model_init and fully_shard shares them, got plain numbers. Call tandem.finish_quantized_init"):
            model(torch.randn(2, 64))


def check_checkpoint(rank, size, name, folder):
    """Plain shards saved by torch.distributed.checkpoint, read into plain shards on the way to codes, and into codes."""
    recipe, numbers = RECIPES[name], some_numbers()
    plain = model_of()
    plain.load_state_dict(numbers)
    fully_shard(plain)
    path = f"{folder}/{name}"
    dcp.save(get_model_state_dict(plain), checkpoint_id=path)
    model = sharded(recipe).to_empty(device="cpu")
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state)
    check(model, recipe, numbers, rank, size)


def check_checkpoint_of_codes(rank, size, name, folder):
    """Shards in codes are saved as their numbers, and read into shards in codes and into plain weights that nobody shares."""
    recipe, numbers = RECIPES[name], some_numbers()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, other = (sharded(recipe, keeps=False) for _ in range(2))
    set_model_state_dict(model, dict(numbers) if rank == 0 else {}, options=options)
    set_model_state_dict(other, {key: value * 0 for key, value in numbers.items()} if rank == 0 else {}, options=options)
    path = f"{folder}/{name}-codes"
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    check(other, recipe, numbers, rank, size, keeps=False)
    plain, wanted = model_of(), wanted_of(recipe, numbers)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=path)
    plain.load_state_dict(state)
    for key in NAMES:
        assert torch.equal(plain.get_parameter(key), wanted.get_parameter(key).dequantize())


def check_uneven(rank, size, name, given):
    """Rows of which the last of three ranks has fewer, or none, made on the meta device."""
    recipe, rows = RECIPES[name], UNEVEN[name]
    torch.manual_seed(0)
    numbers = torch.randn(rows, 64)
    with tandem.quantized_model_init(recipe=recipe):
        layer = ops.Linear(64, rows, bias=False, device="meta")
    layer = fully_shard(layer)
    if given == "values":
        layer.to_empty(device="cpu")
        with torch.no_grad():
            shares = [*numbers.chunk(size), *[numbers[:0]] * size]
            layer.weight.to_local().copy_(shares[rank])
        tandem.finish_quantized_init(layer)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(layer, {"weight": numbers.clone()} if rank == 0 else {}, options=options)
    wanted = ops.Linear(64, rows, bias=False)
    wanted.weight = torch.nn.Parameter(tandem.quantize(numbers, QUANTIZER_OF[type(recipe)]))
    x = torch.randn(8, 64)
    with tandem.autocast(recipe=recipe):
        y, expected = layer(x), wanted(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), wanted.weight.grad, rtol=1e-4, atol=1e-6)


def check_placements(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "dp"))
    with tandem.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = ops.Linear(64, 64, bias=False, device="meta")
    layer._parameters["weight"] = torch.nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh, [Shard(1), Shard(0)]))
    with pytest.raises(ValueError, match="quantized_model_init: expected weights that ranks share in one dimension of their mesh, got 2: .*. Share them by fully_shard"):
        tandem.finish_quantized_init(layer)


CHECKS = [
    *[(check_full_state_dict, flags) for flags in ((True, True), (True, False), (False, True))],
    (check_second_load, ()),
    (check_reset, (True,)),
    (check_reset, (False,)),
    (check_written_in_place, ()),
]
EACH = pytest.mark.parametrize("name", RECIPES)


def id_of(value):
    return getattr(value, "__name__", str(value))


@EACH
@pytest.mark.parametrize(("check_", "arguments"), CHECKS, ids=id_of)
def test_values_that_come_later(name, check_, arguments):
    on_ranks(2, check_, name, *arguments)


@EACH
@pytest.mark.parametrize("check_", [check_checkpoint, check_checkpoint_of_codes], ids=id_of)
def test_distributed_checkpoints(name, check_, tmp_path):
    on_ranks(2, check_, name, str(tmp_path))


@EACH
@pytest.mark.parametrize("given", ["values", "state dict"])
def test_shares_that_are_uneven_or_empty(name, given):
    on_ranks(3, check_uneven, name, given)


def test_placements():
    on_ranks(2, check_placements)
