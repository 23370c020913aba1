"""DelayedScaling: scales against an emulation and golden vectors, one update per step however the step goes, state dicts, processes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from delayed import RECIPE, inputs, plain, settled, snapshot, states, trained
from support import assert_equal, llama_mlp, randomize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tandem
from tandem import ops
from tandem.recipe import DelayedScaling, Float8CurrentScaling, Format

E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
GOLDEN = Path(__file__).parent.parent / "data" / "golden_formats.safetensors"


class Reference:
    """The state of one slot, in float32 arithmetic of its own."""

    def __init__(self, element, length, margin=0, algorithm="max"):
        self.element, self.margin, self.algorithm = element, margin, algorithm
        self.scale, self.history = torch.tensor(1.0), torch.zeros(length)

    def quantize(self, x):
        """x on the grid of the scale, in float64."""
        dtype, largest = self.element
        self.history[0] = torch.maximum(self.history[0], x.detach().float().abs().max())
        codes = (x.detach().float() * self.scale).clamp(-largest, largest).to(dtype)
        return codes.double() * (1 / self.scale.double()).float().double()

    def update(self):
        last = self.history[0].clone()
        if last == 0:
            return
        amax = torch.cat([self.history[1:], last[None]]).max() if self.algorithm == "max" else last
        self.history[1:-1] = self.history[2:].clone()
        if len(self.history) > 1:
            self.history[-1] = last
        self.history[0] = 0
        if torch.isfinite(amax) and amax > 0:
            numerator = torch.tensor(self.element[1] * 2.0**-self.margin, dtype=torch.float32)
            self.scale = (numerator.double() / amax.double()).float()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (4, 0), (5, 2), (1024, -1)])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_linear_is_the_product_of_rounded_operands_over_steps(fp8_format, length, margin, algorithm):
    recipe = DelayedScaling(margin=margin, fp8_format=fp8_format, amax_history_len=length, amax_compute_algo=algorithm)
    wide = E5M2 if fp8_format is Format.HYBRID else E4M3
    x_slot, w_slot, g_slot = (Reference(element, length, margin, algorithm) for element in (E4M3, E4M3, wide))
    linear = randomize(ops.Linear(24, 17))
    for step in range(7):
        x = (torch.randn(5, 24) * 3**step if step != 3 else torch.zeros(5, 24)).requires_grad_()
        grad = torch.randn(5, 17) * 10.0**-step
        with tandem.autocast(recipe=recipe):
            y = linear(x)
        grads = torch.autograd.grad(y, [x, linear.weight, linear.bias], grad)
        x_codes, w_codes, g_codes = x_slot.quantize(x), w_slot.quantize(linear.weight), g_slot.quantize(grad)
        for slot in (x_slot, w_slot, g_slot):
            slot.update()
        expected = (x_codes @ w_codes.t() + linear.bias.double(), g_codes @ w_codes, g_codes.t() @ x_codes, grad.double().sum(0))
        for actual, wanted in zip((y, *grads), expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=4e-6 * max(1e-3, wanted.abs().max().item()))
        forward, backward = states(linear)
        assert torch.equal(forward.scale, torch.stack([x_slot.scale, w_slot.scale]))
        assert torch.equal(forward.amax_history, torch.stack([x_slot.history, w_slot.history], 1))
        assert torch.equal(backward.scale, g_slot.scale[None])
        assert torch.equal(backward.amax_history, g_slot.history[:, None])


def test_golden_steps_through_a_pipeline():
    with safe_open(GOLDEN, "pt") as golden:
        names = {name.split("/")[0] for name in golden.keys() if name.startswith("delayed_run")}
        assert names
        for name in names:
            field = {key.split("/")[1]: golden.get_tensor(key) for key in golden.keys() if key.startswith(name + "/")}
            xs = field["x"].view(torch.bfloat16)
            quantize = ops.Quantize()
            for step in range(xs.shape[0]):
                with tandem.autocast(recipe=DelayedScaling(amax_history_len=4, fp8_format=Format.E4M3)):
                    y = quantize(xs[step])
                dequant = field["data"][step].view(torch.float8_e4m3fn).float() * field["scale_inv"][step].view(torch.float32)
                assert torch.equal(y.view(torch.int16), dequant.to(torch.bfloat16).view(torch.int16))
                forward, _ = states(quantize)
                assert forward.scale.view(torch.int32).item() == field["scale_after"][step].view(torch.int32).item()
                assert torch.equal(forward.amax_history[:, 0].view(torch.int32), field["hist_after"][step].flatten()[:4].view(torch.int32))


def backward_inside(linear, x):
    with tandem.autocast(recipe=RECIPE):
        linear(x).square().sum().backward()


def nested(linear, x):
    with tandem.autocast(recipe=RECIPE):
        with tandem.autocast(enabled=False):
            linear(x)
        with tandem.autocast(recipe=RECIPE):
            y = linear(x)
    y.square().sum().backward()


def inside_a_disabled_region(linear, x):
    with tandem.autocast(enabled=False), tandem.autocast(recipe=RECIPE):
        y = linear(x)
    y.square().sum().backward()


def in_other_threads(linear, x):
    def forward():
        with tandem.autocast(recipe=RECIPE):
            return linear(x).square().sum()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        other.submit(one.submit(forward).result().backward).result()


def evaluated_on_the_way(linear, x):
    plain(linear, x)
    with torch.no_grad(), tandem.autocast(enabled=False):
        linear(x * 100)


STEPS = {
    "backward inside": backward_inside,
    "nested": nested,
    "inside a disabled region": inside_a_disabled_region,
    "checkpointed": lambda linear, x: plain(functools.partial(tandem.checkpoint, linear), x),
    "checkpointed by torch": lambda linear, x: backward_inside(functools.partial(checkpoint, linear, use_reentrant=False), x),
    "checkpointed by torch, reentrant": lambda linear, x: backward_inside(functools.partial(checkpoint, linear, use_reentrant=True), x),
    "in other threads": in_other_threads,
    "in a pipeline": lambda linear, x: plain(ops.Sequential(ops.Identity(), linear), x),
    "evaluated on the way": evaluated_on_the_way,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_one_update_however_it_goes(step):
    expected, actual = trained(plain), trained(step)
    assert_equal(snapshot(actual), snapshot(expected))
    assert torch.equal(actual.weight.grad, expected.weight.grad)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_calls_of_a_region_are_one_step(order):
    """Micro-batches: the largest amax of all of them counts, and scales change behind the last backward only."""
    linear = ops.Linear(8, 8)
    a, b = inputs(2)
    with tandem.autocast(recipe=RECIPE):
        losses = [linear(x).sum() for x in (a, b)]
    forward, backward = states(linear)
    assert forward.amax_history[3, 0] == torch.maximum(a.abs().max(), b.abs().max())
    assert forward.amax_history[1:3].count_nonzero() == 0
    losses[order[0]].backward()
    assert backward.amax_history[1:].count_nonzero() == 0 and backward.scale.item() == 1
    losses[order[1]].backward()
    assert backward.amax_history[:, 0].tolist() == [0, 0, 0, 1] and backward.scale.item() == 448


def test_backwards_inside_a_region_are_one_step():
    linear = ops.Linear(8, 8)
    with tandem.autocast(recipe=RECIPE):
        for factor, x in enumerate(inputs(3), 1):
            (linear(x) * factor).sum().backward()
            assert states(linear)[1].scale.item() == 1
    assert states(linear)[1].amax_history[:, 0].tolist() == [0, 0, 0, 3] and states(linear)[1].scale.item() == pytest.approx(448 / 3)


def test_a_history_may_be_resized_before_backward():
    linear = ops.Linear(8, 8)
    with tandem.autocast(recipe=RECIPE):
        y = linear(inputs(1)[0])
    with torch.no_grad(), tandem.autocast(recipe=DelayedScaling(amax_history_len=6, fp8_format=Format.E4M3)):
        linear(inputs(1)[0])
    (y * 5).sum().backward()
    assert states(linear)[1].amax_history[:, 0].tolist() == [0, 0, 0, 0, 0, 5]


def test_regions_may_overlap_in_time():
    """As in pipeline parallelism: forwards of several regions before the first backward."""
    linear = ops.Linear(8, 8)
    losses = []
    for factor, x in enumerate(inputs(3), 1):
        with tandem.autocast(recipe=RECIPE):
            losses.append((linear(x) * factor).sum())
    assert states(linear)[0].amax_history[1:, 0].count_nonzero() == 3
    for loss in losses:
        loss.backward()
    assert states(linear)[1].amax_history[:, 0].tolist() == [0, 1, 2, 3]


def test_a_module_twice_in_a_pipeline_has_one_history():
    linear = ops.Linear(8, 8)
    model = ops.Sequential(linear, ops.ReLU(), linear)
    x = inputs(1)[0]
    with tandem.autocast(recipe=RECIPE):
        y = model(x)
    y.sum().backward()
    with torch.no_grad(), tandem.autocast(enabled=False):
        between = torch.relu(linear(x))
    forward, backward = states(linear)
    assert forward.amax_history[3, 0] == x.abs().max()  # scales of the first step are 1: inner values may be rounded below it
    assert forward.amax_history[3].count_nonzero() == 2 and between.abs().max() < forward.amax_history[3, 0]
    assert backward.amax_history[1:].count_nonzero() == 1


def test_without_gradients_no_step_ends():
    linear = ops.Linear(8, 8)
    x = inputs(1)[0]
    with torch.no_grad(), tandem.autocast(recipe=RECIPE):
        linear(x)
    forward, _ = states(linear)
    assert forward.scale.tolist() == [1, 1] and forward.amax_history[0, 0] == x.abs().max()
    with tandem.autocast(recipe=RECIPE):
        linear(x / 2)
    assert forward.amax_history[3, 0] == x.abs().max()


def test_a_backward_that_never_runs_holds_up_nobody():
    used, unused = ops.Linear(8, 8), ops.Linear(8, 8)
    for _ in range(2):
        x = inputs(1)[0]
        with tandem.autocast(recipe=RECIPE):
            kept, y = unused(x), used(x)
        y.sum().backward()
    del kept
    assert states(used)[1].amax_history[:, 0].tolist() in ([0, 0, 1, 1], [1, 0, 0, 1])
    scale, history = settled(states(used)[1])
    assert history[:, 0].tolist() == [0, 0, 1, 1] and scale.item() == 448
    assert states(unused)[1].amax_history.count_nonzero() == 0


def test_a_retained_graph_counts_the_second_time_in_the_next_step():
    linear = ops.Linear(8, 8)
    with tandem.autocast(recipe=RECIPE):
        loss = linear(inputs(1)[0]).sum()
    loss.backward(retain_graph=True)
    once = snapshot(linear)["recipe_state.backward.scale"]
    loss.backward()
    assert torch.equal(states(linear)[1].scale, once)
    assert states(linear)[1].amax_history[:, 0].tolist() == [1, 0, 0, 1]


def test_a_graph_lets_its_state_go_behind_backward():
    linear = ops.Linear(8, 8)
    with tandem.autocast(recipe=RECIPE):
        y = linear(inputs(1)[0].requires_grad_())
    history = weakref.ref(states(linear)[1].amax_history)
    y.sum().backward()
    del linear
    gc.collect()
    assert y.grad_fn is not None and history() is None


# Recompute


def test_checkpoint_recomputes_with_the_scales_of_its_forward():
    model = randomize(llama_mlp(16, 32))
    expected = copy.deepcopy(model)
    for x in [torch.randn(6, 16) * 2.0**-k for k in range(4)]:
        results = []
        for module, call in ((model, lambda m, v: tandem.checkpoint(m, v)), (expected, lambda m, v: m(v))):
            leaf = x.clone().requires_grad_()
            with tandem.autocast(recipe=RECIPE):
                y = call(module, leaf)
            y.square().sum().backward()
            results.append((y, leaf.grad, *[p.grad for p in module.parameters()]))
        assert_equal(*results)
    assert_equal(snapshot(model), snapshot(expected))


def test_checkpoints_of_several_regions_know_their_scales():
    model = ops.Linear(8, 8)
    expected = copy.deepcopy(model)
    results = []
    for module, call in ((model, lambda m, v: tandem.checkpoint(m, v)), (expected, lambda m, v: m(v))):
        ys = []
        for x in inputs(3):
            with tandem.autocast(recipe=RECIPE):
                ys.append(call(module, x.clone().requires_grad_()))
        for y in ys:
            y.square().sum().backward()
        results.append(module.weight.grad)
    assert torch.equal(*results)


def test_checkpoint_passes_arguments_on_and_nests():
    linear = ops.Linear(8, 8)

    def twice(x, *, factor):
        return tandem.checkpoint(lambda v: linear(v) * factor, x)

    x = inputs(1)[0].requires_grad_()
    with tandem.autocast(recipe=Float8CurrentScaling()):
        y = tandem.checkpoint(twice, x, factor=2.0, preserve_rng_state=False)
        (expected,) = torch.autograd.grad(linear(x).sum() * 2, x)
    (actual,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(actual, expected)
    plain = tandem.checkpoint(linear, x)
    with tandem.autocast(recipe=RECIPE):  # forward was outside, so is the recompute
        assert torch.equal(torch.autograd.grad(plain.sum(), x)[0], torch.ones(4, 8) @ linear.weight)


def test_a_recompute_elsewhere_is_refused():
    linear = ops.Linear(8, 8)
    x = inputs(1)[0].requires_grad_()
    with tandem.autocast(recipe=RECIPE):
        y = checkpoint(linear, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), tandem.autocast(recipe=RECIPE)))
    with pytest.raises(ValueError, match=r"expected a recompute in the autocast region of its forward, whose scales it needs, got another region. Enter the region around tandem.checkpoint, not in it"):
        y.sum().backward()


def test_checkpoint_refuses_what_it_does_not_know():
    with pytest.raises(NotImplementedError, match="checkpoint: expected distribute_saved_activations=.*This version knows the default only"):
        tandem.checkpoint(torch.relu, torch.ones(2), distribute_saved_activations=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode], ids=["inference", "fake"])
def test_state_outlives_the_mode_in_which_it_is_made(mode):
    linear = ops.Linear(8, 8)
    expected = copy.deepcopy(linear)
    with contextlib.suppress(Exception), mode(), tandem.autocast(recipe=RECIPE):
        linear(torch.zeros(4, 8))
    for module in (linear, expected):
        plain(module, inputs(1)[0].requires_grad_())
    assert all(type(tensor) is torch.Tensor for tensor in snapshot(linear).values())
    assert_equal(snapshot(linear), snapshot(expected))
    assert torch.equal(linear.weight.grad, expected.weight.grad)


# Functions of the user


def test_functions_of_the_user_make_scales():
    seen = []

    def amax(history):
        seen.append(history.clone())
        return history.amax(0)

    def scale(amax, scale, fp8_max, recipe):
        return torch.where(amax > 0, torch.exp2(torch.floor(torch.log2(fp8_max / amax))), scale)

    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=amax, scaling_factor_compute_algo=scale, fp8_format=Format.E4M3)
    linear = ops.Linear(8, 8)
    x = torch.full((4, 8), 3.0, requires_grad=True)
    for _ in range(2):
        with tandem.autocast(recipe=recipe):
            y = linear(x)
        y.sum().backward()
    forward, backward = states(linear)
    assert forward.scale[0] == 128 and backward.scale[0] == 256
    assert forward.amax_history[:, 0].tolist() == [0, 0, 3, 3]
    assert len(seen) == 4 and seen[0][0, 0] == 3
    assert copy.deepcopy(recipe) == recipe and tandem.recipe.recipe_from_json(recipe.to_json()) is recipe

    wrong = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: scale[0])
    with pytest.raises(ValueError, match=r"expected scaling_factor_compute_algo to give a tensor of shape \(2,\).*got \(\)"):
        with tandem.autocast(recipe=wrong):
            linear(x)


def test_functions_see_default_scales_where_only_one_is_given():
    by_function = DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.amax(0), fp8_format=Format.E4M3)
    expected, actual = trained(plain), trained(functools.partial(plain, recipe=by_function))
    assert_equal(snapshot(actual), snapshot(expected))


# Checks


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"margin": 0.5}, "expected margin to be a whole number from -64 to 64, got 0.5"),
        ({"amax_history_len": 0}, "expected amax_history_len to be a whole number from 1 to 65536, got 0"),
        ({"amax_compute_algo": "least"}, 'expected amax_compute_algo to be one of "max", "most_recent" or a function, got \'least\''),
        ({"scaling_factor_compute_algo": 3}, "expected scaling_factor_compute_algo to be None or a function, got 3"),
        ({"fp8_format": "E4M3"}, "expected fp8_format to be Format.HYBRID or Format.E4M3, got 'E4M3'"),
        ({"reduce_amax": 1}, "expected reduce_amax to be True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, text):
    with pytest.raises(ValueError, match=f"DelayedScaling: {text}".replace("(", r"\(")):
        DelayedScaling(**arguments)


@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha", "backward_override"])
def test_what_is_not_known_yet_is_refused(name):
    with pytest.raises(NotImplementedError, match=f"DelayedScaling: expected {name}=.*This version knows the default only"):
        DelayedScaling(**{name: True})


def test_a_group_that_is_none_is_refused():
    with pytest.raises(TypeError, match="expected amax_reduction_group to be a process group of torch.distributed or None, got int"):
        tandem.autocast(recipe=RECIPE, amax_reduction_group=3)


def test_explain_and_verify_know_the_steps():
    model = randomize(llama_mlp(16, 32))
    x = torch.randn(6, 16)
    for _ in range(2):
        with tandem.autocast(recipe=RECIPE):
            y = model(x)
        y.sum().backward()
    before = snapshot(model)
    with tandem.autocast(recipe=RECIPE):
        assert tandem.verify(model, x).passed
    assert_equal(snapshot(model), before)
    text = tandem.explain(model)
    for word in ("take_scale", "record_amax", "quantize"):
        assert word in text


def test_state_that_does_not_fit_is_refused_by_the_dispatcher_op():
    linear = trained(plain)
    text = linear._run_alone().now.pipeline(())
    with tandem.autocast(recipe=RECIPE):
        description = text.description(True)
    x, params = torch.zeros(4, 8), list(linear.parameters())
    with pytest.raises(ValueError, match="expected 7 tensors as state of the recipe, got 0"):
        torch.ops.tandem.pipeline(x, [], params, [], [], [], description)
    bad = [torch.tensor([1]), *[t for state in states(linear) for t in (state.scale.double(), state.amax_history, state.pending)]]
    with pytest.raises(ValueError, match=r"delayed scaling: expected scale \[slots\] and amax_history \[length, slots\] in contiguous float32"):
        torch.ops.tandem.pipeline(x, [], params, [], bad, [], description)


def test_descriptions_say_where_amaxes_go():
    x, weight = torch.zeros(4, 8), torch.zeros(8, 8)

    def call(state):
        op = {"op": "basic_linear", "params": [0], **state}
        text = json.dumps({"ops": [op], "recipe": {"name": "DelayedScaling"}})
        return torch.ops.tandem.pipeline(x, [], [weight], [], [], [], text)

    with pytest.raises(ValueError, match='basic_linear: state: expected a JSON object, got'):
        call({"state": [0, 0]})
    with pytest.raises(ValueError, match='basic_linear: state: expected a field "backward", got none'):
        call({"state": {"module": 0, "forward": 0}})
    with pytest.raises(ValueError, match='expected "state", which says where its amaxes go, under a recipe that keeps them, got none'):
        call({})
    with pytest.raises(ValueError, match="pipeline: expected an autocast region, got none. Enter one."):
        tandem._C.state_in_region([])


def test_kernel_ops_check_their_arguments():
    scale, history, pending = torch.ones(2), torch.zeros(4, 2), torch.zeros(1, dtype=torch.int64)
    region = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected FORMAT:margin=NUMBER:max or :most_recent.*got \"fp8_e4m3\""):
        torch.ops.tandem.take_scale_(scale, history, pending, region, 0, "fp8_e4m3", 1, 0)
    with pytest.raises(ValueError, match="expected region as one int64"):
        torch.ops.tandem.take_scale_(scale, history, pending, torch.ones(1), 0, "fp8_e4m3:margin=0:max", 1, 0)
    with pytest.raises(ValueError, match="scale update: expected a registered function, got nobody, which this process does not know"):
        pending.fill_(7)
        torch.ops.tandem.take_scale_(scale, history, pending, region, 0, "fp8_e4m3:margin=0:max:function=nobody", 1, 0)


def test_bits_of_a_scale_are_those_of_the_quotient():
    quantize = ops.Quantize()
    with tandem.autocast(recipe=RECIPE):
        quantize(torch.tensor([[3.0]]))
    assert struct.pack(">f", states(quantize)[0].scale.item()).hex() == "43155555"
