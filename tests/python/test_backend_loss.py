"""The backend of torch.compile: losses whose logits nobody needs memory for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tandem

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Head(nn.Module):
    """An embedding, a norm and a head, whose loss is written as `form` says."""

    def __init__(self, form):
        super().__init__()
        self.embedding, self.norm, self.head, self.form = nn.Embedding(50, 16), nn.RMSNorm(16), nn.Linear(16, 50, bias=False), form

    def forward(self, ids, labels):
        return self.form(self.head(self.norm(self.embedding(ids))), labels)


LOSSES = {
    "flat": lambda logits, labels: F.cross_entropy(logits.view(-1, 50), labels.view(-1)),
    "as transformers write it": lambda logits, labels: F.cross_entropy(logits.float().view(-1, 50), F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1), ignore_index=-100),
    "cut behind the product": lambda logits, labels: F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 50), labels[..., 1:].contiguous().view(-1), reduction="sum"),
    "cut and laid flat": lambda logits, labels: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1),
    "by row": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").square().mean(),
    "capped, as Gemma writes it": lambda logits, labels: F.cross_entropy((torch.tanh(logits / 2.5) * 2.5).float().view(-1, 50), labels.view(-1)),
    "of classes with weights": lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.linspace(0.5, 2, 50)),
}


@pytest.mark.parametrize("form", LOSSES)
def test_a_loss_takes_no_memory_for_logits(form):
    model, ids = Head(LOSSES[form]), torch.randint(50, (3, 7))
    labels = ids.masked_fill(torch.rand(3, 7) < 0.3, -100)
    compiled = tandem.compile(model, fullgraph=True)
    loss, want = compiled(ids, labels), model(ids, labels)
    assert "LinearCrossEntropy" in tandem.explain(compiled)
    torch.testing.assert_close(loss, want)
    parameters = [*model.parameters()]
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(want, parameters))


def test_logits_that_the_model_returns():
    model, ids = Head(lambda logits, labels: (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)), torch.randint(50, (3, 7))
    compiled = tandem.compile(model)
    loss, logits = compiled(ids, ids)
    text = tandem.explain(compiled)
    assert "LinearCrossEntropy" not in text
    assert "others read its logits, which then take memory and time; where they are results of the model, options={'logits': False} leaves them out" in text
    torch.testing.assert_close((loss, logits), model(ids, ids))
    without = tandem.compile(model, logits=False)
    (own, none), want = without(ids, ids), model(ids, ids)[0]
    assert none is None and "LinearCrossEntropy" in tandem.explain(without)
    torch.testing.assert_close(own, want)
    with pytest.raises(TypeError, match=r"compile: expected logits to be True or False, got 'no'. Pass a bool."):
        tandem.compile(model, logits="no")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_logits_that_are_overwritten_after_their_loss(reduction, weighted):
    weight = torch.rand(50) if weighted else None

    def form(logits, labels):
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, reduction=reduction)
        logits.data.mul_(2)
        return loss.mean(), logits

    model, ids = Head(form), torch.randint(50, (3, 7))
    loss, logits = tandem.compile(model)(ids, ids)
    logits.data.zero_()
    loss.backward()
    got = model.head.weight.grad.clone()
    model.zero_grad()
    model(ids, ids)[0].backward()
    torch.testing.assert_close(got, model.head.weight.grad)


def test_capped_logits():
    def form(logits, labels, outer=3.0):
        capped = torch.tanh(logits / 3) * outer
        return F.cross_entropy(capped.flatten(0, 1), labels.flatten()), capped

    model, ids = Head(form), torch.randint(50, (3, 7))
    compiled = tandem.compile(model, logits=False)
    (loss, none), want = compiled(ids, ids), model(ids, ids)[0]
    assert none is None and "LinearCrossEntropy" in tandem.explain(compiled)
    torch.testing.assert_close(loss, want)
    other = Head(lambda logits, labels: form(logits, labels, 2.0)[0])
    compiled = tandem.compile(other)
    torch.testing.assert_close(compiled(ids, ids), other(ids, ids))
    assert "its logits are not capped as cap tanh(logits / cap)" in tandem.explain(compiled)


def test_losses_that_are_left():
    targets = torch.rand(21, 50).softmax(1)
    model, ids = Head(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), targets)), torch.randint(50, (3, 7))
    compiled = tandem.compile(model)
    torch.testing.assert_close(compiled(ids, ids), model(ids, ids))
    assert "its targets are torch.float32, not numbers of classes" in tandem.explain(compiled)
    narrow = Head(LOSSES["flat"]).bfloat16()
    compiled = tandem.compile(narrow)
    torch.testing.assert_close(compiled(ids, ids), narrow(ids, ids))
    assert "its result is torch.bfloat16, that of the op torch.float32" in tandem.explain(compiled)
    wide = Head(LOSSES["as transformers write it"]).bfloat16()
    compiled = tandem.compile(wide)
    torch.testing.assert_close(compiled(ids, ids), wide(ids, ids), rtol=2e-2, atol=2e-2)
    assert "LinearCrossEntropy" in tandem.explain(compiled)


def test_dimensions_of_logits():
    """Of three, torch takes the middle one as classes, also where that has as many numbers as the last one."""
    head, x = nn.Linear(16, 7), torch.randn(7, 7, 16)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, x, targets):
            return F.cross_entropy(self.head(x), targets)

    for given, targets in ((x[0, 0], torch.tensor(3)), (x[0], torch.arange(7)), (x, torch.randint(7, (7, 7))), (x[:, :5], torch.randint(5, (7, 7)))):
        compiled = tandem.compile(Loss())
        results = [loss(given, targets) for loss in (compiled, Loss())]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result, head.weight) for result in results), rtol=1e-4, atol=1e-5)
    text = tandem.explain(compiled)
    assert text.count(": LinearCrossEntropy") == 2
    assert text.count("left: cross_entropy of a product of the model: return F.cross_entropy(self.head(x), targets): its classes are not the last dimension of its logits") == 2


CUTS = {
    "a size that is a symbol": lambda x, weight: F.linear(x, weight)[:, : x.shape[1] - 1],
    "operands by name": lambda x, weight: F.linear(input=x, weight=weight)[:, :-1],
    "a bias first": lambda x, weight: torch.addmm(weight.new_zeros(7), x.flatten(0, 1), weight.t())[:-2],
    "three dots for no dimension": lambda x, weight: F.linear(x, weight)[:, :-1, :6, ...],
    "x is the weight": lambda x, weight: F.linear(weight[:, :7], weight[:, :7])[:-1],
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_behind_a_product(cut, dynamic):
    weight = nn.Parameter(torch.randn(7, 8))

    def loss(x):
        logits = CUTS[cut](x, weight).flatten(0, -2)
        return F.cross_entropy(logits, torch.arange(len(logits)) % 6)

    compiled = tandem.compile(loss, dynamic=dynamic)
    for length in (5, 6, 9):
        x = torch.randn(2, length, 8)
        results = [compiled(x), loss(x)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result, weight) for result in results), rtol=1e-4, atol=1e-5)


def test_a_cut_by_a_symbol_is_made_before_the_product(monkeypatch):
    head, texts = nn.Linear(8, 7), []
    monkeypatch.setattr("tandem.backend.note", lambda graph, report: texts.append(report.text()))
    compiled = tandem.compile(lambda x, ids: F.cross_entropy(head(x)[:, : x.shape[1] - 1].flatten(0, 1), ids[:, 1:].flatten()), dynamic=True)
    compiled(torch.randn(2, 5, 8), torch.randint(7, (2, 5)))
    assert "pipeline 0: LinearCrossEntropy" in texts[0]


@pytest.mark.parametrize("reads", [True, False])
def test_logits_of_a_part_that_is_computed_again(reads):
    """Its caller is no user of the model: what it reads stays."""
    head, x, targets = nn.Linear(8, 7), torch.randn(2, 5, 8, requires_grad=True), torch.randint(7, (2, 5))

    def part(x):
        logits = head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    def model(x):
        loss, logits = checkpoint(part, x, use_reentrant=False)
        return loss + logits.square().mean() if reads else loss

    compiled = tandem.compile(model, logits=False)
    results = [compiled(x), model(x)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(result, (x, head.weight)) for result in results), rtol=1e-4, atol=1e-5)


def test_logits_that_are_read_behind_a_graph_break():
    head, x, targets = nn.Linear(8, 7), torch.randn(2, 5, 8), torch.randint(7, (2, 5))

    def model(x):
        logits = head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch._dynamo.graph_break()
        return loss, (logits.argmax(-1) == targets).sum()

    torch.testing.assert_close(tandem.compile(model, logits=False)(x), model(x))
