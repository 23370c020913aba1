"""Attributes by TransformerEngine's names: what they are, that a change counts at the next call, and which changes are refused."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tandem
import tandem.ops as ops

VALUES = [
    (lambda: ops.BasicLinear(4, 2), {"in_features": 4, "out_features": 2, "local_in_features": 4, "local_out_features": 2}),
    (lambda: ops.BasicLinear(4, 2), {"tensor_parallel_mode": None, "tensor_parallel_group": None, "tensor_parallel_size": 1}),
    (lambda: ops.BasicLinear(4, 2), {"sequence_parallel": False, "accumulate_into_main_grad": False, "device": torch.device("cpu")}),
    (lambda: ops.Linear(4, 2), {"in_features": 4, "out_features": 2, "local_in_features": 4, "local_out_features": 2}),
    (lambda: ops.Linear(4, 2), {"tensor_parallel_mode": None, "tensor_parallel_group": None, "tensor_parallel_size": 1}),
    (lambda: ops.Linear(4, 2), {"sequence_parallel": False, "device": torch.device("cpu")}),
    (lambda: ops.Bias(4), {"local_size": 4, "size": 4, "tensor_parallel": False, "tensor_parallel_size": 1, "tensor_parallel_group": None}),
    (lambda: ops.Bias(4), {"device": torch.device("cpu")}),
    (lambda: ops.LayerNorm(4, eps=0.5), {"eps": 0.5, "zero_centered_gamma": False, "device": torch.device("cpu")}),
    (lambda: ops.RMSNorm(4, zero_centered_gamma=True), {"zero_centered_gamma": True, "eps": 1e-5, "device": torch.device("cpu")}),
    (lambda: ops.Dropout(0.25), {"dropout_probability": 0.25, "p": 0.25}),
    (lambda: ops.ConstantScale(3), {"scale": 3.0}),
    (lambda: ops.Reshape([2, -1]), {"shape": (2, -1)}),
    (lambda: ops.AddExtraInput(in_place=True), {"in_place": True, "num_extra_inputs": 1, "num_extra_outputs": 0}),
    (lambda: ops.MakeExtraOutput(), {"in_place": False, "num_extra_inputs": 0, "num_extra_outputs": 1}),
    (lambda: ops.Quantize(False, True), {"quantize_forward": False, "quantize_backward": True}),
    (lambda: ops.GroupedLinear(2, 4, 3), {"num_groups": 2, "in_features": 4, "out_features": 3, "device": torch.device("cpu")}),
]


@pytest.mark.parametrize(("make", "values"), VALUES)
def test_they_have_transformer_engines_names_and_may_be_written(make, values):
    op = make()
    assert {name: getattr(op, name) for name in values} == values
    for name, value in values.items():
        if not name.startswith("num_"):
            setattr(op, name, value)
    assert {name: getattr(op, name) for name in values} == values


CHANGES = [
    (lambda: ops.Dropout(0.0), "dropout_probability", 1.0, lambda x: x * 0),
    (lambda: ops.Dropout(0.0), "p", 1.0, lambda x: x * 0),
    (lambda: ops.ConstantScale(2.0), "scale", 3.0, lambda x: x * 3),
    (lambda: ops.Reshape((2, 4)), "shape", (4, 2), lambda x: x.reshape(4, 2)),
    (lambda: ops.RMSNorm(4), "eps", 2.0, lambda x: torch.nn.functional.rms_norm(x, (4,), eps=2.0)),
    (lambda: ops.LayerNorm(4), "eps", 2.0, lambda x: torch.nn.functional.layer_norm(x, (4,), eps=2.0)),
    (lambda: ops.LayerNorm(4), "zero_centered_gamma", True, lambda x: 2 * torch.nn.functional.layer_norm(x, (4,))),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize(("make", "name", "value", "expected"), CHANGES)
def test_a_change_counts_at_the_next_call(make, name, value, expected, boxed, compiled, fresh_dynamo):
    op, x = make(), torch.randn(2, 4)
    module = ops.Sequential(ops.Identity(), op) if boxed else op
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    call(x)
    setattr(op, name, value)
    torch.testing.assert_close(call(x), expected(x))


def test_where_gradients_of_weights_go_may_change():
    linear, layer = ops.Linear(4, 2), tandem.LayerNormLinear(4, 2)
    for module, switch in ((linear, lambda on: setattr(linear.basic_ops[0], "accumulate_into_main_grad", on)), (layer, lambda on: setattr(layer, "fuse_wgrad_accumulation", on))):
        x = torch.randn(3, 4)
        module(x).sum().backward()
        expected, module.weight.grad = module.weight.grad, None
        module.weight.main_grad = torch.zeros(2, 4)
        switch(True)
        module(x).sum().backward()
        assert module.weight.grad is None and torch.equal(module.weight.main_grad, expected)
        switch(False)
        module(x).sum().backward()
        assert torch.equal(module.weight.grad, expected) and torch.equal(module.weight.main_grad, expected)
    assert layer.fuse_wgrad_accumulation is False
    with pytest.raises(ValueError, match="BasicLinear: expected accumulate_into_main_grad to be True or False, got 2. Pass a bool."):
        linear.basic_ops[0].accumulate_into_main_grad = 2
    with pytest.raises(ValueError, match="LayerNormLinear: expected fuse_wgrad_accumulation to be True or False, got 2"):
        layer.fuse_wgrad_accumulation = 2


FIXED = [
    (lambda: ops.Linear(4, 2), "tensor_parallel_mode", "row"),
    (lambda: ops.Linear(4, 2), "tensor_parallel_size", 2),
    (lambda: ops.BasicLinear(4, 2), "tensor_parallel_mode", "column"),
    (lambda: ops.BasicLinear(4, 2), "tensor_parallel_size", 2),
    (lambda: ops.Bias(4), "tensor_parallel", True),
    (lambda: ops.Bias(4), "tensor_parallel_size", 2),
    (lambda: tandem.LayerNormLinear(4, 2), "parallel_mode", "row"),
    (lambda: tandem.LayerNormLinear(4, 2), "return_bias", True),
    (lambda: tandem.LayerNormLinear(4, 2), "sequence_parallel", True),
    (lambda: tandem.LayerNormMLP(4, 2), "activation", "relu"),
    (lambda: tandem.LayerNormMLP(4, 2), "normalization", "RMSNorm"),
    (lambda: tandem.LayerNormMLP(4, 2), "use_bias", False),
    (lambda: tandem.LayerNormMLP(4, 2), "return_layernorm_output", True),
]


@pytest.mark.parametrize(("make", "name", "value"), FIXED)
def test_what_shapes_or_the_list_of_ops_follow_from_is_refused(make, name, value):
    module = make()
    built = getattr(module, name)
    text = f"{type(module).__name__}: expected {name}={built!r}, with which it was built, got {value!r}. Build another one"
    with pytest.raises(ValueError, match=re.escape(text)):
        setattr(module, name, value)
    assert getattr(module, name) == built


def test_a_module_whose_constructor_has_not_run():
    class Own(ops.BasicLinear):
        def __init__(self):
            torch.nn.Module.__init__(self)

    with pytest.raises(AttributeError, match="tensor_parallel_mode"):
        Own().tensor_parallel_mode  # noqa: B018


@pytest.mark.parametrize("size", [np.int64(4), np.int32(4), np.uint8(4), torch.tensor(4)])
def test_whole_numbers_of_other_libraries(size):
    for op in (ops.Linear(size, size), ops.BasicLinear(size, size), ops.Bias(size), ops.RMSNorm(size), ops.LayerNorm([size]), ops.GroupedLinear(size, size, size)):
        shape = next(iter(op.parameters())).shape
        assert set(shape) == {4} and all(type(n) is int for n in shape)
    linear = ops.Linear(size, 2)
    assert type(linear.in_features) is int and linear.local_in_features == 4
    assert ops.Reshape((size, -1)).shape == (4, -1)
    assert ops.Dropout(np.float32(0.5)).p == 0.5
    assert {type(unit.glu_interleave_size) for unit in (ops.SwiGLU(glu_interleave_size=size), ops.ScaledSwiGLU(size))} == {int}
    box = ops.Sequential(ops.Identity(), ops.GELU())
    assert box[np.int64(1)] is box[1]
    assert ops.MakeExtraOutput().set_extra_output_channel(np.int64(0), "a")._extra_output_channels == ["a"]
    assert tandem.LayerNormLinear(size, size).weight.shape == (4, 4) and tandem.LayerNormMLP(size, size).fc1_weight.shape == (4, 4)


@pytest.mark.parametrize("size", [4.0, "4", True, np.array([4, 4]), None, 0, -1])
def test_what_is_no_whole_number_is_refused(size):
    with pytest.raises(ValueError, match="expected in_features to be a whole number > 0, got"):
        ops.Linear(size, 4)


HARMLESS = [
    lambda: ops.Linear(4, 2, sequence_parallel=True),
    lambda: ops.Linear(4, 2, tensor_parallel_group="anything"),
    lambda: ops.BasicLinear(4, 2, sequence_parallel=True),
    lambda: ops.BasicLinear(4, 2, tensor_parallel_group="anything"),
    lambda: ops.BasicLinear(4, 2, userbuffers_options={}),
    lambda: ops.Bias(4, tensor_parallel_group="anything"),
    lambda: ops.LayerNorm(4, sm_margin=8),
    lambda: ops.RMSNorm(4, sm_margin={"forward": 4, "backward": 2, "inference": 0}),
]


@pytest.mark.parametrize("make", HARMLESS)
def test_arguments_without_effect_are_accepted(make):
    op = make()
    assert op(torch.randn(3, 4)).shape[0] == 3
    assert not getattr(op, "sequence_parallel", False) and getattr(op, "tensor_parallel_group", None) is None


REFUSED = [
    (lambda: ops.LayerNorm(4, sm_margin=-1), "LayerNorm: expected sm_margin to be a whole number >= 0, or a dict of such, got -1. Leave it out."),
    (lambda: ops.RMSNorm(4, sm_margin="all"), "RMSNorm: expected sm_margin to be a whole number >= 0, or a dict of such, got 'all'"),
    (lambda: ops.BasicLinear(4, 2, sequence_parallel=2), "BasicLinear: expected sequence_parallel to be True or False, got 2"),
    (lambda: ops.Linear(4, 2, sequence_parallel=2), "Linear: expected sequence_parallel to be True or False, got 2"),
    (lambda: ops.Bias(4, tensor_parallel=2), "Bias: expected tensor_parallel to be True or False, got 2"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_arguments_that_mean_nothing_are_refused(make, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


def test_an_op_has_no_ranks_without_processes():
    with pytest.raises(RuntimeError, match="Bias: expected processes that know each other, got none. Call torch.distributed.init_process_group first."):
        ops.Bias(4, tensor_parallel=True)
    with pytest.raises(RuntimeError, match="BasicLinear: expected processes that know each other, got none"):
        ops.BasicLinear(4, 2, tensor_parallel_mode="column")
    with pytest.raises(RuntimeError, match="Linear: expected processes that know each other, got none"):
        ops.Linear(4, 2, tensor_parallel_mode="column")


def test_a_group_of_one_rank_is_none(one_rank):
    for op in (ops.BasicLinear(4, 2, tensor_parallel_mode="row"), ops.Linear(4, 2, tensor_parallel_mode="column", sequence_parallel=True)):
        assert op.tensor_parallel_mode is None and op.tensor_parallel_size == 1 and not op.sequence_parallel
        assert len(list(op.flat_ops())) == (1 if isinstance(op, ops.BasicLinear) else 2), "no collectives"
        assert op(torch.randn(3, 4)).shape == (3, 2)
    bias = ops.Bias(4, tensor_parallel=True)
    assert not bias.tensor_parallel and bias.local_size == 4
    bias.tensor_parallel_group = dist.group.WORLD
    assert bias.tensor_parallel_group is dist.group.WORLD
    gather = ops.AllGather()
    assert gather.process_group is dist.group.WORLD and gather.process_group_size == 1
    gather.process_group = dist.new_group([0])
    assert gather.process_group is not dist.group.WORLD and gather(torch.ones(2)).shape == (2,)
    with pytest.raises(TypeError, match="AllGather: expected a torch.distributed process group, got int. Pass what new_group returned"):
        gather.process_group = 3
