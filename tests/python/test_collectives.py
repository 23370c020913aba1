"""Tensor and sequence parallelism over gloo processes, against one process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import group_of_one, on_ranks, threads_of_gloo
from support import DYNAMO_ERRORS, assert_equal
from torch.testing import assert_close

import tandem
from tandem import ops

HIDDEN, WIDE, ROWS = 8, 24, 6


def full(bias: bool) -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(HIDDEN), ops.Linear(HIDDEN, WIDE, bias=bias), ops.GELU(), ops.Linear(WIDE, HIDDEN, bias=bias))


def sharded(rank: int, size: int, sequence_parallel: bool, bias: bool) -> ops.Sequential:
    """The same block, of which a rank holds some features of the inner dimension."""
    whole = full(bias)
    parallel: dict[str, Any] = {"sequence_parallel": sequence_parallel, "bias": bias}
    block = ops.Sequential(
        ops.RMSNorm(HIDDEN),
        ops.Linear(HIDDEN, WIDE, tensor_parallel_mode="column", **parallel),
        ops.GELU(),
        ops.Linear(WIDE, HIDDEN, tensor_parallel_mode="row", **parallel),
    )
    with torch.no_grad():
        block[0].weight.copy_(whole[0].weight)
        block[1].weight.copy_(whole[1].weight.chunk(size)[rank])
        block[3].weight.copy_(whole[3].weight.chunk(size, 1)[rank])
        if bias:
            block[1].bias.copy_(whole[1].bias.chunk(size)[rank])
            block[3].bias.copy_(whole[3].bias / size)  # a term of the sum over ranks
    return block


def check_against_one_process(rank: int, size: int, sequence_parallel: bool, bias: bool, compiled: bool) -> None:
    block, whole = sharded(rank, size, sequence_parallel, bias), full(bias)
    call = torch.compile(block, fullgraph=True) if compiled else block
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (block, whole)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
        grad = torch.randn(ROWS, HIDDEN, generator=generator)
        own = slice(None) if not sequence_parallel else slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        x_own = x.detach()[own].clone().requires_grad_()
        expected, y = whole(x), call(x_own)
        expected.backward(grad)
        y.backward(grad[own])
        assert_close(y, expected[own])
        assert_close(x_own.grad, x.grad[own])
        assert_close(block[1].weight.grad, whole[1].weight.grad.chunk(size)[rank])
        assert_close(block[3].weight.grad, whole[3].weight.grad.chunk(size, 1)[rank])
        if sequence_parallel:  # what all ranks hold alike sees the rank's rows only, as in Megatron
            dist.all_reduce(block[0].weight.grad)
        assert_close(block[0].weight.grad, whole[0].weight.grad)
        if bias:  # each rank's is a term of the sum, as in TransformerEngine: all of them move
            block[3].bias.grad /= size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def check_order(rank: int, size: int) -> None:
    """The product of grad_weight stands between the start of a collective and the wait for it."""
    block = sharded(rank, size, True, True)
    block(torch.randn(ROWS // size, HIDDEN, requires_grad=True)).sum().backward()
    text = block.explain()
    backward = text[text.index("backward") :]
    column = re.search(r"all_gather\.grad_start(?:.|\n)*?basic_linear\.grad_weight(?:.|\n)*?all_gather\.grad_wait", backward)
    assert column is not None, backward
    assert "again_start" in backward, backward
    kept = text[text.index("kept for backward") : text.index("\n  backward")]
    assert "all_gather.y" not in kept, "the gathered rows are gathered again, not kept"


def check_masks(rank: int, size: int) -> None:
    """A frozen weight gathers nothing again; an input without a gradient scatters none."""
    block = sharded(rank, size, True, True)
    block[1].weight.requires_grad_(False)
    block(torch.randn(ROWS // size, HIDDEN)).sum().backward()
    text = block.explain()
    assert "again_start" not in text
    assert block[0].weight.grad is not None


def check_errors(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"expected out_features that {size} ranks share evenly, got 7. Use a multiple of {size}"):
        ops.Linear(8, 7, tensor_parallel_mode="column")
    with pytest.raises(ValueError, match='expected tensor_parallel_mode None, "column" or "row", got \'rows\''):
        ops.Linear(8, 8, tensor_parallel_mode="rows")
    row = ops.Linear(8 * size, 8, tensor_parallel_mode="row", sequence_parallel=True)
    with pytest.raises(ValueError, match=r"reduce_scatter: expected a first dimension that the \d+ ranks of the group share evenly, got x of"):
        row(torch.randn(size + 1, 8))
    with pytest.raises(TypeError, match="expected a torch.distributed process group, got int. Pass what new_group returned"):
        ops.AllReduce(3)
    for kind, name in ((ops.AllGather, "all_gather"), (ops.ReduceScatter, "reduce_scatter")):
        text = f"{name}: expected x with at least 1 dimension, along which ranks share rows, got a scalar. Pass x.reshape"
        for call in (kind(), torch.compile(kind(), fullgraph=True, backend="aot_eager")):
            with pytest.raises((ValueError, *DYNAMO_ERRORS), match=text):
                call(torch.tensor(1.0, requires_grad=True))
    assert ops.AllReduce()(torch.tensor(1.0)) == size


def check_changes(rank: int, size: int) -> None:
    """Attributes of a layer that ranks share count at the next call."""
    whole, block = full(True), sharded(rank, size, False, True)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = whole(x)
    assert_close(block(x), expected)
    for part in (block[1], block[3]):
        assert part.tensor_parallel_size == size and not part.sequence_parallel
        part.sequence_parallel = True
        assert part.sequence_parallel
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    assert_close(block(x[own]), expected[own])
    again, apart = dist.new_group(list(range(size))), dist.new_group([rank], use_local_synchronization=True)
    for part in (block[1], block[3]):
        part.tensor_parallel_group = again
        assert part.tensor_parallel_group is again
        with pytest.raises(ValueError, match=f"Linear: expected a tensor_parallel_group of {size} ranks, as it was built for, got one of 1. Build"):
            part.tensor_parallel_group = apart
        part.tensor_parallel_group = None  # all processes
    assert_close(block(x[own]), expected[own])
    bias = ops.Bias(2 * size, tensor_parallel=True)
    assert bias.tensor_parallel and bias.tensor_parallel_size == size and bias.local_size == 2 and bias(torch.zeros(3, 2)).shape == (3, 2)
    with pytest.raises(ValueError, match=f"Bias: expected a tensor_parallel_group of {size} ranks, as it was built for, got one of 1"):
        bias.tensor_parallel_group = apart
    with pytest.raises(ValueError, match=f"Bias: expected size that {size} ranks share evenly, got {size + 1}"):
        ops.Bias(size + 1, tensor_parallel=True)
    assert pickle.loads(pickle.dumps(bias)).tensor_parallel_group is bias.tensor_parallel_group
    keys = [*tandem.transformer_engine_state_dict(block[3])]
    assert keys == ["basic_ops.0.weight", "basic_ops.1.bias", *[f"basic_ops.{index}._extra_state" for index in range(3)]]


def check_products_alone(rank: int, size: int) -> None:
    """A `BasicLinear` has the collectives of a `Linear` around it, alone and in containers."""
    for mode in ("column", "row"):
        for sequence_parallel in (False, True):
            features = (HIDDEN, WIDE) if mode == "column" else (WIDE, HIDDEN)
            parallel: dict[str, Any] = {"tensor_parallel_mode": mode, "sequence_parallel": sequence_parallel}
            basic, linear = ops.BasicLinear(*features, **parallel), ops.Linear(*features, bias=False, **parallel)
            assert basic.weight.shape == linear.weight.shape and basic.tensor_parallel_group is linear.tensor_parallel_group
            assert (basic.tensor_parallel_mode, basic.tensor_parallel_size, basic.sequence_parallel) == (mode, size, sequence_parallel)
            assert (basic.in_features, basic.out_features) == features
            assert [*basic.state_dict()] == ["weight"] and (basic.local_in_features, basic.local_out_features) == basic.weight.shape[::-1]
            basic.weight = linear.weight
            x = torch.randn(ROWS, basic.local_in_features, requires_grad=True)
            for run in (basic, ops.Sequential(ops.Identity(), basic), copy.deepcopy(basic), pickle.loads(pickle.dumps(basic)), torch.compile(basic, fullgraph=True, backend="aot_eager")):
                y, expected = run(x), linear(x)
                assert_close(y, expected)
                grad = torch.ones_like(y)
                assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(expected, x, grad))
            basic.sequence_parallel = linear.sequence_parallel = not sequence_parallel
            assert_close(basic(x), linear(x))
            with pytest.raises(ValueError, match=f"BasicLinear: expected a tensor_parallel_group of {size} ranks, as it was built for, got one of 1"):
                basic.tensor_parallel_group = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match=f"BasicLinear: expected out_features that {size} ranks share evenly, got 7"):
        ops.BasicLinear(8, 7, tensor_parallel_mode="column")


def check_copies(rank: int, size: int) -> None:
    block = sharded(rank, size, True, True)
    x = torch.randn(ROWS // size, HIDDEN)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(copied(x), block(x))
        assert copied[1].tensor_parallel_group is block[1].tensor_parallel_group


def check_ddp(rank: int, size: int) -> None:
    """Each rank has some rows; gradients are averaged."""
    whole, wrapped = full(True), torch.nn.parallel.DistributedDataParallel(full(True))
    for step in range(2):
        x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(step))
        whole(x).square().sum().backward()
        wrapped(x.chunk(size)[rank]).square().sum().backward()
        for expected, param in zip(whole.parameters(), wrapped.parameters(), strict=True):
            assert_close(param.grad * size, expected.grad)


def check_ops(rank: int, size: int) -> None:
    x = torch.full((size, 2), float(rank + 1), requires_grad=True)
    total = sum(range(1, size + 1))
    y = ops.AllReduce()(x)
    assert torch.equal(y, torch.full((size, 2), float(total)))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(size, 2))
    gathered = ops.AllGather()(x)
    assert gathered.shape == (size * size, 2) and torch.equal(gathered[:: size, 0], torch.arange(1.0, size + 1))
    scattered = ops.ReduceScatter()(gathered)
    assert torch.equal(scattered, x * size)
    with torch.no_grad():
        assert torch.equal(ops.Sequential(ops.AllGather(), ops.Identity())(x), gathered)


def check_loss(rank: int, size: int) -> None:
    """Ranks that share the classes of a loss against one that has all."""
    torch.manual_seed(0)
    classes, rows = 6 * size, 2 * size
    weight, bias, class_weight, x = torch.randn(classes, HIDDEN), torch.randn(classes), torch.rand(classes), torch.randn(rows, HIDDEN)
    targets = torch.randint(classes, (rows,))
    targets[1] = -100
    more = {"label_smoothing": 0.1, "soft_cap": 3.0, "z_loss": 0.01}
    for dtype, reduction, options in [
        (torch.float32, "mean", {}),
        (torch.float32, "mean", more),
        (torch.float32, "none", more),
        (torch.float64, "sum", more),
        (torch.float64, "none", {}),
    ]:
        leaves = [each.detach().to(dtype).clone().requires_grad_() for each in (x, weight, bias)]
        wanted, best = tandem.linear_cross_entropy(
            leaves[0], leaves[1], targets, linear_bias=leaves[2], weight=class_weight, reduction=reduction, return_predictions=True, **options
        )
        seed = torch.rand_like(wanted)
        gradients = torch.autograd.grad(wanted, leaves, seed)
        own = [leaves[0], *(each.detach().chunk(size)[rank].clone().requires_grad_() for each in leaves[1:])]
        shared = {"weight": class_weight.chunk(size)[rank], "reduction": reduction, "process_group": dist.group.WORLD, **options}
        for call in (tandem.linear_cross_entropy, torch.compile(tandem.linear_cross_entropy, backend="aot_eager")):
            loss, predictions = call(own[0], own[1], targets, linear_bias=own[2], return_predictions=True, **shared)
            assert_close(loss, wanted)
            assert torch.equal(predictions, best)
            got = torch.autograd.grad(loss, own, seed)
            for gradient, whole in zip(got, (gradients[0], *(each.chunk(size)[rank] for each in gradients[1:])), strict=True):
                assert_close(gradient, whole, rtol=1e-5, atol=1e-6)

    # Of logits that each rank has for its own classes.
    logits = torch.randn(rows, classes)
    for reduction in ("mean", "none"):
        one, own_logits = logits.clone().requires_grad_(), logits.chunk(size, 1)[rank].clone().requires_grad_()
        wanted = ops.CrossEntropy(class_weight=class_weight, reduction=reduction, **more)(one, targets)
        loss = ops.CrossEntropy(class_weight=class_weight.chunk(size)[rank], reduction=reduction, tensor_parallel_group=dist.group.WORLD, **more)(own_logits, targets)
        assert_close(loss, wanted)
        seed = torch.rand_like(wanted)
        assert_close(torch.autograd.grad(loss, own_logits, seed)[0], torch.autograd.grad(wanted, one, seed)[0].chunk(size, 1)[rank], rtol=1e-5, atol=1e-6)

    # As an op behind a norm, with rows shared too, and what it says where it cannot be.
    whole = ops.Sequential(ops.RMSNorm(HIDDEN), ops.LinearCrossEntropy(HIDDEN, classes))
    for sequence_parallel in (False, True):
        loss = ops.LinearCrossEntropy(HIDDEN, classes, tensor_parallel_group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        block = ops.Sequential(ops.RMSNorm(HIDDEN), pickle.loads(pickle.dumps(loss)))
        assert block[1].weight.shape == (classes // size, HIDDEN)
        with torch.no_grad():
            whole[1].weight.copy_(weight)
            block[1].weight.copy_(weight.chunk(size)[rank])
        own_x, one = (x.chunk(size)[rank] if sequence_parallel else x).clone().requires_grad_(), x.clone().requires_grad_()
        whole(one, targets).backward()
        block(own_x, targets).backward()
        assert_close(own_x.grad, one.grad.chunk(size)[rank] if sequence_parallel else one.grad)
        assert_close(block[1].weight.grad, whole[1].weight.grad.chunk(size)[rank])
        whole.zero_grad(), block.zero_grad()
    with pytest.raises(ValueError, match=re.escape(f"expected num_classes that {size} ranks share evenly, got {classes + 1}")):
        ops.LinearCrossEntropy(HIDDEN, classes + 1, tensor_parallel_group=dist.group.WORLD)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(IndexError, match=f"expected targets from 0 to {classes - 1}, or -100 where a row is ignored, got {classes} in row 1"):
            tandem.linear_cross_entropy(
                x[:2].to(dtype), weight.chunk(size)[rank].to(dtype), torch.tensor([0, classes]), process_group=dist.group.WORLD
            )


def check_delayed_scaling(rank: int, size: int, compiled: bool) -> None:
    """Ranks that share their amaxes have the scales of one process that sees all rows."""
    recipe = tandem.recipe.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    whole, block = ops.Linear(HIDDEN, WIDE), ops.Linear(HIDDEN, WIDE)
    alone = ops.Linear(HIDDEN, WIDE)
    for module in (block, alone):
        module.load_state_dict(whole.state_dict())
    call = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    apart = dist.new_group([rank], use_local_synchronization=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, HIDDEN, generator=generator) * torch.arange(1.0, ROWS + 1)[:, None]
        own = x.chunk(size)[rank]
        with tandem.autocast(recipe=tandem.recipe.DelayedScaling(amax_history_len=4, reduce_amax=False)):
            expected = whole(x)
        with tandem.autocast(recipe=recipe):
            y = call(own)
        with tandem.autocast(recipe=recipe, amax_reduction_group=apart):
            of_this_rank = alone(own)
        assert_close(y, expected.chunk(size)[rank])
        expected.square().sum().backward()
        y.square().sum().backward()
        of_this_rank.square().sum().backward()
    if compiled:
        return  # the state is one update behind: the next call brings it up to date
    assert_equal(block.state_dict(), whole.state_dict())
    history = alone.recipe_state.forward.amax_history[3, 0]
    assert history == own.abs().max() and whole.recipe_state.forward.amax_history[3, 0] == x.abs().max()


def check_delayed_scaling_errors(rank: int, size: int) -> None:
    linear = ops.Linear(HIDDEN, WIDE)
    with pytest.raises(RuntimeError, match="expected every process of the amax group to have called the same modules in this region"):
        with tandem.autocast(recipe=tandem.recipe.DelayedScaling()):
            for _ in range(1 if rank == 0 else 0):
                linear(torch.ones(1, HIDDEN))
            ops.Linear(HIDDEN, WIDE)(torch.ones(1, HIDDEN))


class Product(ops.FusedOperation):
    """A product alone, by the op's own forward."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        (linear,) = self.basic_ops
        return linear.op_forward(basic_op_ctxs[0], input_), [()]


def check_fusion_functions_see_the_collectives(rank: int, size: int) -> None:
    torch.manual_seed(0)
    linear = ops.BasicLinear(HIDDEN, WIDE, tensor_parallel_mode="column")
    row = ops.BasicLinear(WIDE, HIDDEN, tensor_parallel_mode="row", sequence_parallel=True)
    box, x = ops.Sequential(linear, ops.GELU(), row), torch.randn(ROWS, HIDDEN, requires_grad=True)
    y = box(x)
    expected = [y, *torch.autograd.grad(y.sum(), [x, *box.parameters()])]
    seen: list[list[str]] = []

    def fuse(found: Any, **_: Any) -> Any:
        seen.append([type(op).__name__ for op in found])
        return [Product([op]) if isinstance(op, ops.BasicLinear) else op for op in found]

    with ops.register_backward_fusion(lambda found, **_: list(found)), ops.register_forward_fusion(fuse):
        y = box(x)
        for got, wanted in zip([y, *torch.autograd.grad(y.sum(), [x, *box.parameters()])], expected, strict=True):
            assert_close(got, wanted)
        assert len([name for name in box.fusions_made() if name.endswith("fuse")]) == 1, box.explain()
    with ops.register_fusion("product", [ops.BasicLinear], forward=lambda x, linear: linear.op_forward_compute(x)[0]):
        assert_close(box(x), expected[0])
        assert "product" in box.fusions_made()
    assert seen[0] == ["ReduceGradient", "BasicLinear", "GELU", "BasicLinear", "ReduceScatter"]


def check_abort(rank: int, size: int) -> None:
    if rank == 0:  # two stacks at once would be mixed
        os.abort()
    dist.barrier()  # until it is told that the other is gone


def check_that_fails_on_the_last_rank(rank: int, size: int) -> None:
    assert rank < size - 1, "planted"


def test_a_rank_that_aborts_shows_its_stack() -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 0: ended with signal SIGABRT") as failure:
        on_ranks(2, check_abort)
    assert "Fatal Python error: Aborted" in str(failure.value) and "in check_abort" in str(failure.value)


def test_a_rank_that_fails_says_where() -> None:
    for size in (1, 2):  # the check behind it has other processes
        with pytest.raises(pytest.fail.Exception, match=rf"rank {size - 1}: Traceback(?s:.*)in check_that_fails_on_the_last_rank(?s:.*): planted"):
            on_ranks(size, check_that_fails_on_the_last_rank)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_block_on_several_ranks_equals_one_process(size: int, sequence_parallel: bool, bias: bool) -> None:
    on_ranks(size, check_against_one_process, sequence_parallel, bias, False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_three_steps_of_a_compiled_block_equal_one_process(sequence_parallel: bool) -> None:
    on_ranks(2, check_against_one_process, sequence_parallel, True, True)


@pytest.mark.parametrize(
    "check",
    [check_order, check_masks, check_errors, check_changes, check_products_alone, check_copies, check_ops, check_loss, check_ddp, check_fusion_functions_see_the_collectives],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_on_two_ranks(check: Any) -> None:
    on_ranks(2, check)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_amaxes_are_those_of_all_ranks(size: int, compiled: bool) -> None:
    on_ranks(size, check_delayed_scaling, compiled)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_call_other_modules_are_told(size: int) -> None:
    on_ranks(size, check_delayed_scaling_errors)


def test_a_group_ends_with_its_layers(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        block = ops.Sequential(ops.AllReduce(), ops.Linear(4, 4), ops.AllGather())
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
        torch.compile(block, fullgraph=True, backend="aot_eager")(torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert threads_of_gloo()
        torch.compiler.reset()
        del block
        gc.collect()
    assert not threads_of_gloo()
