"""What fusions of users may cover: residual channels, ops without steps, ops written in Python."""

import pytest
import torch
from python_ops import SplitScale, WholeSin
from support import fork, join
from test_fusions_delegating import Backward, Both, Forward
from test_fusions_python import BACKWARD, FORWARD, JOINT, numbers, replacing

import tandem.ops as ops


def residual(public, *inside):
    """x -> silu -> fork -> ... -> + fork, the fork's output to the caller as well if `public`."""
    return ops.Sequential(ops.SiLU(), fork(to_caller=public), *inside, join(), ops.ConstantScale(2.0))


class ForwardResidual(ops.FusedOperation):
    """fork, gelu, + fork."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        assert basic_op_extra_inputs == [(), (), (None,)], "what flows inside is the fused op's own"
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[1].save_for_backward(x=input_)
        return torch.nn.functional.gelu(input_, approximate="tanh") + input_, [(input_,), (), ()]


class BackwardResidual(ops.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        grad = grad_output + torch.ops.aten.gelu_backward(grad_output, basic_op_ctxs[1].saved_tensor("x"), approximate="tanh")
        outside = basic_op_grad_extra_outputs[0][0]
        type(self).outside = outside
        return grad if outside is None else grad + outside, [(), (), ()], [(), (), (grad_output,)]


class JointResidual(ForwardResidual, BackwardResidual):
    pass


RESIDUAL = [ops.MakeExtraOutput, ops.GELU, ops.AddExtraInput]


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(("register", "fused"), [(FORWARD, ForwardResidual), (BACKWARD, BackwardResidual), (JOINT, JointResidual)])
def test_a_residual_inside_of_a_fused_op(register, fused, public):
    box, x = residual(public, ops.GELU()), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with register(replacing(RESIDUAL, fused)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert f"made    fuse_into_{fused.__name__} at ops 1 to 3" in box.explain(), box.explain()
        if register is not FORWARD:
            assert (fused.outside is not None) == public
        assert box.verify(x)
        torch._dynamo.reset()
        compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(numbers(compiled, x), expected)


def test_several_readers_outside_and_one_inside_are_refused():
    box, x = residual(True, ops.GELU()), torch.randn(3, 4, requires_grad=True)
    box.append(join())
    expected = numbers(box, x)
    with BACKWARD(replacing(RESIDUAL, BackwardResidual)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert "refused fuse_into_BackwardResidual at ops 1 to 3: several readers outside of these ops contribute to grad_extra of op 1, and one of these ops too" in box.explain()


@pytest.mark.parametrize(("register", "fused"), [(FORWARD, Forward), (BACKWARD, Backward), (JOINT, Both)])
def test_a_channel_from_outside_of_a_fused_op(register, fused):
    box, x = ops.Sequential(ops.SiLU(), fork(), ops.ConstantScale(3.0), join(), ops.GELU()), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with register(replacing([ops.AddExtraInput, ops.GELU], fused)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert f"made    fuse_into_{fused.__name__} at ops 3 to 4" in box.explain(), box.explain()


@pytest.mark.parametrize("kinds", [[ops.Identity, ops.GELU], [ops.GELU, ops.Identity], [ops.Identity, ops.GELU, ops.Identity]], ids=str)
@pytest.mark.parametrize(("register", "fused"), [(FORWARD, Forward), (BACKWARD, Backward), (JOINT, Both)])
def test_ops_without_steps_are_covered(register, fused, kinds):
    box, x = ops.Sequential(ops.SiLU(), *[kind() for kind in kinds], ops.ConstantScale(2.0)), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with register(replacing(kinds, fused)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert f"made    fuse_into_{fused.__name__} at ops 1 to {len(kinds)}" in box.explain(), box.explain()
        assert box.verify(x)


class ForwardScaleSin(ops.FusedOperation):
    """SplitScale and WholeSin, written in Python, with what their own forwards save."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **_):
        type(self).calls += 1
        scale, _sin = self.flat_ops()
        z = input_ * scale.factor * scale.weight
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, scale.weight)
            basic_op_ctxs[0].factor = scale.factor
            basic_op_ctxs[1].save_for_backward(z)
            basic_op_ctxs[1].shift = 0.0
        return torch.sin(z), [(), ()]


class BackwardScaleSin(ops.FusedOperation):
    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        type(self).calls += 1
        x, weight = basic_op_ctxs[0].saved_tensors
        (z,) = basic_op_ctxs[1].saved_tensors
        grad = grad_output * torch.cos(z + basic_op_ctxs[1].shift)
        factor = basic_op_ctxs[0].factor
        return grad * factor * weight, [[(grad * x * factor).sum().reshape(1)], []], [(), ()]


SCALE_SIN = [SplitScale, WholeSin]


def python_box():
    return ops.Sequential(ops.ConstantScale(2.0), SplitScale(), WholeSin(), ops.GELU())


@pytest.mark.parametrize(("register", "fused"), [(FORWARD, ForwardScaleSin), (BACKWARD, BackwardScaleSin)])
def test_fusions_of_one_direction_cover_ops_written_in_python(register, fused):
    box, x = python_box(), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    fused.calls = 0
    with register(replacing(SCALE_SIN, fused)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert fused.calls == 1
        assert f"made    fuse_into_{fused.__name__} at ops 1 to 2" in box.explain()
        assert box.verify(x)
        torch._dynamo.reset()
        compiled = torch.compile(box, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(numbers(compiled, x), expected)


def test_both_directions_by_fusions_of_their_own():
    box, x = python_box(), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with FORWARD(replacing(SCALE_SIN, ForwardScaleSin)), BACKWARD(replacing(SCALE_SIN, BackwardScaleSin)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert {"fuse_into_ForwardScaleSin", "fuse_into_BackwardScaleSin"} <= set(box.fusions_made())


def test_what_a_fused_forward_saves_for_an_op_in_python_is_checked():
    class Forgets(ForwardScaleSin):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            basic_op_ctxs[0].save_for_backward(input_)
            return result

    class ForgetsAField(ForwardScaleSin):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            del basic_op_ctxs[1].shift
            return result

    def first_to_run(fused):
        with FORWARD(replacing(SCALE_SIN, fused)):
            box, x = python_box(), torch.randn(3, 4, requires_grad=True)
            with pytest.raises(RuntimeError) as error:
                numbers(box, x)
        return str(error.value)

    text = first_to_run(Forgets)
    assert text.startswith(
        "fuse_into_Forgets: expected contexts with what the backward of SplitScale reads, got tensors (1) and fields (factor), and ValueError: not enough"
    )
    assert "with what the backward of WholeSin reads, got tensors (1) and fields (), and AttributeError" in first_to_run(ForgetsAField)

    with FORWARD(replacing([ops.Bias], ForwardScaleSin)):  # while fusions are registered, it is noted what an op's own forward saves
        box, x = python_box(), torch.randn(3, 4, requires_grad=True)
        numbers(box, x)
        with FORWARD(replacing(SCALE_SIN, Forgets)), pytest.raises(ValueError) as error:
            box(x)
        assert (
            "fuse_into_Forgets: expected on the context of SplitScale what its own forward leaves there, tensors (torch.float32 of 2 dimensions, "
            "torch.float32 of 1 dimensions) and fields (factor), got tensors (torch.float32 of 2 dimensions) and fields (factor). Save the same."
        ) in str(error.value)
        with FORWARD(replacing(SCALE_SIN, ForgetsAField)), pytest.raises(ValueError, match=r"and fields \(shift\), got .* and fields \(\)"):
            box(x)


def test_a_fused_backward_that_reads_what_is_not_there_says_so():
    class ReadsTooMuch(BackwardScaleSin):
        def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
            basic_op_ctxs[1].saved_tensor("y")
            return super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)

    with BACKWARD(replacing(SCALE_SIN, ReadsTooMuch)):
        box, x = python_box(), torch.randn(3, 4, requires_grad=True)
        with pytest.raises(RuntimeError) as error:
            numbers(box, x)
    assert "fuse_into_ReadsTooMuch: expected contexts with what the backward of ReadsTooMuch reads, got tensors (2) and fields (factor)" in str(error.value)
    assert "saved_tensor: expected one of [], got 'y'" in str(error.value)
