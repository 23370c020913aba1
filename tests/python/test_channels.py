"""Extra inputs and outputs, and the channels between them."""

import pytest
import torch
import torch.nn.functional as F
from support import fork, join, residual

import tandem.ops as ops


def test_a_channel_carries_a_residual():
    block = residual(ops.Linear(4, 4), ops.GELU())
    x = torch.randn(3, 4, requires_grad=True)
    y = block(x)
    expected = x + F.gelu(F.linear(x, block[1].weight, block[1].bias), approximate="tanh")
    torch.testing.assert_close(y, expected)
    grad = torch.randn(3, 4)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


def test_a_channel_may_be_returned_too_and_read_twice():
    block = ops.Sequential(fork(to_caller=True), ops.ConstantScale(2.0), join(), join(), ops.AddExtraInput())
    x, other = torch.randn(2, 3, requires_grad=True).unbind()
    y, a = block(x, other)
    torch.testing.assert_close(y, 4 * x + other)
    assert torch.equal(a, x)
    grads = torch.autograd.grad(y.sum() + 3 * a.sum(), (x, other))
    assert torch.equal(grads[0], torch.full((3,), 7.0)) and torch.equal(grads[1], torch.ones(3))


class SumOfWanted(ops.BasicOperation):
    """y = x + extra; as ops of TransformerEngine do, it asks the tensors which gradients are wanted."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        (extra,) = basic_op_extra_inputs[0]
        self.seen = basic_op_ctxs[0].wanted = (input_.requires_grad, extra.requires_grad)
        return input_ + extra, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x_wanted, extra_wanted = basic_op_ctxs[0].wanted
        return grad_output if x_wanted else None, [()], [(grad_output if extra_wanted else None,)]


def test_values_tell_ops_in_python_whether_their_gradients_are_wanted():
    tail = SumOfWanted().set_extra_input_channel(0, "residual")
    box = ops.Sequential(ops.Linear(4, 4), fork(), ops.GELU(), tail)
    x = torch.randn(3, 4, requires_grad=True)
    for call in (box, torch.compile(box, backend="aot_eager")):
        z = F.linear(x, box[0].weight, box[0].bias)
        wanted = torch.autograd.grad((z + F.gelu(z, approximate="tanh")).sum(), [x, *box.parameters()])
        torch.testing.assert_close(torch.autograd.grad(call(x).sum(), [x, *box.parameters()]), wanted)
    box(x)
    assert tail.seen == (True, True)
    with torch.no_grad():
        box(x.detach())
    assert tail.seen == (False, False)
    box.requires_grad_(False)(x.detach())
    assert tail.seen == (False, False)


def test_a_channel_without_reader_is_legal_and_none_unbinds():
    x, free = torch.randn(3), fork()
    assert torch.equal(ops.Sequential(fork(), ops.Identity())(x), x)
    free.set_extra_output_channel(0, None, output_to_caller=False)
    y, extra = free(x)
    assert torch.equal(y, x) and torch.equal(extra, x)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("hooked", [(), (1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_channels_cross_cuts(hooked, in_place):
    def make():
        head, tail = fork(to_caller=in_place, in_place=in_place), join(in_place=in_place)
        return ops.Sequential(head, linear, ops.GELU(), tail, ops.AddExtraInput(), ops.MakeExtraOutput())

    linear = ops.Linear(4, 4)
    x, other = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    expected = make()(x, other)
    block = make()
    for index in hooked:
        block[index].register_forward_hook(lambda *_: None)
    actual = block(x, other)
    assert len(actual) == len(expected) == 2 + in_place
    torch.testing.assert_close(actual, expected)
    loss = sum(((n + 1) * a).sum() for n, a in enumerate(actual))
    expected_loss = sum(((n + 1) * e).sum() for n, e in enumerate(expected))
    torch.testing.assert_close(torch.autograd.grad(loss, (x, other)), torch.autograd.grad(expected_loss, (x, other)))


ADD, MAKE = ops.AddExtraInput, ops.MakeExtraOutput
SETTER_ERRORS = [
    (lambda: ADD().set_extra_input_channel(1, "a"), IndexError, "AddExtraInput: expected the index of one of its 1 extra inputs, got 1, which is out of range"),
    (lambda: ADD().set_extra_input_channel(-1, ""), IndexError, "AddExtraInput: expected the index of one of its 1 extra inputs, got -1"),
    (lambda: ops.GELU().set_extra_input_channel(0, "a"), IndexError, "GELU: expected the index of one of its 0 extra inputs, got 0"),
    (lambda: ADD().set_extra_input_channel(0, ""), ValueError, "expected channel to be a non-empty string or None, got ''"),
    (lambda: ADD().set_extra_input_channel(0, 3), ValueError, "expected channel to be a non-empty string or None, got 3"),
    (lambda: ADD().set_extra_output_channel(0, "a"), IndexError, "AddExtraInput: expected the index of one of its 0 extra outputs, got 0"),
    (lambda: MAKE().set_extra_output_channel(0, "", output_to_caller=1), ValueError, "None unbinds the extra output"),
    (lambda: MAKE().set_extra_output_channel(0, "a", output_to_caller=1), TypeError, "expected True or False, as output_to_caller must be a bool, got 1"),
]


@pytest.mark.parametrize(("call", "kind", "text"), SETTER_ERRORS)
def test_errors_of_setters_come_in_order(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


@pytest.mark.parametrize("capture", ["alone", "in a container"])
def test_channels_are_locked_by_the_first_call(capture):
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    x = torch.ones(1)
    if capture == "alone":
        make(x), add(x, x)
    else:
        ops.Sequential(make, add)(x, x)
    text = "expected an op in no pipeline yet, got one of which a pipeline has already captured its channel routing. Bind channels before"
    with pytest.raises(RuntimeError, match=text):
        add.set_extra_input_channel(0, "a")
    with pytest.raises(RuntimeError, match=text):
        make.set_extra_output_channel(0, "a")
    with pytest.raises(IndexError):
        add.set_extra_input_channel(1, "a")


def residual_past(*between, to_caller=False):
    return ops.Sequential(ops.ConstantScale(2.0), fork("a", to_caller), *between, join("a"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("to_caller", [False, True])
def test_channels_go_past_plain_modules(to_caller, compiled, fresh_dynamo):
    block = residual_past(torch.nn.Tanh(), ops.ConstantScale(3.0), torch.nn.ReLU(), to_caller=to_caller)
    call = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    x = torch.randn(5, requires_grad=True)
    y = call(x)
    expected = torch.relu(3 * torch.tanh(2 * x)) + 2 * x
    if to_caller:
        y, extra = y
        assert torch.equal(extra, 2 * x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))
    assert block.verify(x)


def test_channels_past_plain_modules_stand_beside_inputs_of_the_caller():
    first, last = ops.AddExtraInput(), ops.AddExtraInput()
    block = ops.Sequential(first, *residual_past(torch.nn.ReLU()), last, torch.nn.ReLU(), join("a"))
    x, a, b = torch.randn(3, 6).unbind()
    made = 2 * (x + a)
    torch.testing.assert_close(block(x, a, b), torch.relu(torch.relu(made) + made + b) + made)
    assert block.verify(x, a, b)
    with pytest.raises(ValueError, match="pipeline: expected 1 extra inputs, .*, got 0. Pass them after the input"):
        block(x, a)
    with pytest.raises(ValueError, match="Sequential: expected 2 extra inputs, .* got 3. Leave out the last."):
        block(x, a, b, b)
    block[1].register_forward_hook(lambda *_: None)  # which cuts the first run
    torch.testing.assert_close(block(x, a, b), torch.relu(torch.relu(made) + made + b) + made)


def test_a_name_may_be_given_again_behind_a_plain_module():
    second = residual_past(ops.ConstantScale(5.0))
    block = ops.Sequential(*residual_past(ops.ConstantScale(3.0)), torch.nn.ReLU(), *second)
    assert block(torch.ones(1)) == 8 * 12
    again = ops.Sequential(*residual_past(torch.nn.ReLU()), *residual_past(torch.nn.ReLU()))
    with pytest.raises(ValueError, match='channel "a": expected a producer before op 0, but it has no earlier producer, got op 1'):
        ops.Sequential(torch.nn.ReLU(), join("a"), fork("a", to_caller=True))(torch.ones(1))
    assert again(torch.ones(1)) == 16


@pytest.mark.parametrize("make", [join, lambda: ops.Sequential(join(), torch.nn.ReLU(), fork())], ids=["alone", "in a container"])
def test_a_channel_that_nobody_makes_before_has_no_producer(make):
    with pytest.raises(ValueError, match="it has no producer"):
        make()(torch.ones(1))


def test_crossing_channels_follow_the_list_of_a_fused_op():
    fused = ops.FusedOperation([ops.ConstantScale(3.0)])
    block, x = residual_past(torch.nn.ReLU(), fused), torch.ones(1)
    assert block(x) == 8
    fused.basic_ops.append(ops.ConstantScale(2.0))
    assert block(x) == 14
