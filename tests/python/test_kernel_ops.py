"""Every kernel op of the library keeps the contract of a dispatcher op."""

import pytest
import torch

import tandem  # noqa: F401  (registers the ops)

X, Y = torch.randn(4, 8), torch.randn(4, 8)
WIDE = torch.randn(4, 16)
WEIGHT, BIAS = torch.randn(8), torch.randn(8)
SEED = torch.tensor(5)
ROWS = torch.rand(4) + 0.5
STAMP = 5  # numbers of a workspace's stamp


def quantized(x):
    return torch.ops.tandem.quantize_current(x, "e4m3", 0.0, False)


def cases():
    codes, scale, amax = (t.clone() for t in quantized(X))
    stamp = torch.zeros(STAMP, dtype=torch.int64)
    description = '{"ops":[{"op":"rms_norm","params":[0]},{"op":"silu"}]}'
    return {
        "activation_backward": [Y, X, "gelu", [True, True, True]],
        "activation_forward": [X, BIAS, "silu", [True, True]],
        "add_bias": [X, BIAS, Y],
        "decode": [codes, "e4m3"],
        "dequantize": [codes, scale, "e4m3", torch.float32],
        "draw_seed": [X],
        "dropout": [X, SEED, 0.25],
        "glu_backward": [Y, WIDE, "silu", [True, True, True]],
        "glu_forward": [WIDE, None, "gelu", [False, True]],
        "layer_norm_backward": [Y, X, WEIGHT, BIAS, ROWS, ROWS, Y, False, [True, True, True, True]],
        "layer_norm_forward": [X, WEIGHT, BIAS, 1e-5, False],
        "layer_norm_quantize": [X, WEIGHT, BIAS, 1e-5, False, "e4m3", 0.0, False, True],
        "pipeline": [X, [], [WEIGHT], [], [], [], description],
        "quantize_current": [X, "e4m3", 0.0, False],
        "refresh_weight_": [X, codes, scale, amax, stamp, "e4m3", 0.0, False, False],
        "rms_norm_backward": [Y, X, WEIGHT, ROWS, None, False, [True, True, True]],
        "rms_norm_forward": [X, WEIGHT, 1e-5, True],
        "rms_norm_quantize": [X, WEIGHT, 1e-5, False, "e5m2", 0.0, True, True],
        "scale_product": [X, scale, scale, torch.float32],
        "sum_rows": [X, torch.float32],
    }


def test_every_op_has_a_case():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tandem::")}
    assert names == set(cases())


@pytest.mark.parametrize("name", sorted(cases()))
def test_contract(name):
    op = getattr(torch.ops.tandem, name).default
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    if torch.Tag.nondeterministic_seeded in op.tags:
        tests.remove("test_schema")  # which runs an op twice and wants the same
    results = torch.library.opcheck(op, tuple(cases()[name]), test_utils=tests)
    assert set(results.values()) == {"SUCCESS"}, results
