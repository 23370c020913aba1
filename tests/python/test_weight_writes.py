"""Every way to change a weight: its codes are never stale."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from weights import made_in

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling

RECIPE = Float8CurrentScaling()
SHAPE = (16, 16)


class Model(nn.Module):
    """A pipeline of one linear, and what some ways of changing its weight need."""

    def __init__(self):
        super().__init__()
        self.box = ops.Sequential(ops.Linear(*SHAPE, bias=False))

    @property
    def linear(self):
        return self.box[0]

    @property
    def weight(self):
        return self.linear.weight

    def forward(self, x):
        return self.box(x)


def fresh():
    return torch.randn(SHAPE)


def quantized_reference(weight, x):
    """The output for this weight, from a pipeline and a region of its own."""
    linear = ops.Linear(*SHAPE, bias=False)
    linear.weight = nn.Parameter(weight.detach().clone())
    with tandem.autocast(recipe=RECIPE):
        return ops.Sequential(linear)(x)


def in_no_grad(change):
    def apply(model):
        with torch.no_grad():
            change(model)

    return apply


def optimizer(kind, **options):
    def apply(model):
        model.weight.grad = fresh()
        kind([model.weight], **options).step()

    return apply


def lbfgs(model):
    target = fresh()

    def closure():
        loss = (model.weight - target).square().sum()
        model.weight.grad = None
        loss.backward()
        return loss

    torch.optim.LBFGS([model.weight], lr=0.5, max_iter=2).step(closure)


def assign_after_freeing(model):
    model.linear.weight = None
    model.linear.weight = nn.Parameter(fresh())


def back_and_forth(model):
    model.to(torch.bfloat16).to(torch.float32)
    with torch.no_grad():
        model.weight.add_(1)


def swapped_by_conversion(model):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.bfloat16).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def to_empty(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.normal_()


def through_meta(model):
    model.to("meta").to_empty(device="cpu")
    nn.init.normal_(model.weight)


def load(assign):
    return lambda model: model.load_state_dict({"box.0.weight": fresh()}, assign=assign)


def resized(model):
    with torch.no_grad():
        storage = model.weight.untyped_storage()
        size = storage.size()
        storage.resize_(0)
        storage.resize_(size)
        model.weight.copy_(fresh())


def shared(model):
    model.share_memory()
    with torch.no_grad():
        model.weight.mul_(2)


def tied_name(model):
    model.other = nn.Linear(*SHAPE, bias=False)
    model.other.weight = model.weight
    with torch.no_grad():
        model.other.weight.mul_(2)


def same_storage_other_counter(model):
    """A parameter over the same memory, whose counter has come to the number that the first one's had."""
    old, number = model.weight, model.weight._version
    new = nn.Parameter(old.data)
    with torch.no_grad():
        while new._version < max(number, 1):
            new.add_(1)
        if number == 0:
            old.add_(1)
    model.linear.weight = new


def frozen_and_written(model):
    model.weight.requires_grad_(False)
    model.weight.mul_(2)
    model.weight.requires_grad_(True)


def ema(model):
    average = copy.deepcopy(model)
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(fresh(), 0.5)
            param.copy_(mean)


def averaged_model(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(Model())
    average.update_parameters(Model())
    model.load_state_dict(average.module.state_dict())


def numpy_write(model):
    model.weight.detach().numpy()[:] = fresh().numpy()


def data_swap_of_written(model):
    held, model.weight.data = model.weight.data, fresh()
    held.mul_(2)
    model.weight.data = held


def fused_kernel(model):
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([model.weight.detach()], [fresh()], [], **options)


def functional_optimizer(model):
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

    _FunctionalSGD([model.weight], lr=0.5, fused=True).step([fresh()])


def version_preserved(model):
    """As FSDP fills the parameters that it has gathered."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(model.weight):
        model.weight.mul_(2)


def pruned(model):
    prune.l1_unstructured(model.linear, "weight", amount=0.5)
    prune.remove(model.linear, "weight")


def unparametrized(model):
    nn.utils.parametrize.register_parametrization(model.linear, "weight", Twice(), unsafe=True)
    nn.utils.parametrize.remove_parametrizations(model.linear, "weight")


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def inference_write(model):
    with torch.inference_mode():
        model.weight.mul_(2)


WAYS = {
    "SGD": optimizer(torch.optim.SGD, lr=0.5, foreach=False),
    "SGD foreach": optimizer(torch.optim.SGD, lr=0.5, foreach=True),
    "SGD fused": optimizer(torch.optim.SGD, lr=0.5, fused=True),
    "SGD momentum": optimizer(torch.optim.SGD, lr=0.5, momentum=0.9),
    "Adam": optimizer(torch.optim.Adam, lr=0.5, foreach=False),
    "Adam foreach": optimizer(torch.optim.Adam, lr=0.5, foreach=True),
    "Adam fused": optimizer(torch.optim.Adam, lr=0.5, fused=True),
    "AdamW": optimizer(torch.optim.AdamW, lr=0.5),
    "AdamW fused": optimizer(torch.optim.AdamW, lr=0.5, fused=True),
    "Adagrad": optimizer(torch.optim.Adagrad, lr=0.5),
    "Adagrad fused": optimizer(torch.optim.Adagrad, lr=0.5, fused=True),
    "RMSprop": optimizer(torch.optim.RMSprop, lr=0.5),
    "Adadelta": optimizer(torch.optim.Adadelta, lr=50.0),
    "Adafactor": optimizer(torch.optim.Adafactor, lr=0.5),
    "NAdam": optimizer(torch.optim.NAdam, lr=0.5),
    "RAdam": optimizer(torch.optim.RAdam, lr=0.5),
    "Adamax": optimizer(torch.optim.Adamax, lr=0.5),
    "ASGD": optimizer(torch.optim.ASGD, lr=0.5),
    "Rprop": optimizer(torch.optim.Rprop, lr=0.5),
    "LBFGS": lbfgs,
    "mul_": in_no_grad(lambda m: m.weight.mul_(2)),
    "copy_": in_no_grad(lambda m: m.weight.copy_(fresh())),
    "fill_": in_no_grad(lambda m: m.weight.fill_(0.25)),
    "zero_": in_no_grad(lambda m: m.weight.zero_()),
    "normal_": in_no_grad(lambda m: m.weight.normal_()),
    "init": lambda m: nn.init.kaiming_uniform_(m.weight, a=math.sqrt(5)),
    "clamp_": in_no_grad(lambda m: m.weight.clamp_(-0.1, 0.1)),
    "index write": in_no_grad(lambda m: m.weight.__setitem__((slice(None), 3), 7.0)),
    "mask write": in_no_grad(lambda m: m.weight.__setitem__(m.weight > 0, -1.0)),
    "view write": in_no_grad(lambda m: m.weight.view(-1)[5:50].mul_(9)),
    "row write": in_no_grad(lambda m: m.weight[2].fill_(5)),
    "transpose write": in_no_grad(lambda m: m.weight.t().add_(1)),
    "detach write": lambda m: m.weight.detach().mul_(2),
    "out=": in_no_grad(lambda m: torch.mul(fresh(), 2, out=m.weight)),
    "foreach": lambda m: torch._foreach_mul_([m.weight.detach()], 2.0),
    "renorm_": in_no_grad(lambda m: m.weight.renorm_(2, 0, 0.1)),
    "vector_to_parameters": lambda m: vector_to_parameters(parameters_to_vector(m.parameters()) * 2, m.parameters()),
    "set_": in_no_grad(lambda m: m.weight.set_(fresh())),
    "data = fresh": lambda m: setattr(m.weight, "data", fresh()),
    "assign": lambda m: setattr(m.linear, "weight", nn.Parameter(fresh())),
    "assign after None": assign_after_freeing,
    "_parameters": lambda m: m.linear._parameters.update(weight=nn.Parameter(fresh())),
    "load_state_dict": load(False),
    "load_state_dict assign": load(True),
    "cast twice": lambda m: m.to(torch.float16).to(torch.float32),  # rounds it; the memory may be the one that was freed
    "cast and write": back_and_forth,
    "to_empty": to_empty,
    "meta": through_meta,
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.linear.weight, nn.Parameter(fresh())),
    "swap on conversion": swapped_by_conversion,
    "storage resize": resized,
    "share_memory": shared,
    "tied name": tied_name,
    "other counter": same_storage_other_counter,
    "transposed view": lambda m: setattr(m.linear, "weight", nn.Parameter(m.weight.detach().t())),
    "requires_grad toggle": frozen_and_written,
    "inference mode": inference_write,
    "EMA": ema,
    "AveragedModel": averaged_model,
    "prune and remove": pruned,
    "parametrize and remove": unparametrized,
    # Writes that leave no trace in autograd.
    "fused kernel": fused_kernel,
    "functional optimizer": functional_optimizer,
    "version preserved": version_preserved,
    "data write": lambda m: m.weight.data.mul_(2),
    "data swap": data_swap_of_written,
    "numpy": numpy_write,
    "dlpack": lambda m: torch.from_dlpack(m.weight.detach()).copy_(fresh()),
}


def check_way(change, region, compiled):
    torch.manual_seed(11)
    model, x = Model(), torch.randn(8, SHAPE[1], requires_grad=True)
    call = torch.compile(model, backend="eager") if compiled else model
    for _ in range(1 if compiled else 3):  # what is freed by one change may be what the next one gets
        with tandem.autocast(recipe=RECIPE) if region else tandem.autocast(enabled=False):

            def step():
                with tandem.autocast(recipe=RECIPE):
                    y = call(x)
                expected = quantized_reference(model.weight, x)
                assert torch.equal(y, expected)
                grad = torch.ones_like(y)
                assert torch.equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])

            step()
            before = model.weight.detach().clone()
            change(model)
            assert model.weight.dtype == torch.float32
            del before
            step()


@pytest.mark.parametrize("region", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_codes_are_never_stale(way, region):
    check_way(WAYS[way], region, compiled=False)


@pytest.mark.parametrize("region", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_codes_are_never_stale(way, region):
    torch._dynamo.reset()
    check_way(WAYS[way], region, compiled=True)


@pytest.mark.parametrize("grad", [False, True])
def test_functional_call_with_fresh_weights(grad):
    box, x = Model().box, torch.randn(8, SHAPE[1])
    with torch.set_grad_enabled(grad), tandem.autocast(recipe=RECIPE):
        for _ in range(20):
            weight = fresh()
            y = torch.func.functional_call(box, {"0.weight": weight}, (x,))
            assert torch.equal(y, quantized_reference(weight, x))
            del weight, y


def test_parametrized_weights_and_weight_norm():
    for register in (
        lambda m: nn.utils.parametrize.register_parametrization(m.linear, "weight", Twice()),
        lambda m: nn.utils.parametrizations.weight_norm(m.linear),
        lambda m: prune.l1_unstructured(m.linear, "weight", amount=0.5),
    ):
        model, x = Model(), torch.randn(8, SHAPE[1])
        register(model)
        with tandem.autocast(recipe=RECIPE):
            for _ in range(3):
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(torch.randn_like(param) * 0.1)
                assert torch.equal(model(x), quantized_reference(model.weight, x))


def test_views_of_a_flat_buffer():
    """As FSDP1 has them: plain tensors, made again from one buffer, which is freed and filled between uses."""
    box, x = Model().box, torch.randn(8, SHAPE[1])
    linear = box[0]
    del linear._parameters["weight"]
    flat = torch.empty(2 * 256)
    linear._parameters["weight"] = None
    with tandem.autocast(recipe=RECIPE):
        for _ in range(4):
            storage = flat.untyped_storage()
            storage.resize_(0)
            storage.resize_(2 * 256 * 4)
            flat.copy_(torch.randn(2 * 256))
            for offset in (0, 256):
                linear._parameters["weight"] = flat[offset : offset + 256].view(SHAPE)
                for _ in range(2):
                    assert torch.equal(box(x), quantized_reference(linear._parameters["weight"], x))


def test_codes_of_views_that_are_made_again_are_found():
    box, x, base = Model().box, torch.randn(8, SHAPE[1]), nn.Parameter(fresh())
    with torch.no_grad(), tandem.autocast(recipe=RECIPE):
        assert made_in(lambda: [torch.func.functional_call(box, {"0.weight": base.detach()}, (x,)) for _ in range(5)]) == (1, 4)
