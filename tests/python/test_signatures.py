"""What the library's definitions say of options and parameters is what the Python classes take; and classes made of definitions alone."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import close

import tandem
from tandem import ops
from tandem.ops import library
from tandem.op_base.signature import signature_of
from tandem.recipe import CustomRecipe, MMParams, Recipe

ROOT = Path(__file__).parents[2]
KINDS = tandem._C.op_names()
OWN = {kind: library.own_classes[kind] for kind in KINDS if kind in library.own_classes}

# Arguments by another name than in the library: TransformerEngine's.
NAMES = {
    ("basic_linear", "accumulate_into_main_grad"): "accumulate_into_main_grad",
    ("basic_linear", "delay_wgrad"): "delay_wgrad_compute",
    ("bias", "features"): "size",
    ("constant_scale", "factor"): "scale",
    ("grouped_linear", "delay_wgrad"): "delay_wgrad_compute",
    ("grouped_linear", "packed_weight"): "single_grouped_weight",
    ("grouped_linear", "packed_bias"): "single_grouped_bias",
    ("layer_norm", "hidden"): "normalized_shape",
    ("rms_norm", "hidden"): "normalized_shape",
}
# What no argument says: attributes of the weight, and what is to be known of a process group.
NOT_ARGUMENTS = {(op, option) for op in ("basic_linear", "grouped_linear") for option in ("overwrite_main_grad", "dummy_gradient")}
NOT_ARGUMENTS |= {("grouped_linear", "writes_output"), ("grouped_linear", "writes_grad_input")}  # of a call
LOSSES = ("cross_entropy", "linear_cross_entropy", "linear_cross_entropy_with_predictions")
NOT_ARGUMENTS |= {  # a tensor there, and what tensor_parallel_group says
    (op, option) for op in LOSSES for option in ("class_weight", "group", "group_size", "rank")
}
GROUP_OF = {"group", "size"}
NONE_INSTEAD = {"glu_interleave_size": None}  # of 0
WITHOUT_DEFAULT = {("constant_scale", "factor"), ("dropout", "p"), ("reshape", "shape"), ("grouped_linear", "num_groups")}
WITHOUT_DEFAULT |= {(op, option) for op in ("attention", "rotary") for option in ("num_heads", "head_dim")} | {("qk_norm", "num_heads")}


@pytest.mark.parametrize("kind", OWN)
def test_a_class_takes_what_the_signature_says(kind):
    signature, arguments = signature_of(kind), inspect.signature(OWN[kind]).parameters
    for size in signature.sizes:
        if (kind, size.name) == ("cross_entropy", "num_classes"):
            continue  # class_weight, which is optional, has that size
        assert arguments[NAMES.get((kind, size.name), size.name)].default is inspect.Parameter.empty
    for option in signature.options:
        if (kind, option.name) in NOT_ARGUMENTS:
            continue
        if option.name in GROUP_OF:
            assert option.is_required and arguments["process_group"].default is None
            continue
        argument = arguments[NAMES.get((kind, option.name), option.name)]
        expected = inspect.Parameter.empty if (kind, option.name) in WITHOUT_DEFAULT else NONE_INSTEAD.get(option.name, option.default)
        assert argument.default == expected and type(argument.default) is type(expected), option.name


@pytest.mark.parametrize("kind", OWN)
def test_a_class_says_of_itself_what_the_signature_says(kind):
    signature, own = signature_of(kind), OWN[kind]
    assert own.num_extra_inputs == len(signature.extra_inputs) and own.num_extra_outputs == len(signature.extra_outputs)
    if signature.family == "activation":
        assert inspect.getdoc(own) == f"{signature.formula}."


@pytest.mark.parametrize("recipe", [each for each in Recipe._known.values() if each is not CustomRecipe], ids=lambda recipe: recipe.__name__)
def test_a_recipe_takes_what_the_library_says(recipe):
    arguments = {field.name: field.default for field in dataclasses.fields(recipe)}
    known = {row.name: tandem.recipe.Format[row.default] if row.name == "fp8_format" else row.default for row in recipe._rows}
    given = [name for name in known if name not in ("amax_reduction_group", "calibrating", "scale_update")]  # of the region, and of the functions
    assert [name for name in arguments if name in known] == given
    if "backward_override" in known:
        assert arguments.pop("backward_override") is None and known["backward_override"] == "none"
        given.remove("backward_override")
        del known["backward_override"]
    for name in given:
        assert arguments[name] == known[name] and type(arguments[name]) is type(known[name]), name
    accumulators = {"fp8_gemm_fprop": MMParams(False), "fp8_gemm_dgrad": MMParams(), "fp8_gemm_wgrad": MMParams()}  # of no meaning
    others = dict(accumulators) if recipe is tandem.recipe.Float8CurrentScaling else {}
    others |= dict(recipe._only_defaults, **({"scaling_factor_compute_algo": None} if recipe is tandem.recipe.DelayedScaling else {}))
    assert {name: value for name, value in arguments.items() if name not in known} == others
    with tandem.autocast(recipe=recipe()):
        assert tandem._C.active_recipe() == recipe().to_json()


MADE = {
    "basic_linear": lambda: ops.BasicLinear(8, 6),
    "bias": lambda: ops.Bias(8),
    "rms_norm": lambda **given: ops.RMSNorm(8, **given),
    "layer_norm": lambda **given: ops.LayerNorm(8, **given),
    "qk_norm": lambda **given: ops.QKNorm(1, 8, **given),
}


@pytest.mark.parametrize("kind", sorted({kind for kind in OWN if signature_of(kind).parameters} - {"grouped_linear", *LOSSES}))
def test_parameters_have_the_shapes_and_the_start_of_the_signature(kind):
    module = MADE[kind]()
    sizes = dict(zip([size.name for size in signature_of(kind).sizes], (8, 6), strict=False))
    for parameter in signature_of(kind).parameters:
        tensor = module.get_parameter(parameter.name)
        assert tuple(tensor.shape) == tuple(sizes[name] for name in parameter.shape)
        if parameter.init == "kaiming_uniform":
            assert 0 < tensor.abs().max() <= tensor.shape[-1] ** -0.5
        else:
            assert torch.equal(tensor, torch.full_like(tensor, parameter.init == "ones"))
        if parameter.zeros_if:
            centered = MADE[kind](**{parameter.zeros_if: True}).get_parameter(parameter.name)
            assert torch.equal(centered, torch.zeros_like(centered))


ACTIVATIONS = [kind for kind in KINDS if signature_of(kind).family in ("activation", "glu")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_is_its_reference_in_float64(kind, dtype):
    op, x = library.class_of(kind)(), torch.randn(5, 68).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, y64 = op(x), op(wide)
    close(y, y64)
    grad = torch.randn(y.shape).to(dtype)
    close(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(y64, wide, grad.double())[0])
    assert torch.autograd.gradcheck(op, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_fuses_and_stands_in_a_module(kind):
    box, x = ops.Sequential(tandem.LayerNormMLP(8, 16, activation=kind)), torch.randn(4, 8, requires_grad=True)
    box(x).sum().backward()
    gated = signature_of(kind).family == "glu"
    assert ("made    linear_bias_glu" if gated else "made    linear_bias_activation") in box.explain()
    assert ("made    glu_backward_bias" if gated else "made    activation_backward_bias") in box.explain()


@pytest.fixture
def norm(monkeypatch):
    """A class that is made of a signature with sizes, options and parameters, though one is there already."""
    monkeypatch.delitem(library.own_classes, "layer_norm")
    library.class_of.cache_clear()
    yield library.class_of("layer_norm")
    library.class_of.cache_clear()


def test_a_class_is_made_of_a_signature(norm):
    assert str(inspect.signature(norm)) == "(hidden: int, *, eps=1e-05, zero_centered_gamma=False, device=None, dtype=None)"
    assert "hidden: size of the last dimension of x." in inspect.getdoc(norm) and "eps: added inside" in inspect.getdoc(norm)
    made, own = norm(8, eps=1e-3, dtype=torch.bfloat16), ops.LayerNorm(8, eps=1e-3, dtype=torch.bfloat16)
    assert made.weight.dtype == torch.bfloat16 and list(made.state_dict()) == ["weight", "bias"]
    assert repr(made) == "LayerNorm(hidden=8, eps=0.001, zero_centered_gamma=False)"
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(made(x), own(x))
    assert torch.equal(norm(4, zero_centered_gamma=True).weight, torch.zeros(4))
    box = ops.Sequential(made, ops.GELU())
    assert torch.equal(copy.deepcopy(box)(x), box(x))
    made.eps = 10.0
    assert not torch.equal(box(x), own(x))
    assert library.LayerNorm is norm and "LayerNorm" in dir(library)
    assert torch.equal(pickle.loads(pickle.dumps(made))(x), made(x))


def test_a_made_class_checks_what_it_is_given(norm):
    with pytest.raises(ValueError, match="LayerNorm: expected hidden to be a whole number > 0, got 0"):
        norm(0)
    with pytest.raises(ValueError, match="LayerNorm: expected eps to be a finite number >= 0, got -1.0. eps: added inside the square root."):
        norm(8, eps=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        norm(8, epsilon=1.0)


def test_a_class_that_is_none_lists_those_there_are():
    with pytest.raises(AttributeError, match="tandem.ops.library: expected the class of an op of the library that has none in tandem.ops, got 'Relu'"):
        library.Relu
    with pytest.raises(ValueError, match='op: expected one of .*, got "softmax"'):
        library.class_of("softmax")


def test_a_signature_without_shapes_makes_no_class(monkeypatch):
    monkeypatch.delitem(library.own_classes, "grouped_linear")
    with pytest.raises(NotImplementedError, match=r"grouped_linear: expected a signature with the shape of each parameter, got none of weight\[\], bias\[\]"):
        library.class_of.__wrapped__("grouped_linear")


def test_options_of_other_types_are_checked():
    whole = signature_of("grouped_linear").options[0]
    assert (whole.name, whole.checked("Op", "groups", 3)) == ("num_groups", 3)
    text = "Op: expected groups to be a whole number from 1 to 65536, got {}. groups: the number of weights."
    for value in (0, 65537, 1.0, True, "1"):
        with pytest.raises(ValueError) as error:
            whole.checked("Op", "groups", value)
        assert str(error.value) == text.format(repr(value))
    dummy = signature_of("basic_linear").options[2]
    assert dummy.checked("Op", "dummy", "zeros") == "zeros"
    with pytest.raises(ValueError, match='expected dummy to be one of "none", "empty", "zeros", got \'ones\'. dummy: what is returned beside'):
        dummy.checked("Op", "dummy", "ones")


def test_the_page_of_ops_is_current():
    result = subprocess.run([sys.executable, ROOT / "scripts" / "render_ops.py", "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
