"""Fusions that Python functions make."""

import gc
import sys

import pytest
import torch
from support import llama_mlp, randomize

import tandem
import tandem.ops as ops


class ForwardLinearGelu(ops.FusedOperation):
    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        type(self).calls += 1
        linear, bias, _gelu = self.flat_ops()
        z = torch.nn.functional.linear(input_, linear.weight, bias.bias)
        if basic_op_ctxs[0].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, linear.weight)
            basic_op_ctxs[2].save_for_backward(z)
        return torch.nn.functional.gelu(z, approximate="tanh"), [(), (), ()]


class BackwardActivationLinear(ops.FusedOperation):
    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        type(self).calls += 1
        x, weight = basic_op_ctxs[0].saved_tensors
        (z,) = basic_op_ctxs[2].saved_tensors
        grad_z = torch.ops.aten.gelu_backward(grad_output, z, approximate="tanh")
        return grad_z @ weight, [[grad_z.t() @ x], [grad_z.sum(0)], []], [(), (), ()]


class JointSquare(ops.FusedOperation):
    """silu, silu as x^2: other numbers, so that a test sees which ran."""

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs):
        return input_ * input_, [(), ()], [input_]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save):
        basic_op_ctxs[1].save_for_backward(*tensors_to_save)
        basic_op_ctxs[0].two = 2

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (x,) = basic_op_ctxs[1].saved_tensors
        return basic_op_ctxs[0].two * x * grad_output, [(), ()], [(), ()]


def replacing(kinds, fused_class):
    def replace(found, *, recipe=None):
        out, index = [], 0
        while index < len(found):
            window = found[index : index + len(kinds)]
            if len(window) == len(kinds) and all(map(isinstance, window, kinds)):
                out.append(fused_class(window))
                index += len(kinds)
            else:
                out.append(found[index])
                index += 1
        return out

    replace.__qualname__ = f"fuse_into_{fused_class.__name__}"
    return replace


LINEAR_GELU = [ops.BasicLinear, ops.Bias, ops.GELU]


def box_of():
    return ops.Sequential(ops.Linear(4, 4), ops.GELU(), ops.Linear(4, 4))


def numbers(box, x):
    """The outputs, and all gradients of a sum of their squares."""
    outputs = box(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((index + 1) * y.pow(2).sum() for index, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, [x, *box.parameters()])]


def test_forward_fusion_runs_and_gives_the_numbers_of_the_unfused_ops():
    box, x = randomize(box_of()), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    ForwardLinearGelu.calls = 0
    with ops.register_forward_fusion(replacing(LINEAR_GELU, ForwardLinearGelu)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert ForwardLinearGelu.calls == 1
        assert "fuse_into_ForwardLinearGelu" in box.fusions_made()
        assert "made    fuse_into_ForwardLinearGelu at ops 0 to 2" in box.explain()
        with torch.no_grad():
            torch.testing.assert_close(box(x), expected[0])
        assert ForwardLinearGelu.calls == 2
        assert box.verify(x)
    ForwardLinearGelu.calls = 0
    assert torch.equal(box(x), expected[0]) and ForwardLinearGelu.calls == 0


def test_backward_fusion_reads_the_contexts_that_the_ops_of_the_library_leave():
    box, x = randomize(box_of()), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    BackwardActivationLinear.calls = 0
    with ops.register_backward_fusion(replacing(LINEAR_GELU, BackwardActivationLinear)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert BackwardActivationLinear.calls == 1
        assert "made    fuse_into_BackwardActivationLinear at ops 0 to 2" in box.explain()
        y = randomize(box_of())(x)
        gc.collect()
        y.sum().backward()
        assert BackwardActivationLinear.calls == 2


def test_forward_and_backward_fusions_are_independent():
    box, x = randomize(box_of()), torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with (
        ops.register_forward_fusion(replacing(LINEAR_GELU, ForwardLinearGelu)),
        ops.register_backward_fusion(replacing(LINEAR_GELU, BackwardActivationLinear)),
    ):
        torch.testing.assert_close(numbers(box, x), expected)
        assert {"fuse_into_ForwardLinearGelu", "fuse_into_BackwardActivationLinear"} <= set(box.fusions_made())


def test_a_joint_fusion_saves_what_it_likes():
    box, x = ops.Sequential(ops.ConstantScale(3.0), ops.SiLU(), ops.SiLU(), ops.ConstantScale(5.0)), torch.randn(4, requires_grad=True)
    plain = box(x)
    with ops.register_forward_backward_fusion(replacing([ops.SiLU, ops.SiLU], JointSquare)):
        y = box(x)
        torch.testing.assert_close(y, 5 * (3 * x) ** 2)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 90 * x)
        assert "made    fuse_into_JointSquare at ops 1 to 2" in box.explain()
        assert not box.verify(x)
        assert "fuse_into_JointSquare" in str(box.verify(x))
    assert torch.equal(box(x), plain)


def test_joint_fusions_cover_ops_written_in_python():
    from python_ops import WholeSin

    with ops.register_forward_backward_fusion(replacing([WholeSin, ops.SiLU], JointSquare)):
        box, x = ops.Sequential(WholeSin(), ops.SiLU()), torch.randn(4, requires_grad=True)
        y = box(x)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * x)


def test_handles_order_and_calls_per_plan():
    seen = []

    def named(name):
        def look(found, *, recipe=None):
            seen.append((name, [type(op).__name__ for op in found], recipe))
            return found

        return look

    box, x = ops.Sequential(ops.Linear(4, 4), ops.SiLU()), torch.randn(2, 4)
    first = ops.register_forward_fusion(named("first"))
    second = ops.register_forward_fusion(named("second"), prepend=True)
    assert isinstance(first, ops.FusionHandle)
    box(x)
    box(x)
    assert [name for name, *_ in seen] == ["second", "first"]
    assert seen[0][1:] == (["BasicLinear", "Bias", "SiLU"], None)
    with tandem.autocast():
        box(x)
    assert seen[-1][2] == tandem.recipe.Float8CurrentScaling() and len(seen) == 4
    first.remove()
    first.remove()
    box(x)
    assert seen[-1][0] == "second" and len(seen) == 5
    second.remove()
    box(x)
    assert len(seen) == 5


JOINT, FORWARD, BACKWARD = ops.register_forward_backward_fusion, ops.register_forward_fusion, ops.register_backward_fusion


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_of_one_direction_get_what_is_fused_in_both(compiled, fresh_dynamo):
    box, x = ops.Sequential(ops.ConstantScale(1.0), ops.SiLU(), ops.SiLU(), ops.ReLU()), torch.randn(4, requires_grad=True)
    given = {"forward": [], "backward": []}

    def forward(found, *, recipe=None):
        given["forward"].append(found)
        return replacing([JointSquare, ops.ReLU], ForwardLinearGelu)(found)  # over what is fused already: not taken

    def backward(found, *, recipe=None):
        given["backward"].append(found)
        return found

    with JOINT(replacing([ops.SiLU, ops.SiLU], JointSquare)), FORWARD(forward), BACKWARD(backward):
        call = torch.compile(box, backend="aot_eager", fullgraph=True) if compiled else box
        y = call(x)
        y.sum().backward()
    assert torch.equal(y, x * x) and torch.equal(x.grad, 2 * x)
    for found in (*given["forward"], *given["backward"]):
        assert [type(op) for op in found] == [ops.ConstantScale, JointSquare, ops.ReLU]
        assert [*found[1].basic_ops] == [box[1], box[2]]
    assert given["forward"][0][1] is given["backward"][0][1]


def fails(found, *, recipe=None):
    raise KeyError("oh")


def named(name, function):
    """A function of a fusion, which errors call by its name."""
    function.__name__ = function.__qualname__ = name
    return function


DROPS, REORDERS = named("drops", lambda found, **_: found[1:]), named("reorders", lambda found, **_: found[::-1])
WITHOUT_FORWARD = named("without_forward", lambda found, **_: [BackwardActivationLinear(found)])
WITHOUT_BACKWARD = named("without_backward", lambda found, **_: [ForwardLinearGelu(found)])
ERRORS = [
    (FORWARD, fails, KeyError, "oh"),
    (FORWARD, DROPS, RuntimeError, "but ops that cover ['BasicLinear', 'Bias', 'GELU'] once and in order, got ['Bias', 'GELU']"),
    (BACKWARD, DROPS, RuntimeError, "drops: expected no mismatch after fusing operations, but ops that cover"),
    (JOINT, REORDERS, RuntimeError, "but ops that cover ['BasicLinear', 'Bias', 'GELU'] once and in order, got ['GELU', 'Bias'"),
    (FORWARD, named("nothing", lambda found, **_: None), TypeError, "nothing: expected a list of fusible operations, got NoneType"),
    (FORWARD, named("texts", lambda found, **_: ["a"]), TypeError, "texts: expected a list of fusible operations, got ['str']"),
    (FORWARD, WITHOUT_FORWARD, TypeError, "without_forward: expected BackwardActivationLinear with a forward, got none"),
    (JOINT, WITHOUT_FORWARD, TypeError, "without_forward: expected BackwardActivationLinear with a forward, got none"),
    (BACKWARD, WITHOUT_BACKWARD, TypeError, "without_backward: expected ForwardLinearGelu with a backward, got none"),
    (JOINT, WITHOUT_BACKWARD, TypeError, "without_backward: expected ForwardLinearGelu with a backward, got none"),
]


@pytest.mark.parametrize(("register", "function", "kind", "text"), ERRORS)
def test_wrong_functions_are_reported_by_name(register, function, kind, text):
    with register(function), pytest.raises(kind) as error:
        ops.Sequential(ops.Linear(4, 4), ops.GELU())(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert text in str(error.value)


def test_an_error_of_a_function_comes_through_and_says_whose_it_is():
    box, x = ops.Sequential(ops.Linear(4, 4), ops.GELU()), torch.randn(2, 4)
    with FORWARD(fails):
        with pytest.raises(KeyError) as error:
            box(x)
        assert error.value.args == ("oh",)
        if sys.version_info >= (3, 11):
            assert error.value.__notes__ == ["fails: expected a list of ops, got this error. It is a registered fusion."]
        with pytest.raises(Exception, match="KeyError: oh"):  # Dynamo has an exception of its own for what is raised while it traces
            torch.compile(box, fullgraph=True, backend="aot_eager")(x)
    assert box(x).shape == (2, 4)


def test_a_forward_fusion_must_save_what_the_ops_save():
    class Forgets(ForwardLinearGelu):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            basic_op_ctxs[2].to_save = None
            return result

    with ops.register_forward_fusion(replacing(LINEAR_GELU, Forgets)), pytest.raises(ValueError) as error:
        box_of()(torch.randn(2, 4, requires_grad=True))
    assert "fuse_into_Forgets: expected 1 saved tensors on the context of GELU (x), got 0" in str(error.value)


class NamedForward(ForwardLinearGelu):
    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
        if basic_op_ctxs[0].requires_grad:
            x, weight = basic_op_ctxs[0].to_save
            basic_op_ctxs[0].save_for_backward(weight=weight, x=x)
        return result


class NamedBackward(BackwardActivationLinear):
    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        product, _, gelu = basic_op_ctxs
        product.saved_tensors = (product.saved_tensor("x"), product.saved_tensor("weight"))
        gelu.saved_tensors = (gelu.saved_tensor("x"),)
        with pytest.raises(ValueError, match=r"saved_tensor: expected one of \['x'\], got 'y'. Save it by that name."):
            gelu.saved_tensor("y")
        return super().fuser_backward(basic_op_ctxs, grad_output, **kwargs)


def test_what_ops_of_the_library_save_has_names():
    box, x = box_of(), torch.randn(2, 4, requires_grad=True)
    expected = numbers(box, x)
    with ops.register_forward_fusion(replacing(LINEAR_GELU, NamedForward)):
        torch.testing.assert_close(numbers(box, x), expected)
    with ops.register_backward_fusion(replacing(LINEAR_GELU, NamedBackward)):
        torch.testing.assert_close(numbers(box, x), expected)


class BackwardDropout(ops.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (seed,) = basic_op_ctxs[0].saved_tensors
        assert seed is basic_op_ctxs[0].saved_tensor("seed") and basic_op_ctxs[1].saved_tensors == ()
        return torch.ops.tandem.dropout(grad_output * self.flat_ops()[1].scale, None, seed, self.flat_ops()[0].p), [(), ()], [(), ()]


def test_a_fused_backward_reads_the_seed_of_a_dropout():
    box, x = ops.Sequential(ops.Dropout(0.5), ops.ConstantScale(3.0)), torch.randn(8, 16, requires_grad=True)
    torch.manual_seed(0)
    expected = numbers(box, x)
    with ops.register_backward_fusion(replacing([ops.Dropout, ops.ConstantScale], BackwardDropout)):
        torch.manual_seed(0)
        torch.testing.assert_close(numbers(box, x), expected)
        assert "made    fuse_into_BackwardDropout at ops 0 to 1" in box.explain()


def test_names_that_the_library_does_not_know_are_refused():
    class Misnames(NamedForward):
        def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
            result = super().fuser_forward(basic_op_ctxs, input_, **kwargs)
            basic_op_ctxs[2].save_for_backward(z=basic_op_ctxs[2].to_save[0])
            return result

    with ops.register_forward_fusion(replacing(LINEAR_GELU, Misnames)), pytest.raises(ValueError) as error:
        box_of()(torch.randn(2, 4, requires_grad=True))
    assert "fuse_into_Misnames: expected 1 saved tensors on the context of GELU (x), got z. Save what" in str(error.value)
    with pytest.raises(TypeError, match=r"save_for_backward: expected all tensors with names or all without, got both \(y\). Name all of them."):
        ops.OperationContext().save_for_backward(None, y=None)


@pytest.mark.parametrize("register", [JOINT, FORWARD, BACKWARD])
def test_duplicates_and_non_functions_are_refused(register):
    def same(found, *, recipe=None):
        return found

    with register(same), pytest.raises(ValueError, match="expected a new function, got .*same, which is registered. Remove its handle"):
        register(same)
    with register(same):
        pass
    with pytest.raises(TypeError, match="expected a function over the op list, got int"):
        register(3)


def test_fusions_of_the_library_and_of_the_user_share_a_pipeline():
    box = ops.Sequential(*randomize(llama_mlp(4, 4)), *randomize(box_of()))
    x = torch.randn(3, 4, requires_grad=True)
    expected = numbers(box, x)
    with ops.register_forward_fusion(replacing(LINEAR_GELU, ForwardLinearGelu)):
        torch.testing.assert_close(numbers(box, x), expected)
        assert len(box.fusions_made()) > 1
