"""Quantized parameters that fully_shard of FSDP2 shards: codes are gathered, evenly or not, and ranks share the amax of what they write."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import recipes
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_quantized_tensors import E4M3, QUANTIZERS, same
from torch.distributed.fsdp import fully_shard

import tandem
from tandem import ops
from tandem.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

RECIPES = {"current": Float8CurrentScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True)}


def trained(model, masters, recipe, shards, steps=3):
    losses = []
    optimizer = torch.optim.SGD([masters.get(name, param) for name, param in model.named_parameters()], lr=0.05)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).chunk(shards[1])[shards[0]]
        with tandem.autocast(recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        for name, master in masters.items():
            param = model.get_parameter(name)
            grad = param.grad
            master.grad, param.grad = (grad.to_local() if hasattr(grad, "to_local") else grad), None
        optimizer.step()
        optimizer.zero_grad()
        for name, master in masters.items():
            param = model.get_parameter(name)
            with torch.no_grad():
                (param.to_local() if hasattr(param, "to_local") else param).quantize_(master)
        losses.append(loss.item())
    return losses


def check_gathered(model, wanted):
    """Each rank gathers the codes that are wanted of the parameters by name."""
    model.unshard()
    for name, codes in wanted.items():
        same(model.get_parameter(name).detach(), codes)
    model.reshard()


def check_training(model, whole, numbers, recipe, rank, size):
    """Shards with master copies of these numbers learn what one process learns with the whole; the copies of this rank."""
    masters = {name: value.chunk(size)[rank].clone().requires_grad_() for name, value in numbers.items()}
    wholes = {name: value.clone().requires_grad_() for name, value in numbers.items()}
    losses = torch.tensor(trained(model, masters, recipe, (rank, size)))
    dist.all_reduce(losses)
    expected = torch.tensor(trained(whole, wholes, recipe, (0, 1)))
    torch.testing.assert_close(losses / size, expected, rtol=0.02, atol=1e-4)
    for name, master in masters.items():
        assert (master - wholes[name].chunk(size)[rank]).abs().max() < 0.01
    return masters


def check_fsdp(rank: int, size: int, name: str) -> None:
    recipe = RECIPES[name]
    quantizer = tandem.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True) if name == "current" else QUANTIZERS[name]
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(64, 128), ops.ReLU(), ops.Linear(128, 64))
    numbers = {name: param.detach().clone() for name, param in model.named_parameters() if param.dim() == 2}
    for linear_ in (model[0], model[2]):
        linear_.weight = torch.nn.Parameter(tandem.quantize(linear_.weight.detach(), quantizer))
    whole = copy.deepcopy(model)
    fully_shard(model)
    shard = model[0].weight.to_local()
    assert isinstance(shard, tandem.QuantizedTensor) and shard.shape[0] == 128 // size
    with torch.no_grad(), tandem.autocast(recipe=recipe):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
        assert torch.equal(model(x), whole(x))
    check_gathered(model, {name: whole.get_parameter(name).detach() for name in numbers})
    check_training(model, whole, numbers, recipe, rank, size)


def check_fsdp_errors(rank: int, size: int) -> None:
    def sharded(rows, quantizer):
        layer = ops.Linear(64, rows, bias=False)
        layer.weight = torch.nn.Parameter(tandem.quantize(torch.ones(rows, 64) * (rank + 1), quantizer))
        return fully_shard(layer)

    with pytest.raises(ValueError, match="fully_shard: expected 2 ranks to share the first dimension of a quantized parameter in whole blocks, each a multiple of 32 rows but the last, got 48 of 96"):
        sharded(96, QUANTIZERS["mxfp8"])(torch.randn(2, 64))
    with pytest.raises(ValueError, match="fully_shard: expected one rowwise_scale_inv on all ranks, as one serves the whole tensor, got several. Write shards behind the first call"):
        sharded(64, QUANTIZERS["current"])(torch.randn(2, 64))
    with pytest.raises(ValueError, match="fully_shard: expected one amax_rowwise on all ranks, .* got several. Write shards behind the first call, from which on"):
        sharded(64, QUANTIZERS["nvfp4"])(torch.randn(2, 64))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", [2, 1])  # one rank alone has all rows
def test_sharded_parameters_are_gathered_in_codes(size, name):
    on_ranks(size, check_fsdp, name)


def test_a_group_of_an_amax_is_one_of_processes():
    with pytest.raises(TypeError, match="Float8CurrentScalingQuantizer: expected amax_reduction_group to be a process group of torch.distributed or None, got str"):
        tandem.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group="0")


def check_amax(rank: int, size: int) -> None:
    x = torch.randn(8, 21, generator=torch.Generator().manual_seed(0))
    for group in (None, dist.group.WORLD):
        quantizer = tandem.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=group)
        codes = tandem.quantize(x.chunk(size)[rank], quantizer)
        wanted = tandem.quantize(x, QUANTIZERS["current"])
        assert torch.equal(codes.rowwise_scale_inv, wanted.rowwise_scale_inv)
        assert torch.equal(codes.rowwise_data, wanted.rowwise_data.chunk(size)[rank]) and codes.columnwise_data is codes.rowwise_data
        assert copy.deepcopy(codes).quantizer == quantizer
        same(pickle.loads(pickle.dumps(codes)), codes)
    for rows, squares in ((64, True), (37, True), (41, False)):
        x = torch.randn(2 * rows, 32, generator=torch.Generator().manual_seed(1))
        alone = tandem.NVFP4Quantizer(with_2d_quantization=squares)
        codes = tandem.quantize(x.chunk(size)[rank], tandem.NVFP4Quantizer(with_2d_quantization=squares, with_amax_reduction=True))
        wanted = tandem.quantize(x, alone)
        for part in ("amax_rowwise", "amax_columnwise"):
            assert torch.equal(getattr(codes, part), getattr(wanted, part))
        if squares and rows % 16:
            continue  # other blocks
        assert torch.equal(codes.dequantize(), wanted.dequantize().chunk(size)[rank])
        codes.zero_()
        assert not codes.dequantize().any()
    with pytest.raises(ValueError, match=r"NVFP4Quantizer: expected a tensor of rows, which processes share, where they share its amax, got shape \[4\]"):
        tandem.quantize(torch.ones(4), tandem.NVFP4Quantizer(with_amax_reduction=True))


def check_made(rank: int, size: int, name: str, rows: int) -> None:
    """Weights of quantized_model_init, trained with sharded master copies, against one process with the whole."""
    recipe = recipes.RECIPES[name]
    torch.manual_seed(0)
    with tandem.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = ops.Sequential(ops.Linear(64, rows), ops.ReLU(), ops.Linear(rows, rows))
    numbers = {name: param.get_high_precision_init_val() for name, param in model.named_parameters() if isinstance(param, tandem.QuantizedTensor)}
    whole = copy.deepcopy(model)
    fully_shard(model)
    check_gathered(model, {name: whole.get_parameter(name).detach() for name in numbers})
    length = min(-(-rows // size), max(rows - rank * -(-rows // size), 0))
    assert all(model.get_parameter(name).to_local().shape[0] == length for name in numbers), "as torch shares it"
    masters = check_training(model, whole, numbers, recipe, rank, size)
    gathered = {}
    for name, master in masters.items():  # what is gathered is what one process makes of all masters
        parts = [None] * size
        dist.all_gather_object(parts, master.detach())
        gathered[name] = tandem.quantize(torch.cat(parts), whole.get_parameter(name).quantizer)
    check_gathered(model, gathered)


def check_empty_share(rank: int, size: int) -> None:
    """Of two rows on three ranks the last has none."""
    torch.manual_seed(0)
    layer = ops.Linear(64, 2, bias=False)
    layer.weight = torch.nn.Parameter(tandem.quantize(layer.weight.detach(), QUANTIZERS["current"]))
    whole = copy.deepcopy(layer)
    fully_shard(layer)
    x = torch.randn(4, 64)
    assert torch.equal(layer(x), whole(x))
    layer.reshard()
    new = torch.randn(2, 64)
    with torch.no_grad():
        layer.weight.to_local().quantize_(new[rank : rank + 1])
    whole.weight.quantize_(new)
    assert torch.equal(layer(x), whole(x))
    layer.reshard()
    same(pickle.loads(pickle.dumps(layer.weight.to_local().detach())), layer.weight.to_local().detach())


def check_first_write_before_a_call(rank: int, size: int) -> None:
    layer = ops.Linear(64, 64, bias=False)
    layer.weight = torch.nn.Parameter(tandem.quantize(torch.ones(64, 64), QUANTIZERS["current"]))
    fully_shard(layer)
    with torch.no_grad():
        layer.weight.to_local().quantize_(torch.full((64 // size, 64), rank + 1.0))
    with pytest.raises(ValueError, match="expected one rowwise_scale_inv on all ranks, .* got several. Write shards behind the first call, from which on ranks"):
        layer(torch.randn(2, 64))


# Blocks of columns have 32, 128 and 16 rows; a scale of the whole tensor cuts nothing. Shares of three ranks are uneven.
@pytest.mark.parametrize(
    ("size", "name", "rows"), [*((2, name, 256) for name in recipes.RECIPES), (3, "current", 100), (3, "delayed", 64), (3, "mxfp8", 95), (3, "nvfp4", 95)]
)
def test_ranks_train_what_quantized_model_init_made(size, name, rows):
    on_ranks(size, check_made, name, rows)


def test_ranks_with_fewer_rows_pack_parts_of_the_same_sizes():
    """Also one whose column codes, two in a byte, have as many rows as its share."""
    mesh = SimpleNamespace(size=lambda: 9, get_group=lambda: None)
    shares = [tandem.quantize(torch.randn(rows, 64), QUANTIZERS["nvfp4"]) for rows in (16, 8)]
    of_all, of_last = (share.fsdp_pre_all_gather(mesh, (136, 64), None, None, None) for share in shares)
    assert of_all[1].sizes == of_last[1].sizes and [piece.shape for piece in of_all[0]] == [piece.shape for piece in of_last[0]]


def test_parts_of_one_amax_in_four_bits():
    with pytest.raises(NotImplementedError, match="NVFP4Quantizer: expected with_rht=False with with_amax_reduction=True, as the largest rotated number"):
        tandem.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_amax_reduction=True)
    with pytest.raises(TypeError, match="NVFP4Quantizer: expected amax_reduction_group to be a process group of torch.distributed or None, got str"):
        tandem.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group="0")


def check_broadcast(rank: int, size: int) -> None:
    for name in ("current", "lines", "nvfp4"):
        torch.manual_seed(rank)
        codes = tandem.quantize(torch.randn(64, 160), QUANTIZERS[name])
        torch.manual_seed(0)
        wanted = tandem.quantize(torch.randn(64, 160), QUANTIZERS[name])
        param = torch.nn.Parameter(codes.clone())
        dist.broadcast(param, 0)
        same(param.detach(), wanted)
        dist._broadcast_coalesced(dist.group.WORLD, [codes.detach()], 1 << 20, 0)
        same(codes, wanted)
        gathered = [torch.empty(64, 160) for _ in range(size)]
        dist.all_gather(gathered, codes)
        assert all(torch.equal(each, wanted.dequantize()) for each in gathered)
        for write in (lambda x: dist.all_reduce(x), lambda x: dist.broadcast(x.t(), 0), lambda x: dist.all_gather([x, x], x)):
            with pytest.raises(RuntimeError, match="QuantizedTensor: expected plain tensors that a collective writes into, got one in codes for"):
                write(codes)
    torch.manual_seed(0)
    with tandem.quantized_model_init(recipe=RECIPES["nvfp4"]):
        linear = tandem.Linear(64, 64)
    before = linear.weight.clone()
    torch.nn.parallel.DistributedDataParallel(linear)
    same(linear.weight.detach(), before.detach())


@pytest.mark.parametrize(
    ("size", "check"),
    [(2, check_fsdp_errors), (2, check_amax), (2, check_first_write_before_a_call), (2, check_broadcast), (3, check_empty_share)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_on_ranks(size, check):
    on_ranks(size, check)
