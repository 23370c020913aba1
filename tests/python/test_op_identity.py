"""What compiled code knows an op in Python by: which object it is and its attributes, or what its class declares in `fuser_options`."""

import collections
import copy
import dataclasses
import enum
import gc
import pickle
import threading

import pytest
import torch
import torch._inductor.config
from support import AsksFunctions
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

import tandem.ops as ops
from tandem.user_ops.identity import identity

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTOR = 1.0


class Times(ops.BasicOperation):
    """y = x scale, with a scale that a subclass may compute."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale

    def factor(self):
        return self.scale * FACTOR

    def op_forward(self, ctx, input_, **_):
        return input_ * self.factor()

    def op_backward(self, ctx, grad_output):
        return grad_output * self.factor(), ()


class Declared(Times):
    fuser_options = ("scale",)


class Inherits(Declared):
    """Has a declaration of its base only, which knows nothing of `shift`."""

    def __init__(self, scale, shift):
        super().__init__(scale)
        self.shift = shift

    def factor(self):
        return self.scale + self.shift


def compiled(box):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(box, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize(
    ("made", "factors", "compilations"),
    [
        ([Times(2.0), Times(2.0), Times(3.0)], [2, 2, 3], 3),
        ([Declared(2.0), Declared(2.0), Declared(3.0), Declared(2.0)], [2, 2, 3, 2], 2),
        ([Inherits(2.0, 1.0), Inherits(2.0, 5.0)], [3, 7], 2),
    ],
    ids=["nothing declared", "declared", "declared by a base"],
)
def test_equal_ops_share_compiled_code_where_their_class_declares(made, factors, compilations):
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.ones(2, requires_grad=True)
    for op, factor in zip(made, factors, strict=True):
        box = ops.Sequential(op)
        box.compile(backend=counter, fullgraph=True)
        y = box(x)
        assert torch.equal(y, factor * torch.ones(2)) and torch.equal(torch.autograd.grad(y.sum(), x)[0], factor * torch.ones(2))
    assert counter.frame_count == compilations


class Level(enum.IntFlag):
    LOW = 8


VALUES = [
    1, True, 1.0, "1", None, 1j, [1], (1,), {1}, frozenset([1]), {"a": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, b"1", 0.0, -0.0, 10**5000, [[1], 2], [[1, 2]],
    torch.float32, torch.float64, torch.device("cpu"), torch.Size([1]), Level(16), Level(32), Level.LOW, float("nan"), [],
]  # fmt: skip


def test_plain_values_are_told_apart():
    found = [identity(Declared(value)) for value in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [identity(Declared(copy.deepcopy(value))) for value in VALUES]
    assert identity(Declared()) != identity(Declared().eval())
    other = type("Declared", (Declared,), {"fuser_options": ("scale",)})  # a class of the same name is another
    assert identity(Declared()) != identity(other())


def test_options_of_the_library_are_declared():
    quantized = [identity(ops.SwiGLU(cache_quantized_input=True, glu_interleave_size=size)) for size in (4, 4, 8)]
    assert quantized[0] == quantized[1] != quantized[2]
    own = type("Own", (ops.SwiGLU,), {"fuser_options": (), "op_forward": ops.SwiGLU.op_forward})
    assert identity(own(glu_interleave_size=4)) == identity(own(glu_interleave_size=4)) != identity(own(glu_interleave_size=8))


@dataclasses.dataclass(slots=True)
class Config:
    k: float


class Further(Config):
    """Has an attribute that is no field."""

    def __init__(self, k, more):
        super().__init__(k)
        self.more = more


class Holding(Times):
    """Has something of each sort."""

    def __init__(self):
        super().__init__()
        self.items, self.nested, self.queue = [1.0, max], {"a": (1, [2.0])}, collections.deque([1])
        self.lists = collections.defaultdict(list)
        self.config, self.further, self.object = Config(2.0), Further(2.0, 1), object()
        self.inner = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Identity())
        self.register_buffer("b", None)


CHANGES = {
    "an attribute": lambda op: setattr(op, "scale", 3.0),
    "another type": lambda op: setattr(op, "scale", 2),
    "a new attribute": lambda op: setattr(op, "additional", 1),
    "an attribute that goes": lambda op: delattr(op, "scale"),
    "a list": lambda op: op.items.append(1),
    "a function in a list": lambda op: op.items.__setitem__(1, min),
    "a list in a dict": lambda op: op.nested["a"][1].append(1),
    "a queue": lambda op: op.queue.append(1),
    "the limit of a queue": lambda op: setattr(op, "queue", collections.deque([1], maxlen=1)),
    "the factory of a dict": lambda op: setattr(op.lists, "default_factory", set),
    "a dataclass": lambda op: setattr(op.config, "k", 3.0),
    "an attribute of a dataclass that is no field": lambda op: setattr(op, "further", Further(2.0, 5)),
    "an object": lambda op: setattr(op, "object", object()),
    "a method of the instance": lambda op: setattr(op, "factor", lambda: 5.0),
    "training": lambda op: op.eval(),
    "an attribute of an inner module": lambda op: setattr(op.inner[0], "p", 0.25),
    "training of an inner module": lambda op: op.inner.eval(),
    "another inner module": lambda op: op.inner.append(torch.nn.Identity()),
    "an inner hook": lambda op: op.inner[1].register_forward_hook(lambda module, inputs, y: y),
    "a buffer": lambda op: setattr(op, "b", torch.ones(1)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_an_op_is_told_by(what):
    op = Holding()
    before = identity(op)
    assert identity(op) == before
    CHANGES[what](op)
    assert identity(op) != before


def test_a_change_between_two_calls_is_seen_by_compiled_code():
    for make in (Times, Declared):
        op = make()
        (function, counter), x = compiled(ops.Sequential(op)), torch.ones(2)
        for value in (2.0, 3.0, 2.0, 3.0):
            op.scale = value
            assert torch.equal(function(x), value * x)
        assert counter.frame_count == 2, "what was compiled for a value is found again"


def test_a_declared_attribute_may_be_computed():
    cls = type("Computed", (Times,), {"fuser_options": ("twice",), "twice": property(lambda op: 2 * op.scale)})
    assert identity(cls(2.0)) == identity(cls(2.0)) != identity(cls(3.0))


def test_equal_modules_inside_are_no_difference():
    class Own(Times):
        fuser_options = ("scale",)

        def __init__(self, p=0.5, act=torch.relu, order=(0, 0, 1), name="inner"):
            super().__init__()
            modules = [torch.nn.Dropout(p), torch.nn.Dropout(p)]
            self.add_module(name, torch.nn.ModuleList([modules[place] for place in order]))
            self.get_submodule(name).act = act

    assert identity(Own()) == identity(Own())
    assert len({identity(op) for op in (Own(), Own(0.25), Own(act=torch.tanh), Own(order=(0, 1, 1)), Own(name="other"))}) == 5


def test_no_two_objects_are_told_by_the_same_number():
    op, found = Times(), set()
    for _ in range(50):
        op.scale = object()  # often where the last one was
        found.add(identity(op))
    assert len(found) == 50
    assert len({identity(Times()) for _ in range(50)}) == 50


class Raising:
    def __getattr__(self, name):
        raise RuntimeError("raised")

    __iter__ = __eq__ = __bool__ = __len__ = lambda self, *_: 1 / 0
    __hash__ = None


def test_odd_values_are_told():
    deep = []
    for _ in range(5000):
        deep = [deep]
    itself = [max]
    itself.append(itself)
    op = Times()
    op.values = [deep, itself, {"k": Raising()}, Raising(), threading.Lock()]
    op.parent = [ops.Sequential(op)]
    assert identity(op) == identity(op)


def test_copies_are_other_ops():
    op = Times()
    found = identity(op)
    copies = [copy.deepcopy(op), copy.copy(op), pickle.loads(pickle.dumps(op))]  # noqa: S301
    assert len({found, *map(identity, copies)}) == 4
    assert identity(copy.deepcopy(Declared())) == identity(Declared())


class Counting(Times):
    def __init__(self, scale=2.0):
        super().__init__(scale)
        self.calls, self.seen = 0, []

    def factor(self):
        self.calls += 1
        self.seen.append(self.calls)
        return self.scale


@pytest.mark.parametrize("declared", [None, ("scale",), ("scale", "calls")])
def test_what_the_op_itself_changes_is_its_state(declared):
    op = type("Op", (Counting,), {"fuser_options": declared})()
    (function, counter), x = compiled(ops.Sequential(op)), torch.ones(2)
    for _ in range(4):
        assert torch.equal(function(x), 2 * x)
    assert counter.frame_count == 1
    op.scale = 3.0
    assert torch.equal(ops.Sequential(op)(x), 3 * x), "an eager call in between hides nothing"
    assert torch.equal(function(x), 3 * x)


def test_what_an_op_makes_while_it_is_traced_is_its_own():
    class Lazy(Times):
        def op_forward(self, ctx, input_, **_):
            if self.scale is None:
                self.scale = float(input_.shape[-1])
            return input_ * self.scale

    for columns in (4, 16, 8):
        x = torch.ones(2, columns)
        assert torch.equal(torch.compile(ops.Sequential(Lazy(None)), backend="aot_eager", fullgraph=True)(x), columns * x)


@pytest.mark.parametrize("make", [Times, Declared])
@torch._inductor.config.patch(fallback_by_default=True)  # caches are the same, and no C++ compiler runs
def test_what_is_not_seen_counts_after_a_reset(make, monkeypatch):
    function, x = torch.compile(ops.Sequential(make()), backend="inductor", fullgraph=True), torch.ones(2)
    assert torch.equal(function(x), 2 * x)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert torch.equal(function(x), 2 * x), "no attribute has changed"
    torch.compiler.reset()
    assert torch.equal(function(x), 10 * x), "from no cache"


def test_compiled_code_outlives_the_op_that_it_was_traced_from():
    boxes, x = [ops.Sequential(Declared()) for _ in range(2)], torch.ones(2)
    for box in boxes:
        box.compile(backend="eager", fullgraph=True)  # which calls the op's code again at each call
    assert torch.equal(boxes.pop(0)(x), 2 * x)
    gc.collect()
    assert torch.equal(boxes[0](x), 2 * x)


@pytest.mark.parametrize(
    ("options", "value", "text"),
    [
        (
            ("scale",),
            abs,
            r"Op: expected plain values \(numbers, texts, None, lists of them\) in the attributes that fuser_options names, got scale of type "
            r"builtin_function_or_method. Name the values that it is made of, or declare no fuser_options",
        ),
        (("bias",), 2.0, "Op: expected an attribute for each name in fuser_options, got none for 'bias'. Set it in __init__."),
        ("scale", 2.0, r"Op: expected fuser_options to be a tuple of names, got 'scale'. Write \('scale',\) for one attribute."),
    ],
)
def test_a_declaration_that_tells_nothing_is_refused_in_compiled_code(options, value, text):
    box = ops.Sequential(type("Op", (Times,), {"fuser_options": options})(value))
    with pytest.raises(Exception, match=text):
        torch.compile(box, backend="aot_eager", fullgraph=True)(torch.ones(2))
    box[0].scale = 2.0
    assert torch.equal(box(torch.ones(2)), torch.full((2,), 2.0)), "eager code needs none"


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused_in_compiled_code():
    box, x = ops.Sequential(Times(torch.full((2,), 2.0))), torch.ones(2)
    assert torch.equal(box(x), 2 * x)
    message = "Times: expected parameters and buffers in compiled code, got a tensor that is a plain attribute or a global. Register it with register_buffer."
    with pytest.raises(Exception, match=message):
        torch.compile(box, backend="aot_eager", fullgraph=True)(x)


class Scaled(ops.BasicOperation):
    """y = x w + b, of which operands and their order may differ."""

    fuser_options = ()

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        y = input_ if self.w is None else input_ * self.w
        return y if self.b is None else y + self.b

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        grads = {id(self.b): grad_output}
        grads[id(self.w)] = grad_output * x if self.w is not self.b else grad_output * x + grad_output
        return grad_output if self.w is None else grad_output * self.w, [grads[id(parameter)] for parameter in self.parameters()]


def scaled(**tensors):
    op = Scaled()
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter) or tensor is None:
            op.register_parameter(name, tensor)
        else:
            op.register_buffer(name, tensor)
    return op


def full(value):
    return torch.nn.Parameter(torch.full((3,), value))


def tied():
    weight = full(5.0)
    return scaled(w=weight, b=weight)


def test_ops_whose_operands_stand_elsewhere_do_not_stand_in_for_each_other():
    def made():
        buffers = [scaled(w=full(2.0).detach(), b=full(3.0).detach()), scaled(b=full(5.0).detach(), w=full(7.0).detach())]
        return [*buffers, scaled(w=full(2.0), b=full(3.0)), scaled(b=full(5.0), w=full(7.0)), scaled(w=full(2.0), b=None), scaled(w=None, b=full(5.0)), tied()]

    alike = [identity(op) for op in made()]
    assert len(set(alike)) == 7 and alike == [identity(op) for op in made()]
    x = torch.randn(4, 3, requires_grad=True)
    for op in made()[2:4]:
        tensors = [x, *op.parameters()]
        want, y = x * op.w + op.b, torch.compile(ops.Sequential(op), backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors), torch.autograd.grad(want.sum(), tensors))


def test_a_buffer_that_is_set_later_counts():
    op = scaled(w=full(2.0))
    op.register_buffer("b", None)
    box, x = ops.Sequential(op), torch.ones(3)
    function = torch.compile(box, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), 2 * x)
    op.b = torch.full((3,), 4.0)
    assert torch.equal(function(x), 6 * x) and torch.equal(box(x), 6 * x)


def test_equal_ops_in_two_threads_keep_their_own_parameters():
    boxes = [ops.Sequential(scaled(w=full(value), b=None)) for value in (2.0, 5.0)]
    wrong = []

    def call(box, factor):
        for _ in range(100):
            x = torch.randn(3, requires_grad=True)
            with AsksFunctions():
                y = box(x)
            y.sum().backward()
            wrong.extend([] if torch.equal(y, x * factor) and torch.equal(x.grad, torch.full((3,), factor)) else [factor])

    threads = [threading.Thread(target=call, args=arguments) for arguments in zip(boxes, (2.0, 5.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and [box[0].w[0].item() for box in boxes] == [2.0, 5.0]


class Thrice(torch.nn.Module):
    def forward(self, weight):
        return 3 * weight


@pytest.mark.parametrize("how", ["parametrized", "pruned"])
def test_a_parameter_that_is_computed_from_others_is_refused_where_gradients_are_needed(how):
    op, x = scaled(w=full(2.0), b=None), torch.ones(3)
    if how == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(op, "w", Thrice())
    else:
        prune.random_unstructured(op, "w", 1)
    box = ops.Sequential(op)
    with torch.no_grad():
        assert torch.equal(box(x), op.w * x)
    message = (
        r"expected parameters of its own where gradients are needed, got w, which is computed from others \(a parametrization, pruning, a "
        r"norm\): op_backward would give them its gradient as theirs\. Compute it in the op's forward and op_backward, or make it permanent\."
    )
    with pytest.raises(RuntimeError, match=message):
        box(x)
