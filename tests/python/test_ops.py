"""Ops against float64 references where sizes and numbers are unusual, which test_op_table.py leaves out; their options and arguments."""

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import OPS, TOLERANCES, check_against, each_raises, randomize

import tandem
import tandem.ops as ops

HIDDEN = 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "expanded", "broadcast within rows", "shifted", "three dimensions"])
def test_large_products(layout, dtype):
    rows, fan_in, fan_out = 130, 129, 131  # large enough for oneDNN, no multiple of a vector
    x = {
        "contiguous": lambda: torch.randn(rows, fan_in),
        "strided": lambda: torch.randn(rows, 2 * fan_in)[:, ::2],
        "transposed": lambda: torch.randn(fan_in, rows).t(),
        "expanded": lambda: torch.randn(1, fan_in).expand(rows, fan_in),
        "broadcast within rows": lambda: torch.randn(rows, 1).expand(rows, fan_in),
        "shifted": lambda: torch.randn(rows * fan_in + 1)[1:].view(rows, fan_in),
        "three dimensions": lambda: torch.randn(2, rows // 2, fan_in).transpose(0, 1),
    }[layout]()
    x = x.to(dtype) if dtype != torch.float32 else x
    linear = randomize(ops.Linear(fan_in, fan_out, dtype=dtype))
    x = x.detach().requires_grad_()
    y = linear(x)
    grad = torch.randn(*y.shape[:-1], 2 * fan_out).to(dtype)[..., ::2]
    actual = [y, *torch.autograd.grad(y, [x, linear.weight, linear.bias], grad)]
    wide = [t.detach().double().requires_grad_() for t in (x, linear.weight, linear.bias)]
    y = torch.nn.functional.linear(*wide)
    unit = torch.finfo(dtype).eps
    for a, e in zip(actual, [y, *torch.autograd.grad(y, wide, grad.double())], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=unit, atol=unit * 4 * e.abs().max().item())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [n for n in OPS if n != "Dropout 1"])
def test_nan_and_infinity_go_where_they_go_in_torch(name, value):
    make, reference = OPS[name]
    module = randomize(make())
    x = torch.randn(3, HIDDEN)
    x[1, 2] = value
    expected = reference(x.double(), *[p.detach().double() for p in module.parameters()]).float()
    actual = module(x)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.isinf(), expected.isinf())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 9), hidden=st.integers(1, 40), name=st.sampled_from(["RMSNorm", "LayerNorm", "Linear"]))
def test_any_size(rows, hidden, name):
    make, reference = OPS[name]
    module = randomize(make(hidden))
    x, gain = torch.linspace(-3, 3, rows * hidden).reshape(rows, hidden), 0.0
    if rows and name != "Linear":  # a norm divides by what may be small, also terms that cancel
        centred = x - x.mean(-1, keepdim=True) if name == "LayerNorm" else x
        gain = (module.weight.abs().max() * torch.rsqrt(centred.square().mean(-1) + 1e-5).max()).item()
    check_against(module, reference, x.requires_grad_(), gain=gain)


SHAPE = (3, 8)
NORMS_OF_TWO_DIMENSIONS = {
    "RMSNorm": lambda x, w: torch.nn.functional.rms_norm(x, SHAPE, w, 1e-5),
    "LayerNorm": lambda x, w, b: torch.nn.functional.layer_norm(x, SHAPE, w, b),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NORMS_OF_TWO_DIMENSIONS)
def test_norms_over_two_dimensions(name, dtype, compiled):
    if compiled and dtype != torch.float32:
        pytest.skip("one dtype is enough")
    norm = randomize(getattr(ops, name)(SHAPE, dtype=dtype))
    module = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
    for x in (torch.randn(2, 5, *SHAPE), torch.randn(4, 8, 3).mT, torch.randn(SHAPE), torch.randn(0, *SHAPE)):
        check_against(module, NORMS_OF_TWO_DIMENSIONS[name], x.to(dtype).requires_grad_())
    op = "rms_norm" if name == "RMSNorm" else "layer_norm"
    for shape in ((2, 4, 8), (8,)):
        text = rf"{op}: expected weight of the shape of the last 2 dimensions of x \[{', '.join(map(str, shape))}\], got \[3, 8\]\. Build the op"
        with pytest.raises(ValueError, match=text):
            norm(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("recipe", [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()])
@pytest.mark.parametrize("name", NORMS_OF_TWO_DIMENSIONS)
def test_norms_over_two_dimensions_in_pipelines(name, recipe):
    box = randomize(ops.Sequential(ops.MakeExtraOutput(), getattr(ops, name)((4, 32)), ops.Linear(32, 16)))
    x = torch.randn(8, 4, 32, requires_grad=True)
    assert box.verify(x)
    with tandem.autocast(recipe=recipe):
        assert box.verify(x)
        text = box.explain()
    assert "_norm_quantize" in text and "_norm_backward_add" in text


def test_dropout_drops_a_share_scales_the_rest_and_repeats_in_backward():
    op = ops.Dropout(0.25)
    x = torch.ones(100, 100, requires_grad=True)
    y = op(x)
    y.sum().backward()
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(x.grad, y.detach())
    assert not torch.equal(op(x), y)
    torch.manual_seed(3)
    first = op(x)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)
    assert op.eval()(x) is x or torch.equal(op(x), x)


def test_the_training_flag_of_each_dropout_counts():
    both = ops.Sequential(ops.Identity(), ops.Dropout(1.0), ops.ConstantScale(2.0), ops.Dropout(1.0))
    x = torch.ones(4)
    assert both(x).sum() == 0
    both[1].eval()
    assert both(x).sum() == 0
    both[3].eval()
    assert torch.equal(both(x), 2 * x)
    both.eval()
    both[1].train()
    assert both(x).sum() == 0


def test_an_option_that_changes_counts_at_the_next_call():
    scale = ops.ConstantScale(2.0)
    both = ops.Sequential(ops.Identity(), scale)
    x = torch.ones(3)
    assert torch.equal(both(x), 2 * x)
    scale.scale = 3.0
    assert torch.equal(both(x), 3 * x)
    assert torch.equal(scale(x), 3 * x)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "3", True])
def test_an_option_that_is_no_finite_number_is_refused_where_it_is_assigned(value, has_run):
    x = torch.ones(2)
    for op, name in ((ops.ConstantScale(2.0), "scale"), (ops.Dropout(0.5), "p"), (ops.RMSNorm(2), "eps")):
        torch.manual_seed(0)
        before = op(x) if has_run else None
        with pytest.raises(ValueError, match=f"{type(op).__name__}: expected {name} to be a finite number, got {value!r}. Pass a float"):
            setattr(op, name, value)
        torch.manual_seed(0)
        assert before is None or torch.equal(op(x), before)


BAD_OPTIONS = [
    (lambda: ops.Quantize(), "quantize_forward", "no", "Quantize: expected quantize_forward to be True or False, got 'no'. Pass a bool."),
    (lambda: ops.Quantize(), "quantize_backward", None, "Quantize: expected quantize_backward to be True or False, got None. Pass a bool."),
    (lambda: ops.Quantize(), "quantize_forward", torch.ones(2), "expected quantize_forward to be True or False, got tensor([1., 1.])"),
    (lambda: ops.RMSNorm(2), "zero_centered_gamma", 2, "RMSNorm: expected zero_centered_gamma to be True or False, got 2. Pass a bool."),
    (lambda: ops.RMSNorm(2), "rounds_before_weight", 2, "RMSNorm: expected rounds_before_weight to be True or False, got 2. Pass a bool."),
    (lambda: ops.LayerNorm(2), "eps", -1, "LayerNorm: expected eps to be a finite number >= 0, got -1.0. eps: added inside the square root."),
    (lambda: ops.Dropout(0.0), "p", 2, "Dropout: expected p to be a number from 0 to 1, got 2.0. p: the share that becomes zero."),
    (lambda: ops.Reshape((2,)), "shape", 8, "Reshape: expected shape to be whole numbers, got 8. Pass a tuple of ints."),
    (lambda: ops.Reshape((2,)), "shape", (-1, -1), "Reshape: expected sizes >= 0 and at most one -1, got (-1, -1). One size can be inferred."),
    (lambda: ops.Reshape((2,)), "shape", (1,) * 65, "Reshape: expected at most 64 sizes, got 65. No tensor has as many dimensions."),
    (
        lambda: ops.Reshape((2,)),
        "shape",
        (0, 2**63),
        "Reshape: expected sizes whose product is below 2^63, got (0, 9223372036854775808). No tensor has as many elements.",
    ),
]
IN_PLACE = "expected in_place to be True or False, got 'no'. Pass a bool."


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(("make", "name", "value", "text"), BAD_OPTIONS)
def test_an_option_is_checked_where_it_is_assigned(make, name, value, text, has_run):
    op, x = make(), torch.randn(2)
    before = op(x) if has_run else None
    with pytest.raises(ValueError, match=re.escape(text)):
        setattr(op, name, value)
    assert before is None or torch.equal(op(x), before)


@pytest.mark.parametrize("make", [ops.AddExtraInput, ops.MakeExtraOutput])
def test_in_place_is_checked_where_it_is_assigned(make):
    with pytest.raises(ValueError, match=f"{make.__name__}: {IN_PLACE}"):
        make().in_place = "no"
    with pytest.raises(ValueError, match=IN_PLACE):
        make(in_place="no")


def test_flags_take_tensors_of_one():
    op, x = ops.Quantize(forward=torch.tensor(False)), torch.randn(2)
    assert torch.equal(op(x), x) and op.quantize_forward is False
    op.quantize_forward = torch.tensor(True)
    assert torch.equal(op(x), x) and op.quantize_forward is True


def test_options_take_tensors_of_one_number():
    scale, reshape, x = ops.ConstantScale(torch.tensor(2.0)), ops.Reshape((-1,)), torch.ones(4)
    assert torch.equal(scale(x), 2 * x)
    scale.scale = torch.tensor([4.0])
    assert torch.equal(scale(x), 4 * x) and type(scale.scale) is float
    reshape.shape = [torch.tensor(2), -1]
    assert reshape(x).shape == (2, 2) and reshape.shape == (2, -1)


BAD_ARGUMENTS = [
    (lambda: ops.Linear(0, 3), ValueError, "Linear: expected in_features to be a whole number > 0, got 0"),
    (lambda: ops.Linear(3, True), ValueError, "expected out_features to be a whole number > 0, got True"),
    (lambda: ops.Bias(-1), ValueError, "Bias: expected size to be a whole number > 0, got -1"),
    (lambda: ops.RMSNorm(8, eps=-1), ValueError, "RMSNorm: expected eps to be a finite number >= 0, got -1"),
    (lambda: ops.LayerNorm(()), ValueError, "LayerNorm: expected normalized_shape with one size at least, got none. Give those of the last"),
    (lambda: ops.LayerNorm((2, 0)), ValueError, "LayerNorm: expected normalized_shape to be a whole number > 0, got 0"),
    (lambda: ops.L2Normalization(eps=-1), ValueError, "L2Normalization: expected eps to be a finite number >= 0, got -1"),
    (lambda: ops.Dropout(1.5), ValueError, "Dropout: expected p to be a number from 0 to 1, got 1.5"),
    (lambda: ops.ConstantScale(float("inf")), ValueError, "ConstantScale: expected scale to be a finite number, got inf. Pass a float."),
    (lambda: ops.ConstantScale(float("nan")), ValueError, "ConstantScale: expected scale to be a finite number, got nan"),
    (lambda: ops.ConstantScale(10**400), ValueError, "ConstantScale: expected scale to be a finite number, got 1000"),
    (lambda: ops.ConstantScale("2"), ValueError, "ConstantScale: expected scale to be a finite number, got '2'"),
    (lambda: ops.ConstantScale(torch.nn.Parameter(torch.ones(1))), ValueError, "expected scale to be a finite number, got Parameter"),
    (lambda: ops.ConstantScale(torch.ones(2)), ValueError, "expected scale to be a finite number, got tensor([1., 1.])"),
    (lambda: ops.LayerNorm(16, eps=float("inf")), ValueError, "LayerNorm: expected eps to be a finite number, got inf"),
    (lambda: ops.Dropout(float("nan")), ValueError, "Dropout: expected p to be a finite number, got nan"),
    (lambda: ops.Reshape((2.0, 3)), ValueError, "Reshape: expected shape to be whole numbers, got (2.0, 3). Pass a tuple of ints."),
    (
        lambda: ops.AddExtraInput().set_extra_input_channel(0, "a\ud800"),
        ValueError,
        "AddExtraInput: expected channel to be text that UTF-8 can encode, got 'a\\ud800'. Leave out surrogates.",
    ),
    (lambda: ops.Reshape(8), ValueError, "Reshape: expected shape to be whole numbers, got 8. Pass a tuple of ints."),
    (lambda: ops.Reshape((-1, -1)), ValueError, "Reshape: expected sizes >= 0 and at most one -1, got (-1, -1)"),
    (lambda: ops.Reshape((-2, 3)), ValueError, "Reshape: expected sizes >= 0 and at most one -1, got (-2, 3)"),
    (lambda: ops.SwiGLU(glu_interleave_size=0), ValueError, "SwiGLU: expected glu_interleave_size to be None or a whole number > 0, got 0."),
    (lambda: ops.GEGLU(glu_interleave_size=True), ValueError, "GEGLU: expected glu_interleave_size to be None or a whole number > 0, got True"),
    (lambda: ops.SwiGLU(glu_interleave_size=2.0), ValueError, "SwiGLU: expected glu_interleave_size to be None or a whole number > 0, got 2.0"),
    (lambda: ops.SiTUGLU(beta1=0.0), ValueError, "SiTUGLU: expected beta1 to be a finite number > 0, got 0.0. Give what its factor stays below."),
    (lambda: ops.SiTUGLU(beta2=float("inf")), ValueError, "SiTUGLU: expected beta2 to be a finite number, got inf"),
    (lambda: ops.ScaledSiTUGLU(beta2=-1), ValueError, "ScaledSiTUGLU: expected beta2 to be a finite number > 0, got -1.0"),
    (lambda: ops.ClampedSwiGLU(limit=float("nan")), ValueError, "ClampedSwiGLU: expected limit to be a finite number, got nan"),
    (lambda: ops.ScaledSReLU(activation_recompute_in_mlp=2), ValueError, "ScaledSReLU: expected activation_recompute_in_mlp to be True or False, got 2"),
    (lambda: ops.ScaledSwiGLU(activation_recompute_in_mlp=2), ValueError, "ScaledSwiGLU: expected activation_recompute_in_mlp to be True or False, got 2"),
    (lambda: ops.ScaledSiTUGLU(activation_recompute_in_mlp=2), ValueError, "ScaledSiTUGLU: expected activation_recompute_in_mlp to be True or False, got 2"),
    (lambda: ops.ScaledClampedQGeGLU(activation_recompute_in_mlp=2), ValueError, "ScaledClampedQGeGLU: expected activation_recompute_in_mlp to be True or False, got 2"),
    (lambda: ops.GELU(cache_quantized_input=2), ValueError, "GELU: expected cache_quantized_input to be True or False, got 2"),
    (lambda: ops.Linear(4, 4, tensor_parallel_mode="rows"), ValueError, 'Linear: expected tensor_parallel_mode None, "column" or'),
    (lambda: type("P", (ops.BasicOperation,), {})(), TypeError, "P: expected a forward, op_forward_compute and op_forward_save_ctx, or op_forward(ctx, ...), got"),
    (lambda: ops.GroupedLinear(0, 4, 4), ValueError, "GroupedLinear: expected num_groups to be a whole number > 0, got 0. Give the number of weights."),
    (lambda: ops.BasicLinear(0, 4), ValueError, "BasicLinear: expected in_features to be a whole number > 0, got 0"),
    (lambda: ops.Linear(4, 4, accumulate_into_main_grad=2), ValueError, "BasicLinear: expected accumulate_into_main_grad to be True or False, got 2"),
    (lambda: ops.BasicLinear(4, 4, userbuffers_options={"comm_name": "qkv"}), NotImplementedError, "BasicLinear: expected userbuffers_options="),
]
for name, make in {
    "BasicLinear": lambda dtype: ops.BasicLinear(4, 4, dtype=dtype), "Bias": lambda dtype: ops.Bias(4, dtype=dtype),
    "GroupedLinear": lambda dtype: ops.GroupedLinear(2, 4, 4, dtype=dtype), "RMSNorm": lambda dtype: ops.RMSNorm(4, dtype=dtype),
}.items():  # fmt: skip
    for dtype in (torch.int32, torch.float8_e4m3fn):
        text = f"{name}: expected dtype to be torch.float32, torch.float64, torch.bfloat16 or torch.float16, got {dtype}. Parameters have one of these"
        BAD_ARGUMENTS.append((functools.partial(make, dtype), ValueError, text))


test_bad_arguments_say_expected_and_got = each_raises(BAD_ARGUMENTS)


def test_wrong_shapes_say_expected_and_got():
    with pytest.raises(ValueError, match=r"linear: expected x with 8 features in its last dimension.*got x of shape \[2, 7\]"):
        ops.Linear(8, 3)(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"reshape: expected x with a multiple of 4 elements for shape \[-1, 4\], got x of shape"):
        ops.Reshape((-1, 4))(torch.randn(3))


def test_device_none_is_the_default_device():
    with torch.device("meta"):
        assert {p.device.type for p in ops.Sequential(ops.LayerNorm(4), ops.Linear(4, 4)).parameters()} == {"meta"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ops.Linear(8, 8, device="meta"),
        lambda: ops.RMSNorm(8, device="meta"),
        lambda: ops.GroupedLinear(2, 8, 8, device="meta"),
        lambda: tandem.LayerNormMLP(8, 8, device="meta"),
    ],
)
def test_reset_parameters_gives_memory_to_what_was_made_on_the_meta_device(make):
    module = make()
    params = [*module.parameters()]
    module.reset_parameters()
    assert [*map(id, module.parameters())] == [*map(id, params)] and not any(param.is_meta for param in params)
    assert all(param.isfinite().all() for param in params) and module.device.type == "cpu"


def test_repr_names_the_options():
    assert repr(ops.Linear(4, 2, bias=False)) == "Linear(in_features=4, out_features=2, bias=False)"
    assert repr(ops.RMSNorm(4)) == "RMSNorm(4, eps=1e-05, zero_centered_gamma=False)"
    assert repr(ops.RMSNorm(4, rounds_before_weight=True)).endswith("zero_centered_gamma=False, rounds_before_weight=True)")
    for op in (ops.Dropout(0.5), ops.ConstantScale(2), ops.Reshape((2, -1)), ops.Quantize(), ops.AddExtraInput(), ops.Bias(3)):
        assert "=" in repr(op)
    assert "in_place=False" in repr(ops.MakeExtraOutput()) and "out_features=2" in repr(ops.BasicLinear(1, 2))
