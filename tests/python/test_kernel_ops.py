"""Every kernel op of the library keeps the contract of a dispatcher op, whatever the layout and dtype of its tensors."""

import re

import pytest
import torch
from support import assert_equal
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

import tandem

SEED = torch.tensor(5)
STAMP = 13  # numbers of a workspace's stamp
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def contiguous(rows, cols, dtype):
    return torch.randn(rows, 3, cols).to(dtype)


LAYOUTS = {
    "contiguous": contiguous,
    "permuted": lambda rows, cols, dtype: contiguous(rows, cols, dtype).permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "expanded": lambda rows, cols, dtype: contiguous(1, cols, dtype).expand(rows, 3, cols),
    "sliced": lambda rows, cols, dtype: contiguous(rows, 2 * cols, dtype)[..., 1 : 1 + cols],
    "0 rows": lambda rows, cols, dtype: contiguous(0, cols, dtype),
}


def quantized(x):
    return torch.ops.tandem.quantize(x, None, "fp8_e4m3", [True, False, True])


def cases(layout="contiguous", dtype=torch.float32):
    """Arguments of each op; those that are like x have the layout and the dtype."""
    make = LAYOUTS[layout]
    x, y, wide = make(4, 8, dtype), make(4, 8, dtype), make(4, 16, dtype)
    weight, bias = torch.randn(2, 8).to(dtype)
    rows = (torch.rand(x.numel() // 8) + 0.5).to(torch.float64 if dtype == torch.float64 else torch.float32)
    codes = make(4, 8, torch.float32).mul(20).abs().to(torch.uint8)
    if layout == "permuted":
        codes = codes.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    scale = torch.tensor(0.5)
    matrix = torch.randn(4, 8).to(dtype)
    row_codes, row_scale, _, _, _, _, amax = (t.clone() for t in quantized(matrix))
    stamp = torch.zeros(STAMP, dtype=torch.int64)
    flat, flat_y = x.reshape(-1, 8), y.reshape(-1, 8)
    splits = torch.tensor([flat.shape[0] // 2, 0, flat.shape[0] // 4])
    matrices, biases = list(torch.randn(3, 5, 8).to(dtype)), list(torch.randn(3, 5).to(dtype))
    pending, region = torch.tensor([1]), torch.tensor([2])
    description = '{"ops":[{"op":"rms_norm","params":[0]},{"op":"silu"}]}'
    mask = torch.ones(3, 3, dtype=torch.bool)
    heads = (2, 1, 2, True, 0.0, 0.0)
    attended = torch.ops.tandem.attention_forward(x, mask, *heads)
    rows_and_amax, all_of_it = [True, False, True], [True] * 3
    return {
        "activation_backward": [y, x, "gelu", False, all_of_it, "fp8_e5m2", None, all_of_it, "fp8_e4m3", None, all_of_it],
        "activation_forward": [x, bias, "silu", False, [True, True], "fp8_e4m3", None, all_of_it],
        "add_bias": [x, bias, -0.75, y],
        "attention_backward": [y[..., :4], x, *attended, mask, *heads, [True, False]],
        "attention_forward": [x, mask, 2, 1, 2, True, 0.5, 1.5],
        "behind": [x, y],
        "cast_from_codes": [codes, "e5m2", dtype],
        "cast_to_codes": [x, "e4m3", False, SEED],
        "decode": [codes, scale, "fp8_e4m3", False],
        "dequantize": [codes, scale, "fp8_e4m3", False, dtype],
        "dropout": [x, bias, SEED, 0.25, y],
        "dropout_backward": [y, SEED, 0.25, dtype, [True, True], "mxfp8_e5m2", None, all_of_it],
        "grouped_amaxes": [flat, splits, 3],
        "grouped_grad_weight": [flat_y, flat, splits, 3, "fp8_e5m2", "fp8_e4m3"],
        "grouped_grad_bias": [flat_y, splits, rows.reshape(-1).to(dtype), 3],
        "grouped_grad_scales": [flat_y, splits, list(torch.randn(3, flat_y.shape[1]).to(dtype))],
        "grouped_product": [flat, splits, matrices, biases, rows.reshape(-1).to(dtype), True, "fp8_e4m3", [], [], "fp8_e4m3"],
        "l2_norm_backward": [y, x, rows, [True, True]],
        "l2_norm_forward": [x, 1e-5],
        "linear_cross_entropy": [
            x, matrices[0], torch.randint(5, x.shape[:-1]), biases[0], biases[1].abs(), rows.reshape(x.shape[:-1]), "mean", 2, 0.1, 1.5, 0.01, "", 1, 0, [True] * 6,
        ],
        "multiply_codes": [codes, scale, None, "fp8_e4m3", False, True, codes, scale, None, "fp8_e4m3", False, False, dtype],
        "norm_backward": [y, x, weight, bias, rows, rows, y, False, False, dtype, [True] * 5, "mxfp8_e5m2", None, all_of_it, "mxfp8_e4m3", None, all_of_it],
        "norm_forward": [x, y, weight, bias, 1e-5, False, False, [True, True], "mxfp8_e4m3", None, rows_and_amax],
        "pipeline": [x, [], [weight], [], [], [], description],
        "qk_norm_backward": [y, x, weight[:2], bias[:2], 2, 1, 1e-5, True, False, [True] * 3],
        "qk_norm_forward": [x, weight[:2], bias[:2], 2, 1, 1e-5, False, True],
        "quantize": [x, None, "fp8_e4m3", [True, True, True]],
        "record_amax_": [torch.zeros(3, 2), pending.clone(), scale, region, 1, True, 1],
        "refresh_weight_": [[matrix], row_codes, row_scale, None, None, None, None, amax, stamp, "fp8_e4m3", False],
        "region_number": [x],
        "scaled_activation_backward": [y, wide, rows.reshape(x.shape[:-1]), "silu:interleave=4", True, [True, True, True]],
        "scaled_activation_forward": [x, rows.reshape(x.shape[:-1]), "srelu", False],
        "rotary": [x, torch.rand(3, 2), torch.rand(3, 2), 2, 1, 2, 2, 100.0, False, True],
        "say_of_weight_": [stamp, 1],
        "scale_product": [x, scale, scale, dtype],
        "scale_rows": [x, -0.75, dtype, [True, True], "mxfp8_e5m2", None, all_of_it],
        "sum_rows": [x, dtype, "mxfp8_e4m3", None, all_of_it],
        "take_scale_": [torch.ones(2), torch.full((3, 2), 7.0), pending, region, 1, "fp8_e4m3:margin=0:max", 1, 0],
        "weight_codes": [[matrix], row_codes, row_scale, None, None, None, None, amax, stamp, x, "fp8_e4m3", [True, True]],
        "modulate": [x, y[:, :1], y[:, 1:2], 1.0],
        "modulate_scale_backward": [y, x, y[:, :1]],
    }


def without_codes(name, arguments):
    """The same call that asks for no codes, of a gated unit, of RMSNorm and of logits instead of a product."""
    y, x, wide = arguments["activation_backward"][0], arguments["activation_backward"][1], arguments["scaled_activation_backward"][1]
    weight, rows = arguments["norm_backward"][2], arguments["norm_backward"][5]
    plain = {
        "activation_backward": [y, wide, "silu", True, [True] * 3],
        "activation_forward": [wide, None, "gelu", True, [False, True]],
        "dropout_backward": arguments["dropout_backward"][:5],
        "linear_cross_entropy": [x, None, torch.randint(x.shape[-1], x.shape[:-1]), None, weight.abs(), None, "sum", 2, 0.1, 1.5, 0.01, "", 1, 0, [True] * 3 + [False] * 2 + [True]],
        "norm_backward": [y, x, weight, None, None, rows, None, False, True, torch.float32, [True, True, True, False, False]],
        "norm_forward": [x, None, weight, None, 1e-5, True, True, [False, True]],
        "scale_rows": arguments["scale_rows"][:4],
        "sum_rows": arguments["sum_rows"][:2],
    }
    return plain.get(name)


def test_every_op_has_a_case():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tandem::")}
    assert names - {"all_gather_again"} == set(cases()), "all but one that needs a process group: tests/python/test_collectives.py"


def calls(name, layout, dtype):
    """The overloads of an op, each with arguments to try."""
    all_cases = cases(layout, dtype)
    op, plain = getattr(torch.ops.tandem, name), without_codes(name, all_cases)
    if plain is None:
        return [(op.default, all_cases[name])]
    return [(op.codes if "codes" in op.overloads() else op.default, all_cases[name]), (op.default, plain)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(cases()))
def test_contract(name, dtype):
    for layout in LAYOUTS:
        for op, arguments in calls(name, layout, dtype):
            results = torch.library.opcheck(op, tuple(arguments), test_utils=["test_schema", "test_faketensor", "test_autograd_registration"])
            assert set(results.values()) == {"SUCCESS"}, (layout, results)


# Arguments, by place, whose numbers the host decides by: they stay on the CPU.
ON_THE_HOST = {"record_amax_": (1, 3), "refresh_weight_": (8,), "take_scale_": (2, 3), "weight_codes": (8,)}


@pytest.mark.parametrize("name", sorted(set(cases()) - {"say_of_weight_"}))
def test_traced_with_tensors_on_a_gpu(name):
    """What torch.compile does of an op whose operands lie on a GPU, and what the host decides by on the CPU."""
    with FakeTensorMode() as mode:

        def on_a_gpu(t):
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

        for op, arguments in calls(name, "contiguous", torch.float32):
            moved = [
                mode.from_tensor(value) if i in ON_THE_HOST.get(name, ()) else tree_map_only(torch.Tensor, on_a_gpu, value)
                for i, value in enumerate(arguments)
            ]
            for result in tree_leaves(op(*moved)):
                assert result is None or result.device.type == "cuda"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(set(cases()) - {"pipeline", "record_amax_", "refresh_weight_", "region_number", "say_of_weight_", "take_scale_"}))
def test_layout_changes_neither_value_nor_strides(name, dtype):
    for layout in LAYOUTS:
        for op, arguments in calls(name, layout, dtype):
            plain = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in arguments]
            results, expected = (r if isinstance(r, tuple) else (r,) for r in (op(*arguments), op(*plain)))
            for got, wanted in zip(results, expected, strict=True):
                assert got.is_contiguous()
                torch.testing.assert_close(got, wanted, equal_nan=True)


WITHOUT_FORMULA = {"pipeline", "record_amax_", "refresh_weight_", "region_number", "say_of_weight_", "take_scale_", "weight_codes"}


@pytest.mark.parametrize("name", sorted(cases()))
def test_decompositions_are_pure_operations_of_torch(name):
    table = tandem.decompositions()
    for op, arguments in calls(name, "permuted", torch.float32):
        assert (op in table) == (not name.startswith("grouped_") and name not in WITHOUT_FORMULA)
        if op not in table:
            continue
        traced = make_fx(lambda *given, op=op: table[op](*given), tracing_mode="fake")(*arguments)
        for node in traced.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                assert node.target.namespace == "aten" and not node.target._schema.is_mutable
        torch.testing.assert_close(traced(*arguments), op(*arguments))


def test_compiled_float64_with_a_permuted_input(fresh_dynamo):
    box = tandem.ops.Sequential(tandem.ops.GELU(), tandem.ops.MakeExtraOutput(), tandem.ops.Linear(12, 8, dtype=torch.float64))
    x = torch.randn(8, 12, 5, dtype=torch.float64).transpose(1, 2).requires_grad_()
    results = []
    for function in (box, torch.compile(box, backend="aot_eager", fullgraph=True)):
        outputs = function(x)
        results.append([*outputs, *torch.autograd.grad(sum(t.sum() for t in outputs), [x, *box.parameters()])])
    torch.testing.assert_close(results[1], results[0])


def activation_with_codes_of_one(x):
    rows, none = ["fp8_e4m3", None, [True, False, True]], [None, None, [False] * 3]
    return torch.ops.tandem.activation_backward.codes(x, x, "silu", False, [True, True, False], *rows, *none)


def test_codes_that_nobody_asks_for_are_empty_in_compiled_code_too(fresh_dynamo):
    x = torch.randn(4, 32)
    compiled = torch.compile(activation_with_codes_of_one, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(x), activation_with_codes_of_one(x))


REFUSED = {
    "no matrix": (lambda x: torch.ops.tandem.grouped_product(x, torch.tensor([4]), [], [], None, False, None, [], []), "grouped_product: expected a matrix for each group, got none. Pass one at least."),
    "groups below 0": (lambda x: torch.ops.tandem.grouped_amaxes(x, None, -1), "grouped_amaxes: expected 0 to 16777216 groups, got -1. Pass as many as splits has numbers."),
    "too many groups": (lambda x: torch.ops.tandem.grouped_grad_weight(x, x, torch.tensor([4]), 2**40), "grouped_grad_weight: expected 0 to 16777216 groups, got 1099511627776."),
    "no quantizer for the weights": (lambda x: torch.ops.tandem.grouped_product(x, torch.tensor([4]), [x], [], None, True, "fp8_e4m3", [], []), "grouped_linear: expected a quantizer for the other operand too, got none. Pass one for each operand."),
    "no piece": (lambda x: torch.ops.tandem.weight_codes([], None, None, None, None, None, None, x, torch.zeros(STAMP, dtype=torch.int64), x, "fp8_e4m3", [True, False]), "refresh_weight_: expected the pieces of a weight, got none. Pass one at least."),
    "a scale elsewhere": (lambda x: torch.ops.tandem.sum_rows.codes(x, torch.float32, "fp8_e5m2:delayed", torch.ones((), device="meta"), [True, False, False]), "tandem::sum_rows: expected x and codes_given on one device, got cpu and meta."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_no_op_takes_are_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        call(torch.randn(4, 8))
