"""OperationFuser: a pipeline by itself, and what it shows of a plan."""

import pytest
import test_fusions_covering as covering
import torch
from support import fork, join
from test_fusions_python import JointSquare, replacing

import tandem.ops as ops
from tandem.ops import basic, fused, fuser
from tandem.ops.fuser import OperationFuser


def listed(to_caller=False):
    return [ops.Linear(8, 8), fork("a", to_caller), ops.AddExtraInput(), join("a")]


def test_paths_of_import():
    assert basic.BasicLinear is ops.BasicLinear and ops.basic is basic and ops.fused is fused and ops.fuser is fuser
    assert {"Bias", "Dropout", "GELU", "GroupedLinear", "Identity", "RMSNorm", "SwiGLU"} <= set(basic.__all__) == set(dir(basic))
    assert not {"Linear", "Sequential", "BasicOperation"} & set(basic.__all__)
    from tandem.ops.fuser import register_forward_fusion

    assert register_forward_fusion is ops.register_forward_fusion


def test_the_wiring():
    made = OperationFuser(listed(to_caller=True))
    assert made.num_extra_inputs == 1 and made._num_basic_ops == 5
    assert [type(op).__name__ for op in made._basic_ops] == ["BasicLinear", "Bias", "MakeExtraOutput", "AddExtraInput", "AddExtraInput"]
    assert made._basic_op_extra_input_sources == [[], [], [], [None], [(2, 0)]]
    assert made._basic_op_extra_output_channels == [[], [], ["a"], [], []]
    assert made._basic_op_extra_output_to_caller == [[], [], [True], [], []]
    assert made._basic_op_extra_output_consumers == [[], [], [[(4, 0)]], [], []]
    assert made._external_extra_input_slots == [(3, 0)] and made._public_extra_output_slots == [(2, 0)]
    assert made._basic_op_num_params == [1, 1, 0, 0, 0] and len(made._flat_basic_op_params) == 2
    assert OperationFuser(listed())._public_extra_output_slots == []


def test_channels_are_checked_and_locked_by_the_constructor():
    given = listed()
    OperationFuser(given)
    with pytest.raises(RuntimeError, match="already captured its channel routing"):
        given[1].set_extra_output_channel(0, "b")
    with pytest.raises(ValueError, match="has no producer"):
        OperationFuser([join()])
    with pytest.raises(TypeError, match="OperationFuser: expected fusible operations, got Tanh. Put other modules into a Sequential."):
        OperationFuser([torch.nn.Tanh()])


def test_it_is_called_as_a_pipeline_is():
    given, x, extra = listed(to_caller=True), torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    made = OperationFuser(given)
    y, forked = made(x, extra)
    expected = given[0](x)
    torch.testing.assert_close((y, forked), (2 * expected + extra, expected))
    y.sum().backward()
    assert given[0].weight.grad is not None
    with pytest.raises(ValueError, match="pipeline: expected 1 extra inputs, .*, got 0"):
        made(x)


class Times(ops.BasicOperation):
    def op_forward(self, ctx, input_, *, factor=1.0, **_):
        return input_ * factor

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def test_arguments_go_to_their_ops():
    made = OperationFuser([ops.ConstantScale(2.0), Times()])
    assert made(torch.ones(1), basic_op_kwargs=[{}, {"factor": 5.0}]) == 10


def test_steps_of_both_directions_are_shown_in_order_of_forward():
    made, x = OperationFuser([ops.MakeExtraOutput(), ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU()]), torch.randn(2, 8, requires_grad=True)
    with pytest.raises(AttributeError, match="OperationFuser: expected a pipeline that has been called, got one without a plan. Call it before _for"):
        made._forward_ops  # noqa: B018
    made(x)
    assert [(type(op).__name__, covered) for op, covered in made._forward_ops] == [
        ("MakeExtraOutput", [0]),
        ("RMSNorm", [1]),
        ("ForwardLinearBiasActivation", [2, 3, 4]),
    ]
    assert [(type(op).__name__, covered) for op, covered in made._backward_ops] == [
        ("BackwardAddRMSNorm", [0, 1]),
        ("BasicLinear", [2]),
        ("BackwardActivationBias", [3, 4]),
    ]
    shown = made._forward_ops[2][0]
    assert isinstance(shown, fused.LibraryFusion) and shown.name == "linear_bias_activation" and "linear_bias_activation" in repr(shown)
    assert list(shown.basic_ops) == made._basic_ops[2:]
    torch.testing.assert_close(shown(x), torch.nn.functional.gelu(made._basic_ops[2](x) + made._basic_ops[3].bias, approximate="tanh"))


def test_a_sum_is_shown_by_its_name():
    made = OperationFuser([ops.Linear(8, 8), ops.AddExtraInput()])
    made(torch.randn(2, 8), torch.randn(2, 8))
    assert [(type(op), covered) for op, covered in made._forward_ops] == [(fused.ForwardLinearBiasAdd, [0, 1, 2])]


def test_fused_ops_of_users_are_shown_as_they_are():
    box = ops.Sequential(ops.ConstantScale(1.0), ops.SiLU(), ops.SiLU())
    assert box._module_groups is None
    with ops.register_forward_backward_fusion(replacing([ops.SiLU, ops.SiLU], JointSquare)):
        box(torch.randn(4, requires_grad=True))
        (group,) = box._module_groups
        forward, backward = group._forward_ops, group._backward_ops
        assert [covered for _, covered in forward] == [[0], [1, 2]] == [covered for _, covered in backward]
        assert isinstance(forward[1][0], JointSquare) and forward[1][0] is backward[1][0]


def test_fused_ops_of_users_are_shown_over_ops_without_steps():
    made, x = OperationFuser(list(covering.residual(False, ops.GELU()))), torch.randn(4, requires_grad=True)
    for register, kind in ((covering.FORWARD, covering.ForwardResidual), (covering.JOINT, covering.JointResidual)):
        with register(replacing(covering.RESIDUAL, kind)):
            made(x)
            op, covered = made._forward_ops[1]
            assert isinstance(op, kind) and covered == [1, 2, 3] and len(made._forward_ops) == 3
            if register is covering.JOINT:
                assert made._backward_ops[1] == (op, covered)


def test_a_container_shows_its_groups():
    box = ops.Sequential(ops.Linear(8, 8), torch.nn.Tanh(), torch.nn.ReLU(), ops.GELU(), ops.Identity(), torch.nn.Identity())
    box(torch.randn(2, 8))
    groups = box._module_groups
    assert len(groups) == 5 and [isinstance(group, OperationFuser) for group in groups] == [True, False, False, True, False]
    assert groups[1] is box[1] and groups[3]._num_basic_ops == 2 and groups[0].num_extra_inputs == 0
    box.append(ops.GELU())
    box(torch.randn(2, 8))
    assert len(box._module_groups) == 6


PIPELINES = [
    lambda: [ops.Linear(8, 8), ops.MakeExtraOutput(), ops.AddExtraInput()],
    lambda: [ops.Linear(8, 8, bias=False), ops.MakeExtraOutput(), ops.AddExtraInput(), ops.RMSNorm(8)],
    lambda: [ops.MakeExtraOutput(), ops.Linear(8, 8), ops.ConstantScale(2.0), ops.Dropout(0.5), ops.AddExtraInput(), ops.MakeExtraOutput()],
    lambda: [ops.MakeExtraOutput(in_place=True), ops.Linear(8, 8, bias=False), ops.GELU(), ops.MakeExtraOutput(), ops.LayerNorm(8)],
]


@pytest.mark.parametrize("make", PIPELINES)
def test_every_op_is_shown_once(make):
    made, x = OperationFuser(make()), torch.randn(2, 8, requires_grad=True)
    made(x, *[torch.randn(2, 8)] * made.num_extra_inputs)
    for planned in (made._forward_ops, made._backward_ops):
        assert sorted(index for _, covered in planned for index in covered) == list(range(made._num_basic_ops))
        assert all(list(op.flat_ops()) == [made._basic_ops[index] for index in covered] for op, covered in planned)
