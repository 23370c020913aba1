"""Unchanged models of `transformers`, compiled by the backend: loss and all gradients against eager."""

import copy

import pytest
import torch
import transformers
from families import DECODERS, FAMILIES, made
from torch._dynamo.utils import counters

import tandem
from tandem import recipe
from tandem.backend import report

RECIPES = [recipe.Float8CurrentScaling, recipe.DelayedScaling, recipe.Float8BlockScaling, recipe.MXFP8BlockScaling, recipe.NVFP4BlockScaling]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


def step(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach()


def largest(model):
    return max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)


def graphs(backend, model, inputs, **options):
    torch._dynamo.reset()
    counters.clear()
    loss = step(torch.compile(model, backend=backend, options=options or None), inputs)
    return loss, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def farthest(model, other):
    """The largest difference of gradients, each relative to the largest element of its parameter's gradient, or a thousandth of the model's."""
    pairs = [(p.grad.double(), q.grad.double()) for p, q in zip(model.parameters(), other.parameters(), strict=True) if q.grad is not None]
    return max(((p - q).abs().max() / max(q.abs().max(), 1e-3 * largest(other))).item() for p, q in pairs)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_eager(name):
    model, inputs = made(name)
    own, other = copy.deepcopy(model), copy.deepcopy(model)
    expected = step(model, inputs)
    before = {report_.number for report_ in [graph._tandem_report for graph in report._graphs]}
    loss, *made_by_own = graphs("tandem", own, inputs)
    reports = [each for graph in report._graphs if (each := graph._tandem_report).number not in before]
    _, *made_by_eager = graphs("eager", other, inputs)
    products, inside = sum(each.products for each in reports), sum(each.products_inside for each in reports)
    left = sorted({f"{row} ({reason})" for each in reports for row, _, reason in each.left if row != "sum"})
    worst = farthest(own, model)
    print(f"\n{name}: loss {expected:.6f}, off by {abs(loss - expected):.1e}, gradients by {worst:.1e}; {inside} of {products} products in {sum(len(each.pieces) for each in reports)} pipelines; left: {', '.join(left) or 'nothing'}", end="")
    assert abs(loss - expected) < 2e-6 * max(1.0, abs(expected))
    if worst >= 2e-5:  # the model amplifies rounding: neither is to be farther from float64 than the other by much
        wide = copy.deepcopy(model).double()
        step(wide, {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value for key, value in inputs.items()})
        assert farthest(own, wide) < 2 * farthest(model, wide)
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in own.parameters()]
    assert made_by_own == made_by_eager, "graphs and breaks"
    assert inside >= 0.9 * products if name in DECODERS else inside > 0
    assert [*own.state_dict()] == [*model.state_dict()]


@pytest.mark.parametrize("low", RECIPES, ids=lambda low: low.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_recipes_run(name, low):
    model, inputs = made(name)
    expected = step(copy.deepcopy(model), inputs)
    loss = step(tandem.compile(model, recipe=low()), inputs)
    assert loss.isfinite()
    assert name not in DECODERS or abs(loss - expected) < 0.1 * expected  # others amplify what random values lose
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "layers"), [("Mixtral", 2), ("Qwen 3 MoE", 2), ("DeepSeek V3", 1)])
def test_experts(name, layers, dtype):
    """Those of each layer are one pipeline, by what transformers chooses where nothing is said. transformers calls another product in each dtype."""
    model, inputs = made(name)
    own = tandem.compile(model.to(dtype), verify=True, require=1.0)
    step(own, inputs)
    assert tandem.explain(own).count(": GroupedLinear, SwiGLU, GroupedLinear;") == layers


def test_generation_with_a_cache():
    model, inputs = made("Llama")
    own = copy.deepcopy(model)
    own.compile(backend="tandem")
    for options in ({}, {"cache_implementation": "static"}):
        results = [each.eval().generate(inputs["input_ids"], max_new_tokens=12, do_sample=False, **options) for each in (model, own)]
        assert torch.equal(*results)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model, inputs = made("Llama")
    own = copy.deepcopy(model)
    own.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    compiled = tandem.compile(own)
    torch.testing.assert_close(step(compiled, inputs), step(model, inputs))
    for p, q in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)
    assert tandem.explain(compiled).count("SwiGLU") >= 2


def test_saving(tmp_path):
    model, inputs = made("Llama")
    model.compile(backend="tandem")
    step(model, inputs)
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def adapted(model):
    import peft

    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_lora():
    """Adapters of peft, added before and after the model is compiled, and merged."""
    model, inputs = made("Llama")
    own = copy.deepcopy(model)
    own.compile(backend="tandem")
    step(own, inputs)
    own.zero_grad()
    model, own = adapted(model), adapted(own)
    torch.testing.assert_close(step(own, inputs), step(model, inputs))
    for (name, p), q in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    own = tandem.compile(own.merge_and_unload())
    torch.testing.assert_close(own(**inputs).loss, model(**inputs).loss)


def test_lora_of_experts():
    """Adapters of stacked weights, which peft computes outside of what Dynamo traces."""
    import peft

    model, inputs = made("Mixtral")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    own = copy.deepcopy(model)
    own.compile(backend="tandem", options={"verify": True})
    before = {*report._graphs}
    torch.testing.assert_close(step(own, inputs), step(model, inputs))
    assert any("GroupedLinear" in piece.ops for graph in {*report._graphs} - before for piece in graph._tandem_report.pieces)
    for (name, p), q in zip(model.named_parameters(), own.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_trainer(tmp_path):
    """`Trainer` calls a model that is compiled in place as ever."""
    losses = []
    for is_compiled in (False, True):
        model, inputs = made("Llama")
        if is_compiled:
            model.compile(backend="tandem")
        rows = [{name: each[at] for name, each in inputs.items()} for at in range(2)] * 4
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True, logging_steps=1, seed=0, disable_tqdm=True)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision
    model, inputs = made("Llama")
    own = copy.deepcopy(model)
    own.compile(backend="tandem")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    prepared, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    loss = prepared(**inputs).loss
    accelerator.backward(loss)
    optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        wanted = step(model, inputs)
    torch.testing.assert_close(loss.detach().float(), wanted.float(), **({} if precision == "no" else {"rtol": 1e-2, "atol": 0}))
