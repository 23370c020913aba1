"""`tandem.Linear`, `tandem.LayerNorm` and `tandem.RMSNorm`: TransformerEngine's arguments over the ops of the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from experts import product
from ranks import on_ranks
from support import randomize
from torch.testing import assert_close

import tandem
from tandem import ops
from tandem.pipelines.joined import are_adjacent


@pytest.mark.parametrize("split", [None, ("q", "k"), {"q": 4, "k": 1, "v": 1}])
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_its_formula(bias: bool, return_bias: bool, split: Any) -> None:
    module = randomize(tandem.Linear(8, 6, bias=bias, return_bias=return_bias, parameters_split=split))
    x = torch.randn(5, 8, requires_grad=True)
    outputs = module(x)
    y = outputs[0] + (outputs[1] if bias else 0) if return_bias else outputs
    expected = F.linear(x, module.weight, module.bias if bias else None)
    assert_close(y, expected)
    assert not return_bias or bias or outputs[1] is None
    params = [*module.parameters()]
    assert len(params) == (1 if split is None else len(split)) * (1 + bias)
    assert_close(torch.autograd.grad(y.sum(), [x, *params]), torch.autograd.grad(expected.sum(), [x, *params]))
    assert bias or split is not None or module.bias is None


def test_a_bool_in_the_third_place_may_mean_two_things() -> None:
    for value in (False, True):
        with pytest.raises(TypeError, match=f"Linear: expected in_features and out_features before the names of other arguments, got {value} in the third place, which"):
            tandem.Linear(8, 6, value)
    assert tandem.Linear(8, 6, bias=False).bias is None and tandem.Linear(8, 6, sequence_parallel=False).bias is not None


def test_what_is_drawn() -> None:
    drawn = []
    module = tandem.Linear(64, 64, parameters_split=("q", "k"), init_method=lambda weight: drawn.append(torch.nn.init.constant_(weight, 2.0).shape))
    assert drawn == [(32, 64), (32, 64)] and (module.weight == 2).all() and not module.bias.any()
    assert abs(tandem.Linear(256, 256).weight.std().item() - 0.023) < 1e-3


@pytest.mark.parametrize("cls", [tandem.Linear, tandem.LayerNormLinear])
def test_parts_are_those_that_it_was_built_with(cls: Any) -> None:
    module = cls(8, 6, parameters_split=("q", "k"))
    with pytest.raises(ValueError, match=rf"{cls.__name__}: expected parameters_split={{'q': 3, 'k': 3}}, with which it was built, got None. Build another"):
        module.parameters_split = None


def test_it_fuses_with_neighbours_and_is_copied() -> None:
    module = randomize(tandem.LayerNormLinear(8, 12, parameters_split=("gate", "up"), normalization="RMSNorm", bias=False))
    box, x = ops.Sequential(module, ops.SwiGLU(), tandem.Linear(6, 8)), torch.randn(4, 8)
    expected = box[2](ops.SwiGLU()(module(x)))
    assert_close(box(x), expected)
    assert "linear_glu" in box.fusions_made()
    copied = copy.deepcopy(box)
    assert are_adjacent([copied[0].gate_weight, copied[0].up_weight])
    with torch.no_grad():
        module.up_weight.zero_()
    assert_close(copied(x), expected)


def test_state_dicts_of_transformer_engine_load() -> None:
    module = tandem.Linear(8, 6, parameters_split=("q", "k", "v"))
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    assert [*state] == ["q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias"]
    module.load_state_dict({**state, "_extra_state": torch.empty(0, dtype=torch.uint8)})
    assert torch.equal(module.k_weight, state["k_weight"])
    assert [*tandem.transformer_engine_state_dict(module)][:6] == [*state]


@pytest.mark.parametrize("recipe", [tandem.recipe.Float8CurrentScaling(), tandem.recipe.MXFP8BlockScaling(), tandem.recipe.DelayedScaling()])
def test_under_recipes_it_is_the_op(recipe: Any) -> None:
    module, op = (randomize(cls(32, 64), seed=1) for cls in (tandem.Linear, ops.Linear))
    x = torch.randn(32, 32)
    for _ in range(2):
        with tandem.autocast(recipe=recipe):
            assert torch.equal(module(x), op(x))


def test_norms_are_the_ops() -> None:
    x = torch.randn(3, 8)
    assert_close(tandem.LayerNorm(8, 1e-3)(x), F.layer_norm(x, (8,), eps=1e-3))
    assert_close(tandem.RMSNorm(hidden_size=8)(x), F.rms_norm(x, (8,), eps=1e-5))
    assert isinstance(tandem.LayerNorm(8), torch.nn.LayerNorm) and isinstance(tandem.RMSNorm(8), ops.RMSNorm)
    norm = tandem.LayerNorm((2, 4), sequence_parallel=True, params_dtype=torch.bfloat16, zero_centered_gamma=True)
    assert norm.weight.dtype == torch.bfloat16 and not norm.weight.any()
    assert norm.weight.sequence_parallel is norm.bias.sequence_parallel is norm.sequence_parallel is True
    assert tandem.RMSNorm(8, dtype=torch.float64).weight.dtype == torch.float64
    box = ops.Sequential(tandem.RMSNorm(8), tandem.Linear(8, 8))
    box(x)
    assert len(box.explain().split("plan:")) == 2, "one pipeline"


def test_norms_refuse() -> None:
    with pytest.raises(TypeError, match="LayerNorm: expected normalized_shape, or its older name hidden_size, got neither."):
        tandem.LayerNorm()
    with pytest.raises(TypeError, match="RMSNorm: expected normalized_shape, or its older name hidden_size, got both."):
        tandem.RMSNorm(8, hidden_size=8)
    with pytest.raises(TypeError, match="LayerNorm: expected dtype, or its older name params_dtype, got both. Give one of them."):
        tandem.LayerNorm(8, params_dtype=torch.float32, dtype=torch.float32)
    with pytest.raises(ValueError, match="LayerNorm: expected sequence_parallel to be True or False"):
        tandem.LayerNorm(8, sequence_parallel="yes")


def check_over_ranks(rank: int, size: int) -> None:
    torch.manual_seed(0)
    whole = randomize(tandem.Linear(8, 12, parameters_split={"q": 8, "k": 4}))
    x = torch.randn(4, 8, requires_grad=True)
    expected = whole(x)
    column = tandem.Linear(8, 12, parameters_split={"q": 8, "k": 4}, tp_group=dist.group.WORLD, tp_size=size, parallel_mode="column")
    with torch.no_grad():
        for name, param in column.named_parameters():
            param.copy_(whole.get_parameter(name).chunk(size)[rank])
    assert column.q_weight.shape == (4, 8) and column.q_weight.tensor_model_parallel and column.k_bias.partition_dim == 0
    y = column(x)
    assert_close(y, torch.cat([part.chunk(size, -1)[rank] for part in expected.split([8, 4], -1)], -1))
    row = randomize(tandem.Linear(12, 8, tp_group=dist.group.WORLD, tp_size=size, parallel_mode="row"))
    undivided = randomize(tandem.Linear(12, 8))
    with torch.no_grad():
        row.weight.copy_(undivided.weight.chunk(size, 1)[rank])
        row.bias.copy_(undivided.bias)
    z = torch.randn(4, 12)
    assert_close(row(z.chunk(size, 1)[rank]), undivided(z), rtol=1e-4, atol=1e-5)


def test_over_ranks() -> None:
    on_ranks(2, check_over_ranks)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
def test_grouped_linear_is_its_formula(return_bias: bool, single: bool) -> None:
    module = randomize(tandem.GroupedLinear(3, 8, 6, return_bias=return_bias, single_grouped_weight=single, single_grouped_bias=single))
    x, splits = torch.randn(10, 8, requires_grad=True), [4, 0, 5]
    weights = [*module.weight] if single else [module.weight0, module.weight1, module.weight2]
    y = module(x, splits)
    if return_bias:
        y, returned = y
        assert len(returned) == (1 if single else 3) and torch.equal(returned[0], module.bias if single else module.bias0)
    assert_close(y, product(x, splits, {name: param for name, param in module.named_parameters() if not (return_bias and "bias" in name)}))
    y.sum().backward()
    assert_close(x.grad[:9], torch.cat([w.detach().sum(0).expand(n, 8) for n, w in zip(splits, weights, strict=True)]))
    assert torch.equal(module(x, torch.tensor(splits))[0] if return_bias else module(x, torch.tensor(splits)), y)


def test_grouped_linear_writes_into_given_tensors_and_fuses() -> None:
    module = tandem.GroupedLinear(2, 8, 6, bias=False)
    x, out, dgrad = torch.randn(4, 8, requires_grad=True), torch.zeros(4, 6), torch.zeros(4, 8)
    y = module(x, [1, 3], out=out, dgrad_out=dgrad)
    assert y.data_ptr() == out.data_ptr()
    y.sum().backward()
    assert_close(dgrad, x.grad)
    box = ops.Sequential(module, ops.SiLU(), tandem.GroupedLinear(2, 6, 8, bias=False))
    splits = torch.tensor([1, 3])
    assert_close(box(x, splits, splits), box[2](F.silu(module(x, splits)), splits))
    assert "grouped_mlp_activation" in box.fusions_made()
    drawn = tandem.GroupedLinear(2, 64, 64, init_method=lambda weight: torch.nn.init.constant_(weight, 3.0), single_grouped_weight=True)
    assert (drawn.weight == 3).all() and not drawn.bias0.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel_mode": "rows"}, r'GroupedLinear: expected parallel_mode None, "column" or "row", got \'rows\'. Name how ranks share the weight.'),
        ({"tp_size": 2}, "GroupedLinear: expected the ranks as tp_group, as tp_size is 2, got None."),
        ({"ub_overlap_ag": True}, "GroupedLinear: expected ub_overlap_ag=False, got True"),
    ],
)
def test_what_grouped_linear_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tandem.GroupedLinear(2, 8, 6, **arguments)


def test_what_a_call_of_grouped_linear_refuses() -> None:
    with pytest.raises(ValueError, match="GroupedLinear: expected a module whose output is what the next op takes, got one with return_bias=True"):
        ops.Sequential(tandem.GroupedLinear(2, 8, 6, return_bias=True))(torch.randn(2, 8), torch.tensor([1, 1]))


class Ranks:
    """A process group as constructors look at it."""

    def size(self) -> int:
        return 2


def test_grouped_linear_over_ranks_holds_its_share() -> None:
    module = tandem.GroupedLinear(2, 8, 6, tp_group=Ranks(), tp_size=2, parallel_mode="column", bias=False)
    assert module.weight1.shape == (3, 8) and module.weight1.partition_dim == 0
    assert tandem.GroupedLinear(2, 8, 6, tp_group=Ranks(), tp_size=2, parallel_mode="row", bias=False).weight0.shape == (6, 4)
    with pytest.raises(ValueError, match="GroupedLinear: expected bias=False where 2 ranks share the weights, got True. Add biases behind"):
        tandem.GroupedLinear(2, 8, 6, tp_group=Ranks(), tp_size=2, parallel_mode="column")
