"""The pipeline as an autograd node: flags, versions, hooks, lifetimes."""

import copy
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support import assert_equal, check_against, llama_mlp, llama_mlp_reference, randomize
from torch import nn
from torch.utils.checkpoint import checkpoint

import tandem
import tandem.ops as ops


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_no_flag_is_touched(mode):
    box = ops.Sequential(ops.Identity(), ops.MakeExtraOutput(), ops.Linear(4, 4), ops.GELU())
    leaf = torch.randn(2, 4, requires_grad=True)
    x = leaf * 1
    with mode():
        y, extra = box(x)
        assert not y.requires_grad and y.grad_fn is None
        assert box[0](x) is x and extra is x
    assert x.requires_grad and x.grad_fn is not None and not x.is_leaf
    with torch.inference_mode():
        inside = torch.randn(2, 4)
        assert box(inside)[0].is_inference()


def test_threads_that_share_a_pipeline():
    box, x = randomize(llama_mlp()), torch.randn(3, 16)

    def gradients(n):
        return torch.autograd.grad(box(x * n).sum(), list(box.parameters()))

    numbers = [*range(1, 9)]
    expected = [gradients(n) for n in numbers]
    with ThreadPoolExecutor(8) as pool:
        torch.testing.assert_close([*pool.map(gradients, numbers * 20)], expected * 20)


def test_gradients_are_right_to_the_last_digit_of_float64():
    box = randomize(llama_mlp(dtype=torch.float64))
    box.insert(1, ops.MakeExtraOutput())
    box.append(ops.AddExtraInput())
    box.append(ops.LayerNorm(16, dtype=torch.float64))
    x, extra = (torch.randn(3, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, e, *_: box(x, e), (x, extra, *box.parameters()), fast_mode=True)


def test_saved_tensor_hooks_see_every_kept_tensor_once():
    box, x = randomize(llama_mlp()), torch.randn(3, 16, requires_grad=True)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    expected = torch.autograd.grad(box(x).sum(), [x, *box.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = box(x)
    assert len({t.data_ptr() for t in packed}) == len(packed)
    assert sum(t.numel() * t.element_size() for t in packed if t.data_ptr() not in given(box, x)) == box.saved_bytes()
    actual = torch.autograd.grad(y.sum(), [x, *box.parameters()])
    assert len(unpacked) == len(packed)
    torch.testing.assert_close(actual, expected)


def given(box, x):
    return {t.data_ptr() for t in (x, *box.parameters())}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    box, x = ops.Sequential(*randomize(llama_mlp()), ops.Dropout(0.5)), torch.randn(3, 16, requires_grad=True)
    torch.manual_seed(5)
    expected = torch.autograd.grad(box(x).sum(), [x, *box.parameters()])
    torch.manual_seed(5)
    y = checkpoint(box, x, use_reentrant=use_reentrant)
    y.sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in box.parameters())], [*expected])


@pytest.mark.parametrize("make", [ops.ReLU, lambda: ops.Linear(4, 4), lambda: ops.RMSNorm(4), lambda: ops.FusedOperation([ops.ReLU()])])
def test_an_op_that_ran_alone_is_freed(make):
    """It keeps the pipeline in which it runs, which reads the op's parameters: a cycle."""
    op = make()
    op(torch.randn(3, 4, requires_grad=True)).sum().backward()
    reference = weakref.ref(op)
    del op
    gc.collect()
    assert reference() is None


def test_a_replaced_parameter_counts_at_once():
    box, x = ops.Sequential(ops.Linear(4, 4), ops.GELU()), torch.randn(2, 4)
    box(x).sum().backward()
    old = box[0].weight
    old.grad = None
    box[0].weight = nn.Parameter(torch.randn(4, 4))
    check_against(box, lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), x)
    box(x).sum().backward()
    assert box[0].weight.grad is not None and old.grad is None


def test_casting_and_moving_between_calls():
    box, x = randomize(llama_mlp()), torch.randn(3, 16)
    box(x)
    box.double()
    check_against(box, llama_mlp_reference, x.double().requires_grad_())
    box.to(torch.bfloat16)
    check_against(box, llama_mlp_reference, x.bfloat16().requires_grad_())
    box.to("meta")
    assert box(x.bfloat16().to("meta")).device.type == "meta"
    box.float().to_empty(device="cpu")
    check_against(randomize(box), llama_mlp_reference, x.requires_grad_())


def test_the_gil_is_free_while_steps_run():
    interval = sys.getswitchinterval()
    box, x = ops.Sequential(ops.Linear(1024, 1024), ops.GELU(), ops.Linear(1024, 1024)), torch.randn(1024, 1024)
    box(x)
    state = {"inside": False, "seen": 0}

    def work():
        for _ in range(50):  # one is enough where the machine has a processor for both threads
            state["inside"] = True
            box(x)
            state["inside"] = False
            if state["seen"]:
                break

    sys.setswitchinterval(1000)  # Python hands nothing over by itself: this thread wakes up inside the call only where the GIL is free
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            state["seen"] += state["inside"]
            time.sleep(0.0005)
    finally:
        sys.setswitchinterval(interval)
    assert state["seen"] > 0


def test_functorch():
    box = ops.Sequential(ops.LayerNorm(4), ops.Linear(4, 8), ops.SwiGLU(), ops.RMSNorm(4))
    params = {name: p.detach() for name, p in box.named_parameters()}
    x = torch.randn(5, 4)

    def run(params, x):
        return torch.func.functional_call(box, params, (x,))

    def reference(params, x):
        h = F.linear(F.layer_norm(x, (4,), params["0.weight"], params["0.bias"]), params["1.weight"], params["1.bias"])
        a, b = h.chunk(2, -1)
        g = F.silu(a) * b
        return g * torch.rsqrt((g * g).mean(-1, keepdim=True) + 1e-5) * params["3.weight"]

    def loss(function):
        return lambda params, x: function(params, x).pow(2).sum()

    torch.testing.assert_close(torch.func.vmap(run, (None, 0))(params, x), reference(params, x))
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), (None, 0))):
        actual, expected = transform(loss(run))(params, x), transform(loss(reference))(params, x)
        for name in params:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)
    tangent = torch.randn_like(x)
    actual = torch.func.jvp(lambda x: run(params, x), (x,), (tangent,))
    torch.testing.assert_close(actual, torch.func.jvp(lambda x: reference(params, x), (x,), (tangent,)), rtol=1e-4, atol=1e-5)


def test_nothing_is_planned_twice():
    box = ops.Sequential(*llama_mlp(), ops.Dropout(0.1))
    x = torch.randn(3, 16, requires_grad=True)

    def everything():
        for training in (True, False):
            box.train(training)
            box(x).sum().backward()
            with torch.no_grad():
                box(x[:2])
            with tandem.autocast():
                box(x).sum().backward()

    everything()
    made = tandem._C.plans_made()
    for _ in range(3):
        everything()
    copy.deepcopy(box)(x)
    assert tandem._C.plans_made() == made


@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_gradient_that_repeats_one_element(dtype: torch.dtype, rows: int) -> None:
    """As those of sums and means do: of few elements and of many, in every width."""
    box = ops.Sequential(ops.RMSNorm(48), ops.Linear(48, 32)).to(dtype)
    x = torch.randn(rows, 48, dtype=dtype)
    one = torch.tensor(0.3, dtype=dtype)
    results = []
    for gradient in (one.expand(rows, 32), one.expand(rows, 32).clone(), one.expand(rows, 1).clone().expand(rows, 32)):
        given = x.clone().requires_grad_()
        results.append(torch.autograd.grad(box(given), [given, *box.parameters()], gradient))
    repeated, dense, by_row = results
    assert_equal(repeated, dense)
    assert_equal(by_row, dense)
