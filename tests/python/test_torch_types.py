"""Linear, RMSNorm and LayerNorm are torch's to those who look for these; parts of a module are found, and nothing is found twice."""

import copy
import pickle

import pytest
import torch
from support import llama_mlp, randomize
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tandem
import tandem.ops as ops


def test_they_are_modules_of_torch_by_inheritance():
    assert isinstance(ops.Linear(4, 2), nn.Linear) and isinstance(ops.RMSNorm(4), nn.RMSNorm) and isinstance(ops.LayerNorm(4), nn.LayerNorm)
    norm = ops.LayerNorm(4, eps=0.5)
    assert norm.normalized_shape == (4,) and norm.elementwise_affine and norm.eps == 0.5
    assert not isinstance(ops.BasicLinear(4, 2), nn.Linear)  # it has no bias to ask for
    assert isinstance(tandem.Linear(4, 2), nn.Linear) and isinstance(tandem.RMSNorm(4), nn.RMSNorm) and isinstance(tandem.LayerNorm(4), nn.LayerNorm)


class LowRank(nn.Module):
    """As an adapter library takes the place of a torch.nn.Linear: by its attributes."""

    def __init__(self, base):
        super().__init__()
        assert isinstance(base, nn.Linear) and base.weight.shape == (base.out_features, base.in_features)
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"parameters_split": ("a", "b")}])
def test_initialisers_and_adapters_find_modules(options):
    linear, x = tandem.Linear(6, 4, **options), torch.randn(3, 6)
    linear.apply(init_weights)
    assert linear.weight.std() < 0.1 and (linear.bias is None or (linear.bias == 0.5).all())
    adapted = LowRank(linear)
    adapted.base.requires_grad_(False)
    expected = nn.functional.linear(x, linear.weight, linear.bias) + adapted.up(adapted.down(x))
    torch.testing.assert_close(adapted(x), expected)
    with torch.no_grad():
        linear.weight.add_(adapted.up.weight @ adapted.down.weight)  # merged
    torch.testing.assert_close(linear(x), expected)
    assert tandem.ops.Sequential(linear, ops.GELU())(x).shape == (3, 4)


def init_weights(module):
    """As model libraries write it."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.fill_(0.5)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.weight.data.fill_(2.0)


def test_initialisers_of_model_libraries_reach_them():
    model = nn.ModuleDict({"mlp": ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8, bias=False)), "head": ops.Linear(8, 4)})
    model.apply(init_weights)
    assert (model["mlp"][0].weight == 2).all() and (model["head"].bias == 0.5).all()
    assert model["mlp"][1].weight.std() < 0.05


def test_apply_and_train_reach_the_parts_and_modules_does_not():
    block = nn.Sequential(tandem.LayerNormMLP(8, 8), ops.Linear(8, 4))
    applied = []
    assert block.apply(applied.append) is block
    assert [type(module).__name__ for module in applied] == [
        *["LayerNorm", "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias", "LayerNormMLP"],
        *["BasicLinear", "Bias", "Linear", "Sequential"],
    ]
    assert [*block.modules()] == [block, block[0], block[1]], "what shards, adapts or replaces modules takes each for one of a model's"
    block.eval()
    assert not any(module.training for module in applied)


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_no_key_stands_twice(remove_duplicate):
    block = nn.Sequential(ops.Linear(4, 4), tandem.LayerNormLinear(4, 2))
    names = [name for name, _ in block.named_parameters(remove_duplicate=remove_duplicate)]
    assert names == ["0.weight", "0.bias", "1.layer_norm_weight", "1.layer_norm_bias", "1.weight", "1.bias"] == list(block.state_dict())
    assert sum(p.numel() for module in block.modules() for p in module.parameters(recurse=False)) == sum(p.numel() for p in block.parameters())


def test_a_part_reaches_the_parameters_of_its_owner():
    linear = ops.Linear(4, 2)
    weight, bias = linear.basic_ops
    assert [name for name, _ in weight.named_parameters(prefix="part")] == ["part.weight"] and [*bias.parameters()] == [linear.bias]
    assert list(weight.parameters(recurse=False)) == [] and list(weight.state_dict()) == ["weight"]
    weight.load_state_dict({"weight": torch.ones(2, 4)})
    bias.load_state_dict({"bias": torch.ones(2)}, assign=True)
    assert torch.equal(linear.weight, torch.ones(2, 4)) and torch.equal(linear.bias, torch.ones(2)) and bias.bias is linear.bias
    with pytest.raises(KeyError, match="expected parameters of its owner to stay, got del of weight on a part. Parametrize, prune or delete it on"):
        nn.utils.parametrizations.weight_norm(weight)
    with pytest.raises(KeyError, match=r"expected one of the parameters \['weight'\] that the part shares with its owner, got other"):
        weight.register_parameter("other", nn.Parameter(torch.ones(1)))
    assert linear(torch.ones(1, 4)).tolist() == [[5, 5]]
    weight.double(), bias.requires_grad_(False)
    assert linear.weight.dtype == torch.float64 and linear.weight is weight.weight and not linear.bias.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.append(ops.GELU()),
        lambda parts: parts.__setitem__(0, ops.GELU()),
        lambda parts: parts.__delitem__(0),
        lambda parts: parts.insert(0, ops.GELU()),
        lambda parts: parts.extend([ops.GELU()]),
        lambda parts: parts.pop(0),
    ],
)
def test_the_list_of_parts_stays(change):
    linear = ops.Linear(4, 2)
    with pytest.raises(TypeError, match="basic_ops: expected the parts that the module made, got a change of their list. Build ops.FusedOperation"):
        change(linear.basic_ops)
    assert len(linear.basic_ops) == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_have_parts_of_their_own(clone):
    box = randomize(llama_mlp())
    copied = clone(box)
    assert not {id(module) for module in box.modules()} & {id(module) for module in copied.modules()}
    assert isinstance(copied[1], nn.Linear) and copied[1].basic_ops[0].weight is copied[1].weight
    x = torch.randn(3, 16)
    assert torch.equal(box(x), copied(x))


def test_functional_calls_leave_the_parameters_as_they_were():
    box, x = randomize(llama_mlp()), torch.randn(3, 16)
    params = dict(box.named_parameters())
    given = {name: torch.randn_like(param) for name, param in params.items()}
    other = copy.deepcopy(box)
    other.load_state_dict(given)
    torch.testing.assert_close(torch.func.functional_call(box, given, x), other(x))
    assert all(param is params[name] for name, param in box.named_parameters())


def test_adapters_take_the_place_of_linears():
    box = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU())
    linears = [name for name, module in box.named_modules() if isinstance(module, nn.Linear)]
    assert linears == ["1"]
    x = torch.randn(2, 8)
    box(x)
    for name in linears:
        setattr(box, name, LowRank(box.get_submodule(name)))
    box[1].base.requires_grad_(False)
    box(x).sum().backward()
    assert box[1].up.weight.grad is not None and box[1].base.weight.grad is None and box[0].weight.grad is not None


@pytest.mark.parametrize("kind", [ops.Linear, ops.LayerNorm, ops.RMSNorm])
def test_subclasses_of_users_and_replicas(kind):
    class Own(kind):
        pass

    module = Own(*(8, 8) if kind is ops.Linear else (8,))
    x = torch.randn(2, 8)
    expected = module(x)
    assert torch.equal(ops.Sequential(module)(x), expected)
    replica = module._replicate_for_data_parallel()
    for name, param in module.named_parameters():
        setattr(replica, name, param)
    assert torch.equal(replica(x), expected)


def test_traced_exported_and_made_without_values():
    linear, x = ops.Linear(8, 4), torch.randn(3, 8)
    expected = linear(x)
    torch.testing.assert_close(torch.jit.trace(linear, x)(x), expected)
    torch.testing.assert_close(torch.export.export(linear, (x,)).module()(x), expected)
    skipped = nn.utils.skip_init(ops.Linear, 8, 4)
    skipped.load_state_dict(linear.state_dict())
    assert torch.equal(skipped(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_fsdp2_fills_modules_that_were_made_on_the_meta_device(one_rank):
    with torch.device("meta"):
        model = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), tandem.LayerNormLinear(8, 4))
    names = [name for name, _ in model.named_parameters()]
    for module in (*model, model):
        fully_shard(module, mesh=one_rank)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).square().sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    optimizer.step()
    assert model(torch.randn(3, 8)).isfinite().all()
    assert [name for name, _ in model.named_parameters()] == names == list(get_model_state_dict(model))


@pytest.mark.filterwarnings("ignore")
def test_tensor_parallelism_of_torch_takes_it_for_a_linear(one_rank):
    linear, x = ops.Linear(8, 8), torch.randn(3, 8)
    expected = linear(x)
    torch.testing.assert_close(parallelize_module(linear, one_rank, ColwiseParallel())(x), expected)
