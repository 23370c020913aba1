"""What is made for pipelines dies with them, and a change makes only those look again that it concerns."""

import gc
import json
import weakref

import pytest
import torch

import tandem.ops as ops
from tandem import _C
from tandem.user_ops import fusions, python_op
from tandem.pipelines.run import OpRun

pytestmark = pytest.mark.usefixtures("collections_pass_over_older_objects")
RECENT = 256  # programs that nobody holds


class Scaled(ops.BasicOperation):
    """y = factor x, with the factor given per call."""

    def op_forward_compute(self, input_, factor=1.0):
        return input_ * factor, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, factor=1.0):
        ctx.factor = factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.factor, ()


class Passed(ops.FusedOperation):
    """Two scales as one."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        return input_ * (self.basic_ops[0].scale * self.basic_ops[1].scale), [(), ()]


class JointScaled(ops.FusedOperation):
    """Two ops that are given factors as one."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        basic_op_ctxs[0].factor = basic_op_kwargs[0].get("factor", 1.0) * basic_op_kwargs[1].get("factor", 1.0)
        return input_ * basic_op_ctxs[0].factor, [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output * basic_op_ctxs[0].factor, [(), ()], [(), ()]


def test_programs_die_with_their_pipelines():
    x = torch.randn(2, requires_grad=True)
    kept = ops.Sequential(ops.ConstantScale(0.5))
    kept(x)
    before = _C.programs_alive()
    for number in range(2 * RECENT):
        ops.Sequential(ops.ConstantScale(float(number)))(x).sum().backward()
    gc.collect()
    assert _C.programs_alive() <= before + RECENT
    made = _C.plans_made()
    kept(x)
    assert _C.plans_made() == made, "a pipeline holds its program"


def test_a_graph_outlives_its_program():
    x = torch.randn(2, requires_grad=True)
    y = ops.Sequential(Scaled(), ops.GELU())(x, op_kwargs={0: {"factor": 2.0}})
    for number in range(2 * RECENT):
        ops.Sequential(ops.ConstantScale(number + 0.25))(x)
    gc.collect()
    y.sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.gelu(2 * x, approximate="tanh").sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_what_a_removed_fusion_made_dies():
    made = []

    def fuse(found, *, recipe=None):
        op = Passed(found)
        made.append(weakref.ref(op))
        return [op]

    box = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0))
    x = torch.randn(4)
    with ops.register_forward_fusion(fuse):
        box(x)
        gc.collect()
        assert made and all(reference() is not None for reference in made)
    box(x)
    gc.collect()
    assert all(reference() is None for reference in made)
    assert not fusions.any_fusions()


def test_keys_die_with_their_ops():
    gc.collect()
    before = len(python_op._live)
    op = Scaled()
    ops.Sequential(op)(torch.randn(3))
    assert len(python_op._live) == before + 1
    reference = weakref.ref(op)
    del op
    gc.collect()
    assert reference() is None
    assert len(python_op._live) == before


def test_arguments_of_a_call_are_no_part_of_its_plan():
    op = Scaled()
    box = ops.Sequential(ops.Identity(), op)
    x = torch.randn(3, requires_grad=True)
    box(x, op_kwargs={op: {"factor": 2.0}})
    plans, keys = _C.plans_made(), len(python_op._live)
    for number in range(20):
        y = box(x, op_kwargs={op: {"factor": float(number)}})
        assert torch.equal(y, x * number)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), float(number)))
    assert torch.equal(box(x), x)
    assert (_C.plans_made(), len(python_op._live)) == (plans, keys)


def test_arguments_are_those_of_the_innermost_call():
    inner = Scaled()
    inner_box = ops.Sequential(inner)

    class Outer(Scaled):
        def op_forward_compute(self, input_, factor=1.0):
            return inner_box(input_) + inner_box(input_, op_kwargs={0: {"factor": 10.0}}) * factor, ()

    x = torch.randn(3)
    assert torch.equal(ops.Sequential(inner, Outer())(x, op_kwargs={0: {"factor": 3.0}, 1: {"factor": 2.0}}), x * 3 + (x * 3) * 10 * 2)


def test_arguments_reach_fused_ops():
    box = ops.Sequential(ops.Identity(), Scaled(), Scaled())
    x = torch.randn(3, requires_grad=True)
    arguments = {1: {"factor": 2.0}, 2: {"factor": 3.0}}
    with ops.register_forward_backward_fusion(lambda found, *, recipe=None: [found[0], JointScaled(found[1:])]):
        y = box(x, op_kwargs=arguments)
        assert torch.equal(y, 6 * x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 6.0))
        assert torch.equal(box(x), x)
    torch.testing.assert_close(box(x, op_kwargs=arguments), 6 * x)


def test_arguments_reach_ops_on_every_path():
    op = Scaled()
    box = ops.Sequential(op, ops.GELU())
    x = torch.randn(2, 3)

    def expected(factor):
        return torch.nn.functional.gelu(factor * x, approximate="tanh")

    for factor in (2.0, 3.0):
        given = {op: {"factor": factor}}
        torch.testing.assert_close(torch.func.vmap(lambda row, given=given: box(row, op_kwargs=given))(x), expected(factor))
        torch.testing.assert_close(torch.utils.checkpoint.checkpoint(box, x, op_kwargs=given, use_reentrant=False), expected(factor))
    with op.register_forward_hook(lambda *_: None):
        torch.testing.assert_close(box(x, op_kwargs={op: {"factor": 4.0}}), expected(4.0))


def test_of_many_arguments_through_the_dispatcher_the_last_ones_stay():
    op = Scaled()
    box = ops.Sequential(op)
    x = torch.randn(2, 3)
    for number in range(200):
        given = {op: {"factor": float(number)}}
        assert torch.equal(torch.func.vmap(lambda row, given=given: box(row, op_kwargs=given))(x), x * number)
    (run,) = box._op_runs()
    assert len(run.now.descriptions) == 64
    assert len(op._keys) == 64
    assert torch.equal(box(x), x), "the op's own key stays"


def looks_of(monkeypatch):
    """The runs that look at their ops, as they do."""
    looks = []
    prepare = OpRun.prepare
    monkeypatch.setattr(OpRun, "prepare", lambda run: (looks.append(run), prepare(run))[1])
    return looks


@pytest.mark.parametrize(
    "change",
    [
        lambda box: setattr(box[1], "scale", 3.0),
        lambda box: setattr(box[0], "forward", box[0].forward),
        lambda box: box.append(ops.GELU()),
        lambda box: box.__setitem__(1, ops.GELU()),
    ],
)
def test_a_change_concerns_those_who_have_looked(change, monkeypatch):
    first, second = (ops.Sequential(ops.Linear(4, 4), ops.ConstantScale(2.0)) for _ in range(2))
    sharing = ops.Sequential(first[0], first[1], ops.Identity())
    x = torch.randn(2, 4)
    for box in (first, second, sharing):
        box(x)
    looks = looks_of(monkeypatch)
    for box in (first, second, sharing):
        box(x)
    assert looks == []
    change(first)
    second(x)
    assert looks == []
    first(x)
    assert looks


def test_a_change_in_a_fused_operation_is_seen():
    scale = ops.ConstantScale(2.0)
    fused = ops.FusedOperation([ops.Identity(), scale])
    box, nested = ops.Sequential(fused), ops.Sequential(ops.FusedOperation([fused]))
    x = torch.randn(3)
    for factor in (2.0, 5.0, 7.0):
        scale.scale = factor
        assert torch.equal(box(x), x * factor)
        assert torch.equal(nested(x), x * factor)
        assert torch.equal(fused(x), x * factor)
        assert torch.equal(scale(x), x * factor)


def test_watchers_of_an_op_die():
    op = ops.ConstantScale(2.0)
    x = torch.randn(3)
    for _ in range(50):
        ops.Sequential(op)(x)
    gc.collect()
    ops.Sequential(op)(x)
    assert len(op._watchers) == 1


def test_a_description_says_of_which_library_it_is():
    box = ops.Sequential(ops.GELU())
    box(torch.randn(3))
    (run,) = box._op_runs()
    description = json.loads(run.now.pipeline(()).description(True))
    assert description["version"] == _C.DESCRIPTION_VERSION and description["build"] == _C.build_id()


def test_a_trace_outlives_no_op_in_python():
    box = ops.Sequential(Scaled(), ops.GELU())
    traced = torch.fx.symbolic_trace(box)
    torch.testing.assert_close(traced(torch.ones(2)), box(torch.ones(2)))
    del box
    gc.collect()
    with pytest.raises(RuntimeError, match="Scaled@.*: expected an op that is alive and as it was when it was described, got none. Keep the module"):
        traced(torch.ones(2))
