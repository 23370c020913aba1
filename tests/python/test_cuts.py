"""What a container tells where ops with hooks cut its pipelines, and where compiled code alone has run."""

import json

import pytest
import torch
from support import fork, randomize, residual

import tandem
import tandem.ops as ops


def hooked():
    box = randomize(ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 48), ops.SwiGLU(), ops.Linear(24, 16)))
    box[1].register_forward_hook(lambda *_: None)
    return box


def test_a_cut_is_told_with_its_reason_and_the_plans_of_the_parts():
    box, x = hooked(), torch.randn(3, 16, requires_grad=True)
    with pytest.raises(ValueError, match="explain: expected a container that has been called, got one without calls"):
        box.explain()
    box(x).sum().backward()
    reason = "op 1 (Linear) has a forward hook, so it runs by itself: nothing fuses across it"
    text = box.explain()
    assert f"cut into 3 pipelines: {reason}" in text
    assert text.count("plan: training, with gradients") == 3
    assert "linear_bias" in box.fusions_made()
    assert box.saved_bytes() > 0
    documents = json.loads(box.explain("json"))
    assert documents[0] == {"cut": [reason], "plans": []} and len(documents) == 4
    assert reason in box.explain("html") and box.explain("svg").count("<svg") == 3


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        ("register_forward_hook", "forward hook"),
        ("register_forward_pre_hook", "forward pre-hook"),
        ("register_full_backward_hook", "backward hook"),
        ("register_full_backward_pre_hook", "backward pre-hook"),
    ],
)
def test_the_reason_names_the_hook(register, kind):
    box = ops.Sequential(ops.Identity(), ops.SiLU())
    getattr(box[1], register)(lambda *_: None)
    box(torch.randn(2))
    assert f"op 1 (SiLU) has a {kind}, so it runs by itself" in box.explain()


def test_hooks_of_all_modules_are_the_reason():
    box = ops.Sequential(ops.Identity(), ops.SiLU())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        box(torch.randn(2))
        assert "hooks are registered for all modules, so every op runs by itself" in box.explain()
    finally:
        handle.remove()


def test_verify_checks_the_parts():
    box, x = hooked(), torch.randn(3, 16, requires_grad=True)
    outcome = box.verify(x)
    assert outcome and "op 1 (Linear) has a forward hook" in outcome.text
    assert outcome.comparisons > 0
    block = residual(ops.Linear(16, 16))
    block[1].register_forward_hook(lambda *_: None)
    assert block.verify(x)


def test_the_plans_of_compiled_code_are_told(fresh_dynamo):
    box, eager = (randomize(ops.Sequential(ops.Linear(16, 24), ops.GELU(), ops.Linear(24, 16))) for _ in range(2))
    x = torch.randn(3, 16, requires_grad=True)
    torch.compile(box, backend="aot_eager", fullgraph=True)(x).sum().backward()
    text = box.explain()
    assert "plan: training, with gradients" in text
    assert "compiled code: its compiler chooses what is kept for backward" in text
    with pytest.raises(ValueError, match="saved_bytes: expected a container that has been called, got one with compiled calls only"):
        box.saved_bytes()
    eager(x).sum().backward()
    assert box.fusions_made() == eager.fusions_made() != []
    box(x).sum().backward()
    assert box.saved_bytes() == eager.saved_bytes()


def test_the_plans_of_compiled_code_that_is_cut_are_told(fresh_dynamo):
    box, x = hooked(), torch.randn(3, 16, requires_grad=True)
    torch.compile(box, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert "cut into 3 pipelines: op 1 (Linear) has a forward hook" in box.explain()
    assert box.fusions_made()
    assert tandem.verify(box, x)


class Doubled(ops.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Called(ops.GELU):
    def __call__(self, x):
        return 2 * super().__call__(x)


def patched():
    op = ops.GELU()
    op.forward = lambda x, old=op.forward: 2 * old(x)
    return op


def patched_inside():
    op = ops.FusedOperation([ops.SiLU(), ops.GELU()])
    op.basic_ops[1].forward = lambda x, old=op.basic_ops[1].forward: 2 * old(x)
    return op


@pytest.mark.parametrize(
    ("make", "what"), [(lambda: Doubled(8, 8), "forward"), (Called, "__call__"), (patched, "forward"), (patched_inside, "forward")]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_its_own_is_called(make, what, compiled, fresh_dynamo):
    op, x = make(), torch.randn(3, 8, requires_grad=True)
    box = ops.Sequential(ops.ConstantScale(3.0), op, ops.SiLU())
    call = torch.compile(box, backend="aot_eager") if compiled else box
    expected = torch.nn.functional.silu(op(3 * x))
    torch.testing.assert_close(call(x), expected)
    torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x), torch.autograd.grad(expected.sum(), x))
    reason = f"op 1 ({op._get_name()}) has a {what} of its own, so it runs by itself: nothing fuses across it"
    assert reason in box.explain() and box.verify(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_is_patched_counts_from_the_next_call_on(compiled, fresh_dynamo):
    box, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(3, 8)
    call = torch.compile(box, backend="aot_eager") if compiled else box
    plain = call(x)
    box[0].forward = lambda x, old=box[0].forward: 0 * old(x)
    assert torch.equal(call(x), torch.zeros(3, 8))
    del box[0].forward
    torch.testing.assert_close(call(x), plain)
    assert box[0]._alone is not None


class Passes(ops.AddExtraInput):
    def forward(self, input, *extra_inputs, **kwargs):
        return 2 * super().forward(input, *extra_inputs, **kwargs)


class KeepsBack(ops.AddExtraInput):
    def forward(self, input, extra):
        return super().forward(input, extra)


def test_channels_go_through_a_forward_of_its_own():
    def around(op):
        return ops.Sequential(fork("r"), ops.ConstantScale(3.0), op.set_extra_input_channel(0, "r"))

    x = torch.randn(4)
    torch.testing.assert_close(around(Passes())(x), 8 * x)
    with pytest.raises(TypeError, match=r"KeepsBack: expected a forward that takes keyword arguments and passes them on, .*forward\(input, extra\)"):
        around(KeepsBack())(x)
