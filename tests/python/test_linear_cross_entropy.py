"""The loss without logits: against torch's cross entropy in float64, and against what other implementations of it get wrong."""

import itertools
import json
import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tandem
from tandem import ops, recipe

CLASSES, WIDTH = 37, 12
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def operands(dtype=torch.float32, shape=(3, 5), classes=CLASSES):
    torch.manual_seed(0)
    targets = torch.randint(classes, shape)
    targets.view(-1)[1::4] = -100
    return torch.randn(*shape, WIDTH).to(dtype), torch.randn(classes, WIDTH).to(dtype), targets


def expected(x, weight, targets, *, bias=None, class_weight=None, reduction="mean", label_smoothing=0.0, soft_cap=0.0, z_loss=0.0, ignore_index=-100):
    """By the definition, of torch's own operations."""
    logits = F.linear(x, weight, bias).flatten(0, -2)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    flat = targets.flatten()
    losses = F.cross_entropy(logits, flat, class_weight, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index)
    losses = losses + torch.where(flat == ignore_index, 0, z_loss * logits.logsumexp(1) ** 2)
    if reduction == "none":
        return losses.view(targets.shape)
    kept = flat[flat != ignore_index]
    return losses.sum() / (len(kept) if class_weight is None else class_weight[kept].sum()) if reduction == "mean" else losses.sum()


def gradients(loss, seed, *tensors):
    return torch.autograd.grad(loss, tensors, seed, retain_graph=True)


def check(loss, leaves, want, wide, dtype):
    """A loss and the gradients of its leaves are those of float64."""
    close = TOLERANCES[dtype]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == want.shape
    torch.testing.assert_close(loss.double(), want, rtol=close, atol=close)
    for _ in range(2):  # the second one, of another upstream gradient, after the first has used what forward kept
        seed = torch.randn(want.shape, dtype=torch.float64)  # unequal, where there are several
        for got, right in zip(gradients(loss, seed.to(loss.dtype), *leaves), gradients(want, seed, *wide), strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), right, rtol=close, atol=close * right.abs().max().item())


OPTIONS = [
    {"reduction": reduction, **more}
    for reduction, more in itertools.product(
        ("mean", "sum", "none"), ({}, {"label_smoothing": 0.2}, {"soft_cap": 3.0}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "soft_cap": 2.0, "z_loss": 0.05})
    )
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_of_logits_is_that_of_float64(dtype, options, weighted):
    targets, class_weight = operands()[2], torch.rand(CLASSES) if weighted else None
    wide_rows = torch.randn(3, 5, CLASSES + 3).to(dtype)
    logits, want_of = wide_rows[..., 2:-1], wide_rows.double()[..., 2:-1]  # rows that do not follow each other in memory
    for each in (logits, want_of):
        each.requires_grad_()
    loss = ops.CrossEntropy(class_weight=class_weight, **options)(logits, targets)
    want = expected(want_of, torch.eye(CLASSES, dtype=torch.float64), targets, class_weight=None if class_weight is None else class_weight.double(), **options)
    check(loss, [logits], want, [want_of], dtype)


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0), (70,)], ids=str)
@pytest.mark.parametrize("classes", [1, 2, 37, 70_001])
def test_loss_of_logits_of_any_size(shape, classes):
    logits = torch.randn(*shape, classes, requires_grad=True)
    targets = torch.randint(classes, shape)
    own, torchs = ops.CrossEntropy()(logits, targets), F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    torch.testing.assert_close(own, torchs, equal_nan=True)
    torch.testing.assert_close(gradients(own, None, logits), gradients(torchs, None, logits))


def test_loss_of_logits_that_are_ignored_shared_or_under_autocast():
    logits = torch.randn(4, CLASSES, requires_grad=True)
    ignored = torch.full((4,), -100)
    loss = ops.CrossEntropy()(logits, ignored)
    assert loss.isnan()
    assert not gradients(loss, None, logits)[0].any()
    targets = torch.arange(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own, torchs = ops.CrossEntropy()(logits, targets), F.cross_entropy(logits, targets)
    assert own.dtype == torchs.dtype == torch.float32
    torch.testing.assert_close(own, torchs)
    both = ops.Sequential(ops.MakeExtraOutput(), ops.CrossEntropy(reduction="sum"))
    loss, same = both(logits * 1, targets)
    wanted = F.cross_entropy(logits, targets, reduction="sum") + logits.square().sum()
    torch.testing.assert_close(gradients(loss + same.square().sum(), None, logits), gradients(wanted, None, logits))
    compiled = torch.compile(ops.CrossEntropy(label_smoothing=0.1), fullgraph=True)
    torch.testing.assert_close(compiled(logits, targets), F.cross_entropy(logits, targets, label_smoothing=0.1))
    with torch.no_grad():
        assert not ops.CrossEntropy()(logits, targets).requires_grad


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_an_ignored_row_has_no_gradient_whatever_the_upstream_gradient_is(reduction, backend):
    """As where a mean over no rows is masked behind its division: 0 * inf. Other rows and the weight get torch's inf and NaN."""
    x, head, targets = torch.randn(4, 6, requires_grad=True), torch.randn(10, 6), torch.tensor([3, -100, 1, -100])
    upstream = torch.tensor([1.0, float("inf"), 2.0, float("nan")]) if reduction == "none" else torch.tensor(float("inf"))
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ head.T, targets, reduction=reduction), x, upstream)
    (of_logits,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits := (x @ head.T).detach().requires_grad_(), targets, reduction=reduction), logits, upstream)
    loss, product = ops.Sequential(ops.CrossEntropy(reduction=reduction)), ops.Sequential(ops.LinearCrossEntropy(6, 10, bias=False, reduction=reduction))
    product[0].weight = torch.nn.Parameter(head.clone())
    called = [torch.compile(each, backend=backend) if backend else each for each in (loss, product)]
    (grad,) = torch.autograd.grad(called[0](logits, targets), logits, upstream)
    assert torch.equal(grad.isfinite(), of_logits.isfinite()) and not grad[1].any() and not grad[3].any()
    torch.testing.assert_close(grad[of_logits.isfinite()], of_logits[of_logits.isfinite()])
    (grad,) = torch.autograd.grad(called[1](x, targets), x, upstream)
    assert not grad[1].any() and not grad[3].any() and torch.equal(grad.isfinite(), wanted.isfinite())


def test_large_logits_do_not_cancel():
    """Nor where the formula in torch's operations runs: in float64, and under transforms."""
    torch.manual_seed(0)
    targets = torch.randint(10, (64,))
    for dtype, offset, smoothing in ((torch.float64, 1e12, 0.0), (torch.float64, -1e12, 0.1), (torch.float32, 1e6, 0.0)):
        x, op = torch.randn(64, 10, dtype=dtype) + offset, ops.CrossEntropy(label_smoothing=smoothing)
        losses = [op(x, targets), torch.func.vmap(op)(x.view(8, 8, 10), targets.view(8, 8)).mean()]
        torch.testing.assert_close(losses, [F.cross_entropy(x, targets, label_smoothing=smoothing)] * 2)
    far = torch.tensor([[1e30, 1e30, -1e30, 0.0], [torch.inf, 0.0, 0.0, 0.0], [-torch.inf, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(ops.CrossEntropy(reduction="none")(far, torch.tensor([0, 1, 1])), F.cross_entropy(far, torch.tensor([0, 1, 1]), reduction="none"), equal_nan=True)


def test_class_weights_that_sum_to_zero_give_the_nan_of_torch():
    weights, targets = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 1, -100])
    logits = torch.randn(3, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, targets, weights), logits)
    loss = ops.CrossEntropy(class_weight=weights)(logits, targets)
    (grad,) = torch.autograd.grad(loss, logits)
    assert not loss.isfinite() and torch.equal(grad.isfinite(), wanted.isfinite()) and not grad[2].any()
    head = torch.nn.Parameter(torch.randn(3, 3))
    tandem.linear_cross_entropy(logits, head, targets, weight=weights).backward()
    assert not head.grad.isfinite().any()


def test_errors_of_the_loss_of_logits():
    logits, loss = torch.randn(2, 3), ops.CrossEntropy()
    with pytest.raises(IndexError, match="^cross_entropy: expected targets from 0 to 2, or -100 where a row is ignored, got 3 in row 1. Pass the number of a class for each row."):
        loss(logits, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="cross_entropy: expected 2 targets, one for each row of x .2, 3., got .3."):
        loss(logits, torch.arange(3))
    with pytest.raises(TypeError, match="cross_entropy: expected targets of dtype int64, got float32"):
        loss(logits, torch.rand(2))
    with pytest.raises(ValueError, match="CrossEntropy: expected class_weight of shape .num_classes., a number for each class of this rank, got .2, 3.. Pass one of this size."):
        ops.CrossEntropy(class_weight=logits)
    with pytest.raises(TypeError, match=r"CrossEntropy: expected class_weight to be a tensor with a number for each class, got list. Pass torch.tensor\(...\)."):
        ops.CrossEntropy(class_weight=[1.0, 2.0])
    with pytest.raises(ValueError, match="cross_entropy: expected class_weight of shape .3., a number for each of the classes, got .4."):
        ops.CrossEntropy(class_weight=torch.ones(4))(logits, torch.arange(2))
    with pytest.raises(ValueError, match=r"LinearCrossEntropy: expected class_weight of shape \[37\], a number for each class of this rank, got \[3\]. Pass one of this size."):
        ops.LinearCrossEntropy(WIDTH, CLASSES, class_weight=torch.ones(3))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_float64(dtype, options, weighted):
    x, weight, targets = operands(dtype)
    bias, class_weight = (torch.randn(CLASSES).to(dtype), torch.rand(CLASSES)) if weighted else (None, None)
    leaves = [each.requires_grad_() for each in (x, weight, bias) if each is not None]
    loss = tandem.linear_cross_entropy(x, weight, targets, linear_bias=bias, weight=class_weight, **options)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    want = expected(*wide[:2], targets, bias=wide[2] if weighted else None, class_weight=None if class_weight is None else class_weight.double(), **options)
    check(loss, leaves, want, wide, dtype)


def test_more_rows_than_are_computed_at_once():
    for dtype, ignored in itertools.product((torch.float32, torch.bfloat16), (0.0, 0.6)):
        leaves = [torch.randn(size).to(dtype).requires_grad_() for size in ((1300, 8), (33, 8), (33,))]
        targets = torch.where(torch.rand(1300) < ignored, 7, torch.randint(33, (1300,)))
        loss = tandem.linear_cross_entropy(*leaves[:2], targets, linear_bias=leaves[2], ignore_index=7 if ignored else -100)
        wide = [each.detach().double().requires_grad_() for each in leaves]
        want = expected(*wide[:2], targets, bias=wide[2], ignore_index=7 if ignored else -100)
        check(loss, leaves, want, wide, dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled_code_gives_the_same(reduction, dtype):
    x, weight, targets = operands(dtype)
    x.requires_grad_(), weight.requires_grad_()

    def loss_of(x, weight, targets):
        return tandem.linear_cross_entropy(2 * x, weight, targets, reduction=reduction).sum()

    eager, compiled = loss_of(x, weight, targets), torch.compile(loss_of, fullgraph=True, backend="aot_eager")(x, weight, targets)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients(compiled, None, x, weight), gradients(eager, None, x, weight))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("name", "values"), [("z_loss", (0.1, 0.2, 0.0, 1)), ("label_smoothing", (0.1, 0.2)), ("soft_cap", (2.0, 3.0)), ("ignore_index", (3, 4, None)), ("reduction", ("mean", "none"))])
def test_compiled_code_with_numbers_that_change(backend, dynamic, name, values):
    torch._dynamo.reset()
    x, weight, targets = operands()
    x.requires_grad_(), targets.clamp_min_(0)

    def loss_of(x, value):
        return tandem.linear_cross_entropy(x, weight, targets, **{name: value}).sum()

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=dynamic, backend=backend)
    for value in values:
        got, right = compiled(x, value), loss_of(x, value)
        torch.testing.assert_close(got, right)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(right, x))


def test_defaults_of_torch():
    x, weight, targets = operands()
    flat, rows = targets.flatten(), x.flatten(0, 1)
    torch.testing.assert_close(
        tandem.linear_cross_entropy(rows, weight, flat, ignore_index=None, options=None), F.linear_cross_entropy(rows, weight, flat, ignore_index=None, options=None)
    )


def test_all_rows_are_ignored_or_there_are_none():
    for shape, ignored in (((4,), True), ((0,), False)):
        x, weight = torch.randn(*shape, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH, requires_grad=True)
        targets = torch.full(shape, -100) if ignored else torch.zeros(shape, dtype=torch.int64)
        for reduction, value in (("mean", torch.nan), ("sum", 0.0)):
            loss = tandem.linear_cross_entropy(x, weight, targets, reduction=reduction)
            torch.testing.assert_close(loss, torch.tensor(value), equal_nan=True)
            assert all(torch.equal(each, torch.zeros_like(each)) for each in gradients(loss, None, x, weight))
        losses = tandem.linear_cross_entropy(x, weight, targets, reduction="none")
        assert torch.equal(losses, torch.zeros(shape))
        assert all(torch.equal(each, torch.zeros_like(each)) for each in gradients(losses, torch.ones(shape), x, weight))


def test_frozen_head_tied_head_and_adapter():
    x, weight, targets = operands()
    x.requires_grad_()
    embedding = torch.nn.Embedding(CLASSES, WIDTH)
    low, high = torch.randn(2, WIDTH, requires_grad=True), torch.randn(CLASSES, 2, requires_grad=True)
    frozen = tandem.linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(gradients(frozen, None, x), gradients(expected(x, weight, targets), None, x))
    adapted = tandem.linear_cross_entropy(x, weight + high @ low, targets)
    torch.testing.assert_close(gradients(adapted, None, low, high), gradients(expected(x, weight + high @ low, targets), None, low, high))
    tokens = targets.clamp_min(0)
    tied = tandem.linear_cross_entropy(embedding(tokens), embedding.weight, targets)
    want = expected(embedding(tokens), embedding.weight, targets)
    torch.testing.assert_close(gradients(tied, None, embedding.weight), gradients(want, None, embedding.weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("low", [recipe.Float8CurrentScaling(), recipe.DelayedScaling(), recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling()], ids=lambda low: type(low).__name__)
def test_a_head_in_codes(low):
    """A weight that a recipe holds in codes is what these stand for; under the recipe the product stays in high precision."""
    with tandem.quantized_model_init(recipe=low):
        weight = tandem.Linear(128, 64, bias=False).weight
    x, targets = torch.randn(32, 128, requires_grad=True), torch.randint(64, (32,))
    own, right = tandem.linear_cross_entropy(x, weight, targets), F.cross_entropy(x @ weight.dequantize().T, targets)
    torch.testing.assert_close(own, right)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (own, right)))
    head = ops.LinearCrossEntropy(128, 64)
    with tandem.autocast(recipe=low):
        under = head(x, targets)
    assert torch.equal(under, head(x, targets))


def test_what_is_kept_and_what_is_computed_follow_from_who_asks():
    head = ops.Sequential(ops.RMSNorm(WIDTH), ops.LinearCrossEntropy(WIDTH, CLASSES))
    x, _, targets = operands()
    head(x, targets).backward()
    (plan,) = json.loads(head.explain("json"))["plans"]
    kept = {value["value"].split(".")[-1] for value in plan["kept"] if value["costs_memory"]}
    assert kept == {"inv_rms", "denominator", "unit_grad_x", "unit_grad_weight"}, "neither what the norm made nor logits"
    with torch.no_grad():
        head(x, targets)
    head[1].weight.requires_grad_(False)
    head[0].weight.requires_grad_(False)
    head(x.requires_grad_(), targets).backward()
    assert "unit_grad_weight" not in head.explain().rpartition("plan:")[2]


def test_checkpointed_and_in_evaluation():
    head = ops.LinearCrossEntropy(WIDTH, CLASSES, bias=True, reduction="sum")
    x, _, targets = operands()
    x.requires_grad_()
    want = gradients(expected(x, head.weight, targets, bias=head.bias, reduction="sum"), None, x, head.weight, head.bias)
    again = checkpoint(head, x, targets, use_reentrant=False)
    torch.testing.assert_close(gradients(again, None, x, head.weight, head.bias), want)
    with torch.no_grad():
        torch.testing.assert_close(head.eval()(x, targets), expected(x, head.weight, targets, bias=head.bias, reduction="sum"))


def test_autocast_and_gradient_scaler():
    """The gradients of an upstream gradient of 65,536 are not those of 1 that float16 has rounded to zero."""
    x, weight, targets = operands()
    x.requires_grad_(), weight.requires_grad_()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loss = tandem.linear_cross_entropy(x, weight, targets)
        assert loss.dtype == torch.float32
        got = gradients(loss, torch.tensor(65536.0), x, weight)
        want = gradients(expected(x, weight, targets), torch.tensor(65536.0), x, weight)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())


def test_predictions():
    x, weight, targets = operands()
    loss, predictions = tandem.linear_cross_entropy(x.requires_grad_(), weight, targets, return_predictions=True)
    assert torch.equal(predictions, (x @ weight.T).argmax(-1)), "of ignored rows too"
    assert not predictions.requires_grad
    torch.testing.assert_close(gradients(loss, None, x), gradients(expected(x, weight, targets), None, x))
    head = ops.Sequential(ops.LayerNorm(WIDTH), ops.LinearCrossEntropyWithPredictions(WIDTH, CLASSES))
    loss, predictions = head(x, targets)
    loss.backward()
    assert predictions.shape == targets.shape


def test_layouts():
    x, weight, targets = operands()
    want = expected(x, weight, targets)
    wide = torch.randn(CLASSES, 2 * WIDTH)
    wide[:, ::2] = weight
    for rows in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([x, x], -1)[..., :WIDTH]):
        for matrix in (weight, weight.t().contiguous().t(), wide[:, ::2]):
            torch.testing.assert_close(tandem.linear_cross_entropy(rows, matrix, targets), want)
            torch.testing.assert_close(tandem.linear_cross_entropy(rows, matrix, targets.t().contiguous().t()), want)


def test_class_weights_belong_to_the_module():
    weights = torch.rand(CLASSES)
    head = ops.LinearCrossEntropy(WIDTH, CLASSES, class_weight=weights)
    assert not head.class_weight.requires_grad
    x, _, targets = operands()
    torch.testing.assert_close(head(x, targets), expected(x, head.weight, targets, class_weight=weights))
    assert [*head.state_dict()] == ["weight", "class_weight"]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"target": torch.tensor([[3, 40, 1]])}, IndexError, "linear_cross_entropy: expected targets from 0 to 36, or -100 where a row is ignored, got 40 in row 1. Pass the number of a class"),
        ({"target": torch.tensor([[3, 4]])}, ValueError, "linear_cross_entropy: expected 3 targets, one for each row of x [1, 3, 12], got [1, 2]. Pass the number of a class"),
        ({"target": torch.ones(1, 3)}, TypeError, "linear_cross_entropy: expected targets of dtype int64, got float32. Pass the number of a class for each row."),
        ({"linear_weight": torch.ones(37, 11)}, ValueError, "linear_cross_entropy: expected weight of shape [classes, last dimension of x], got [37, 11] for x [1, 3, 12]. Pass the weight"),
        ({"linear_bias": torch.ones(36)}, ValueError, "linear_cross_entropy: expected bias of shape [37], a number for each of the rows of weight, got [36]. Pass one of this size"),
        ({"weight": torch.ones(36)}, ValueError, "linear_cross_entropy: expected class_weight of shape [37], a number for each of the classes, got [36]. Pass one of this size"),
        ({"linear_weight": torch.ones(37, 12, dtype=torch.complex64)}, TypeError, "linear_cross_entropy: expected weight of dtype float32, bfloat16, float16 or float64, got complex64. Convert it"),
        ({"target": None}, TypeError, "linear_cross_entropy: expected target to be a tensor, got NoneType. Pass the number of a class for each row, int64."),
        ({"linear_weight": [1.0]}, TypeError, "linear_cross_entropy: expected linear_weight to be a tensor, got list. Pass the weight of the head, [num_classes, in_features]."),
        ({"linear_bias": True}, TypeError, "linear_cross_entropy: expected linear_bias to be a tensor, got bool. Pass the bias of the head, [num_classes], or None."),
        ({"options": "chunks"}, TypeError, "linear_cross_entropy: expected options None, as there are never all logits at once, got str. Leave it out."),
        ({"reduction": "median"}, ValueError, "linear_cross_entropy: expected reduction to be"),
        ({"label_smoothing": 1.5}, ValueError, "linear_cross_entropy: expected label_smoothing to be"),
        ({"z_loss": -1.0}, ValueError, "linear_cross_entropy: expected z_loss to be"),
    ],
)
def test_errors(change, error, text):
    given = {"input": torch.ones(1, 3, WIDTH), "linear_weight": torch.ones(CLASSES, WIDTH), "target": torch.tensor([[3, -100, 1]])} | change
    with pytest.raises(error, match=re.escape(text)):
        tandem.linear_cross_entropy(**given)


@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.float64, torch.float64), (torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("wrong", [-5, CLASSES])
def test_a_target_that_is_no_class(x_dtype, dtype, wrong):
    """Where the loss is computed in pieces, too."""
    x, weight, targets = operands()
    targets.view(-1)[7] = wrong
    with pytest.raises(IndexError, match=f"expected targets from 0 to 36, or -100 where a row is ignored, got {wrong} in row 7"):
        tandem.linear_cross_entropy(x.to(x_dtype), weight.to(dtype), targets)


ARGUMENTS = {
    "bias": None, "class_weight": None, "factors": None, "reduction": "sum", "ignore_index": -100, "label_smoothing": 0.0, "soft_cap": 0.0, "z_loss": 0.0,
    "group": "", "group_size": 1, "rank": 0, "output_mask": [True] + [False] * 5,
}  # fmt: skip
NO_CLASS, ONE_CLASS = torch.ones(0, WIDTH), torch.zeros(3, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"reduction": "max"}, ValueError, 'expected reduction "mean", "sum" or "none", got "max". Pass one of these.'),
        ({"factors": torch.ones(15)}, ValueError, "expected factors of shape [3, 5], got [15]. Pass one for each row, or none."),
        ({"group": "0", "group_size": 2, "rank": 2}, ValueError, "expected a rank from 0 to 1, got 2. Pass the number of this process in the group."),
        ({"weight": NO_CLASS, "group": "0", "group_size": 2, "rank": 1}, ValueError, "expected at least one class on each rank of the group, got none on rank 1. Share the classes out among all ranks."),
        ({"weight": NO_CLASS, "targets": ONE_CLASS + 19}, IndexError, "expected targets that are ignored, as there is no class, -100, got 19 in row 0"),
        ({"output_mask": [True] * 5 + [False]}, ValueError, "expected no gradient of a bias that there is not"),
        ({"weight": None, "targets": ONE_CLASS, "output_mask": [True, False, False, True, False, False]}, ValueError, "cross_entropy: expected no gradient of a weight that there is not, got output_mask[3]. Pass the weight."),
        ({"weight": None, "targets": ONE_CLASS, "bias": torch.ones(WIDTH)}, ValueError, "cross_entropy: expected no bias where there is no weight, got a bias of shape [12]. Add it to the logits, or pass the weight."),
        ({"weight": None, "x": torch.tensor(1.0)}, ValueError, "cross_entropy: expected x of at least one dimension, got a number. Pass logits, a number for each class."),
        ({"x": torch.tensor(1.0)}, ValueError, "cross_entropy: expected x of at least one dimension, got a number. Pass a vector, or rows of them."),
    ],
)
def test_errors_of_the_kernel_op(change, error, text):
    x, weight, targets = operands()
    with pytest.raises(error, match=re.escape(text)):
        torch.ops.tandem.linear_cross_entropy(**{"x": x, "weight": weight, "targets": targets, **ARGUMENTS, **change})


@pytest.mark.parametrize("call", [tandem.linear_cross_entropy, torch.compile(tandem.linear_cross_entropy, backend="aot_eager")], ids=["eager", "compiled"])
def test_sums_that_are_larger_than_float16(call):
    """The gradient of a sum over many rows overflows float16 where that of their mean, or of a small share, does not."""
    x, weight, bias = 50 * torch.rand(4096, 16), 0.01 * torch.randn(8, 16), torch.zeros(8)
    targets = torch.zeros(4096, dtype=torch.int64)
    narrow = [each.half().requires_grad_() for each in (x, weight, bias)]
    wide = [each.detach().double().requires_grad_() for each in narrow]
    for reduction, share in (("mean", 64.0), ("sum", 1e-3)):
        loss = call(narrow[0], narrow[1], targets, linear_bias=narrow[2], reduction=reduction) * share
        want = gradients(expected(*wide[:2], targets, bias=wide[2], reduction=reduction) * share, None, *wide)
        for got, right in zip(gradients(loss, None, *narrow), want, strict=True):
            assert got.dtype == torch.float16
            torch.testing.assert_close(got.double(), right, rtol=2e-3, atol=2e-3 * right.abs().max())


def test_a_memory_budget_with_targets_of_one_dimension():
    head = ops.Sequential(ops.RMSNorm(WIDTH), ops.LinearCrossEntropy(WIDTH, CLASSES))
    x, _, targets = operands()
    x.requires_grad_()
    want = gradients(head(x, targets.flatten()), None, x, *head.parameters())
    head.memory_budget = 1 << 20
    got = gradients(head(x, targets.flatten()), None, x, *head.parameters())
    assert all(map(torch.equal, got, want))


def test_the_last_backward_scales_the_gradient_of_the_weight_where_it_lies():
    head, x, targets = ops.Sequential(ops.LinearCrossEntropy(64, 1000)), torch.randn(7, 64, requires_grad=True), torch.arange(7)
    weight, seed, held = head[0].weight, torch.tensor(3.0), []

    def freed(run):
        """What goes to the cache of freed memory, as the kept gradient does where another one takes its place."""
        tandem.empty_cache()
        result = run()
        return tandem.cached_bytes() >= weight.nbytes, result

    loss = head(x, targets)
    is_freed, (first,) = freed(lambda: torch.autograd.grad(loss, weight, seed, retain_graph=True))
    assert not is_freed, "backward may come once more"
    is_freed, (last,) = freed(lambda: torch.autograd.grad(loss, weight, seed))
    assert not is_freed, "it is the gradient itself"
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append((tensor, tensor.clone())) or tensor, lambda tensor: tensor):
        loss = head(x, targets)
    (other,) = torch.autograd.grad(loss, weight, seed)
    assert all(torch.equal(*each) for each in held), "what a hook holds stays as it was"
    assert torch.equal(first, last) and torch.equal(first, other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_transforms_of_torch_func(dtype, reduction):
    x, weight, targets = operands(dtype)
    found = torch.func.grad(lambda x: tandem.linear_cross_entropy(x, weight, targets, reduction=reduction).sum())(x)
    wide = x.double().requires_grad_()
    (right,) = torch.autograd.grad(expected(wide, weight.double(), targets, reduction=reduction).sum(), wide)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=TOLERANCES[dtype], atol=2 * TOLERANCES[dtype] * right.abs().max().item())
