"""On a GPU: the same results as on the CPU, no wait of the host for the device, graphs and streams. `scripts/gpu.sh` runs these; elsewhere they
are skipped. TANDEM_TEST_DEVICE=cpu runs those that need no GPU."""

import contextlib
import copy
import os

import pytest
import torch
from support import OPS, check_against, llama_mlp, randomize
from torch import nn

import tandem
import tandem.ops as ops
from tandem import recipe

DEVICE = torch.device(os.environ.get("TANDEM_TEST_DEVICE", "cuda"))
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="about a GPU")

RECIPES = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "blocks": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


@contextlib.contextmanager
def region(name):
    with tandem.autocast(recipe=RECIPES[name]) if RECIPES[name] else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def no_waiting():
    """Inside, what makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def block(width=256, dtype=torch.bfloat16, device=DEVICE):
    torch.manual_seed(1)
    return llama_mlp(width, 2 * width, device="cpu").to(device, dtype)


def step(model, x, name="none"):
    """Result of `model`, and gradients of x and all parameters."""
    x = x.detach().requires_grad_()
    with region(name):
        y = model(x)
    grads = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
    return [y.detach(), *grads]


def near(actual, expected, bound):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        a, e = a.double().cpu(), e.double().cpu()
        apart = (a - e).abs().max() / e.abs().max().clamp_min(1e-30)
        assert apart < bound, f"result {i} of {len(actual)}: {apart:.3g}"


def as_good_as(actual, on_cpu, exact):
    """Errors are at most twice those of the CPU, whose codes are the same: sums in another order turn some roundings to codes, and NVFP4 rounds
    gradients by chance. To that a few roundings of bfloat16 are added, of the result and, for gradients that cancel, of the largest."""
    exact = [e.double() for e in exact]
    largest = max(e.abs().max() for e in exact)
    for i, (a, c, e) in enumerate(zip(actual, on_cpu, exact, strict=True)):
        error, allowed = (a.double().cpu() - e).abs().max(), 2 * (c.double() - e).abs().max() + 0.02 * e.abs().max() + 1e-3 * largest
        assert error < allowed, f"result {i} of {len(actual)}: {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_an_op_alone(name, dtype):
    make, reference = OPS[name]
    module = randomize(make().to(DEVICE, dtype))
    check_against(module, reference, torch.randn(64, 8, device=DEVICE, dtype=dtype).requires_grad_(), gain=64.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_block_is_as_good_as_on_the_cpu(name, dtype):
    x = torch.randn(128, 256, dtype=dtype)
    on_cpu = block(dtype=dtype, device="cpu")
    exact = step(copy.deepcopy(on_cpu).double(), x.double())
    as_good_as(step(block(dtype=dtype), x.to(DEVICE), name), step(on_cpu, x, name), exact)


MODULES = {
    "Linear": lambda: tandem.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE),
    "LayerNormLinear": lambda: tandem.LayerNormLinear(128, 256, params_dtype=torch.bfloat16, device=DEVICE),
    "LayerNormMLP": lambda: tandem.LayerNormMLP(128, 256, activation="swiglu", params_dtype=torch.bfloat16, device=DEVICE),
    "TransformerLayer": lambda: tandem.TransformerLayer(128, 256, 4, params_dtype=torch.bfloat16, device=DEVICE, hidden_dropout=0.0, attention_dropout=0.0),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_a_module_under_a_recipe(module, name):
    torch.manual_seed(3)
    layer = MODULES[module]()
    on_cpu = copy.deepcopy(layer).cpu()
    x = torch.randn(64, 4, 128, dtype=torch.bfloat16)
    as_good_as(step(layer, x.to(DEVICE), name), step(on_cpu, x, name), step(copy.deepcopy(on_cpu).double(), x.double()))


def test_experts():
    torch.manual_seed(4)
    layer = tandem.GroupedLinear(4, 128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    x, splits = torch.randn(96, 128, device=DEVICE, dtype=torch.bfloat16), [32, 0, 16, 48]
    y = layer(x, splits)
    rows = x.split(splits)
    expected = torch.cat([rows[i] @ getattr(layer, f"weight{i}").T + getattr(layer, f"bias{i}") for i in range(4)])
    near([y.detach()], [expected.detach()], 0.02)
    y.square().mean().backward()
    assert all(p.grad is not None for n, p in layer.named_parameters())


def test_loss_of_a_head():
    torch.manual_seed(5)
    x = torch.randn(192, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(1000, 64, device=DEVICE, requires_grad=True)
    targets = torch.randint(1000, (192,), device=DEVICE)
    targets[::7] = -100
    loss = tandem.linear_cross_entropy(x, weight, targets)
    expected = nn.functional.cross_entropy(x @ weight.T, targets)
    near([loss.detach(), *torch.autograd.grad(loss, [x, weight])], [expected.detach(), *torch.autograd.grad(expected, [x, weight])], 1e-5)


@needs_gpu
def test_loss_of_a_head_needs_no_memory_for_all_logits():
    x = torch.randn(4096, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(32000, (4096,), device=DEVICE)

    def peak(loss):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(loss(), [x, weight])
        return torch.cuda.max_memory_allocated() - before

    eager = peak(lambda: nn.functional.cross_entropy((x @ weight.T).float(), targets))
    assert peak(lambda: tandem.linear_cross_entropy(x, weight, targets)) < 0.7 * eager


@needs_gpu
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])  # whose state the host updates
def test_the_host_does_not_wait(name):
    model, x = block(), torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        step(model, x, name)
    with no_waiting():
        step(model, x, name)


@needs_gpu
def test_codes_are_multiplied_by_the_device():
    model, x = block(), torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    step(model, x, "current")
    if torch.cuda.get_device_capability() >= (8, 9):
        assert "scaled_mm" in tandem.explain(model)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", RECIPES)
def test_compiled_training(name, mode, fresh_dynamo):
    """Three steps of an optimizer: codes of weights that are kept must not be those of the step before."""
    if mode and DEVICE.type != "cuda":
        pytest.skip("about a GPU")
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    results = []
    for compiled in (False, True):
        model = block()
        call = torch.compile(model, mode=mode) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 10.0)
        for _ in range(5):
            with region(name):
                loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach().clone())
    near(results[5:], results[:5], 0.02 if name != "nvfp4" else 0.1)
    assert results[4] < 0.9 * results[0]


@needs_gpu
@pytest.mark.parametrize("name", ["none", "current", "blocks", "mxfp8", "nvfp4"])
def test_a_recorded_graph_reads_weights_of_today(name):
    model, x = block(), torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, x, name)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(model, x, name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    graph.replay()
    near(recorded, step(model, x, name), 1e-2 if name != "nvfp4" else 0.5)


@needs_gpu
def test_a_stream_that_is_not_the_default():
    model, x = block(), torch.randn(4096, 256, device=DEVICE, dtype=torch.bfloat16)
    expected = step(model, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = [step(model, x) for _ in range(10)]
    torch.cuda.current_stream().wait_stream(stream)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_autocast_of_torch():
    model, x = block(dtype=torch.float32), torch.randn(128, 256, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    near([y.detach()], [model(x).detach()], 0.03)


def test_dropout_draws_on_the_device():
    model = ops.Sequential(ops.Linear(64, 64, device=DEVICE), ops.Dropout(0.5))
    x = torch.randn(512, 64, device=DEVICE, requires_grad=True)
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    assert 0.45 < (first == 0).float().mean() < 0.55
    grad = torch.autograd.grad(first.sum(), x)[0]
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_weights_in_codes(name):
    with tandem.quantized_model_init(recipe=RECIPES[name]):
        model = tandem.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(64, 128, device=DEVICE, dtype=torch.bfloat16)
    with region(name):
        y = model(x)
    near([y.detach()], [(x @ model.weight.dequantize().to(x.dtype).T).detach()], 0.3)
    loaded = tandem.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    loaded.load_state_dict({k: v.dequantize() if isinstance(v, tandem.QuantizedTensor) else v for k, v in model.state_dict().items()})


def decoder(dtype=torch.float32):
    from benchmarks.backend import Decoder  # which also registers an operator

    torch.manual_seed(6)
    model = Decoder().to(DEVICE, dtype)
    ids = torch.randint(2048, (2, 128), device=DEVICE)

    def loss(call):
        return nn.functional.cross_entropy(call(ids).flatten(0, 1).float(), ids.flatten())

    return model, loss


def gradients(model, loss, call):
    value = loss(call)
    return [value.detach(), *torch.autograd.grad(value, list(model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backend_in_a_decoder(dtype, fresh_dynamo):
    model, loss = decoder(dtype)
    expected = gradients(model, loss, model)
    compiled = torch.compile(model, backend="tandem")
    near(gradients(model, loss, compiled), expected, 1e-5 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "none"])
def test_the_backend_under_a_recipe(name, fresh_dynamo):
    model, loss = decoder(torch.bfloat16)
    expected = gradients(model, loss, model)
    got = gradients(model, loss, tandem.compile(model, recipe=RECIPES[name], require=1.0))
    near(got[:1], expected[:1], 0.05)
    assert all(g.isfinite().all() for g in got)
    errors = [(g - e).double().norm() / e.double().norm().clamp_min(1e-30) for g, e in zip(got[1:], expected[1:], strict=True)]
    assert 1e-3 < sum(errors) / len(errors) < 0.7, "codes are multiplied"


@needs_gpu
def test_the_backend_without_a_recipe_leaves_a_model_to_torch(fresh_dynamo):
    model, loss = decoder()
    compiled = torch.compile(model, backend="tandem")
    loss(compiled)
    assert "its x is on cuda, where pipelines run operations of torch, and no recipe quantizes it" in tandem.explain(model)


def test_attention_with_a_cache():
    torch.manual_seed(7)
    layer = tandem.TransformerLayer(128, 256, 4, layer_number=1, params_dtype=torch.float32, device=DEVICE, self_attn_mask_type="causal").eval()
    x = torch.randn(9, 2, 128, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        cache = tandem.InferenceParams(2, 16)
        pieces = []
        for piece in (x[:4], x[4:5], x[5:]):
            pieces.append(layer(piece, inference_params=cache))
            cache.sequence_len_offset += len(piece)
    near([torch.cat(pieces)], [whole], 1e-5)
