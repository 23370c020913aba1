"""Ops that are written in Python share compiled code only where all that their code depends on is equal."""

import collections
import dataclasses
import functools
import logging
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tandem.ops as ops
from tandem.ops import python_op

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTOR = 2.0


class Base(ops.BasicOperation):
    def op_forward_save_ctx(self, ctx, input_, tensors_to_save):
        ctx.save_for_backward()

    def op_backward(self, ctx, grad_output):
        return grad_output * self.factor(), ()

    def op_forward_compute(self, input_):
        return input_ * self.factor(), ()

    def factor(self):
        raise NotImplementedError


def closure(k):
    class Op(Base):
        def factor(self):
            return k

    return Op()


def default(k):
    class Op(Base):
        def factor(self, value=k):
            return value

    return Op()


def keyword_default(k):
    class Op(Base):
        def factor(self, *, value=k):
            return value

    return Op()


def class_attribute(k):
    class Op(Base):
        value = k

        def factor(self):
            return self.value

    return Op()


def base_class(k):
    class Middle(Base):
        value = k

    class Op(Middle):
        def factor(self):
            return self.value

    return Op()


def function_of_a_closure(k):
    def inner():
        return k

    class Op(Base):
        def factor(self):
            return inner()

    return Op()


def decorator(k):
    def times(function):
        @functools.wraps(function)
        def wrapper(self):
            return function(self) * k

        return wrapper

    class Op(Base):
        @times
        def factor(self):
            return 1.0

    return Op()


def partial(k):
    class Op(Base):
        value = functools.partial(max, k)

        def factor(self):
            return self.value(0.0)

    return Op()


def static_method(k):
    class Op(Base):
        @staticmethod
        def factor(value=k):
            return value

    return Op()


def prop(k):
    class Op(Base):
        @property
        def value(self):
            return k

        def factor(self):
            return self.value

    return Op()


def container(k):
    class Op(Base):
        values = {"a": [k]}

        def factor(self):
            return self.values["a"][0]

    return Op()


def module(k):
    helpers = types.ModuleType("helpers_of_a_test")
    helpers.value = k

    class Op(Base):
        def factor(self):
            return helpers.value

    return Op()


def attribute(k):
    class Op(Base):
        def factor(self):
            return self.value

    op = Op()
    op.value = k
    return op


def global_value(k):
    namespace = {"Base": Base, "k": k, "__name__": "a_module_of_a_test"}
    exec("class Op(Base):\n  def factor(self): return k", namespace)  # noqa: S102
    return namespace["Op"]()


def calling(function):
    class Op(Base):
        def factor(self):
            return function()

    return Op()


def ordered_dict(k):
    values = collections.OrderedDict(k=k)
    return calling(lambda: values["k"])


def counter(k):
    values = collections.Counter(k=int(k))
    return calling(lambda: float(values["k"]))


def evaluated(k):
    return calling(eval(f"lambda: {k}", {}))  # noqa: S307


def class_without_a_module(k):
    namespace = {"Base": Base}
    exec(f"class Op(Base):\n  def factor(self): return {k}", namespace)  # noqa: S102
    return namespace["Op"]()


def named_like_a_library(k):
    namespace = {"functools": functools, "torch": torch, "k": k}
    exec("@functools.wraps(torch.nn.functional.relu)\ndef relu(): return k", namespace)  # noqa: S102
    return calling(namespace["relu"])


def method_of_a_dict(k):
    return calling(functools.partial({"k": k}.get, "k"))


class Config:
    def __init__(self, k):
        self.k = k


@dataclasses.dataclass(slots=True)
class Slotted:
    k: float


Pair = collections.namedtuple("Pair", ("function", "k"))


def own_object(k):
    value = Config(k)
    return calling(lambda: value.k)


def slots(k):
    value = Slotted(k)
    return calling(lambda: value.k)


def named_tuple(k):
    value = Pair(max, k)
    return calling(lambda: value.k)


def array(k):
    value = np.full(2, k)
    return calling(lambda: float(value[0]))


def inner_hook(k):
    op = with_inner()
    op.inner[0].register_forward_hook(lambda module, inputs, y: y * k)
    return op


FACTORIES = [
    closure, default, keyword_default, class_attribute, base_class, function_of_a_closure, decorator, partial, static_method, prop,
    container, module, attribute, global_value, ordered_dict, counter, evaluated, class_without_a_module, named_like_a_library,
    method_of_a_dict, own_object, slots, named_tuple, array, inner_hook,
]  # fmt: skip


@pytest.mark.parametrize("make", FACTORIES)
def test_ops_of_one_factory_share_code_exactly_where_they_are_equal(make):
    x = torch.ones(2, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    for count, k in ((1, 2.0), (2, 3.0), (2, 2.0)):
        box = ops.Sequential(make(k))
        box.compile(backend=counter, fullgraph=True)
        y = box(x)
        assert torch.equal(y, k * torch.ones(2))
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], k * torch.ones(2))
    assert python_op.fingerprint(make(2.0)) == python_op.fingerprint(make(2.0)) != python_op.fingerprint(make(3.0))
    assert count == 2 and counter.frame_count >= 2


def test_what_is_no_plain_value_is_shared_by_those_that_hold_it():
    def op(value):
        made = reading(lambda op: 1.0 if op.option is None else 2.0)
        made.option = value
        return made

    made = [lambda: torch.ones(2), object, lambda: {1: object()}, lambda: [lambda: 1, object()], threading.Lock]
    for make in made:
        value = make()
        assert python_op.fingerprint(op(value)) != python_op.fingerprint(op(make()))
        assert isinstance(value, dict | list) or python_op.fingerprint(op(value)) == python_op.fingerprint(op(value))
    one = op(object())
    before = python_op.fingerprint(one)
    assert python_op.fingerprint(one) == before
    one.option = object()
    assert python_op.fingerprint(one) != before


CHANGES = {
    "global": lambda monkeypatch, op: monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0),
    "attribute": lambda monkeypatch, op: setattr(op, "own", 5.0),
    "new attribute": lambda monkeypatch, op: setattr(op, "further", 5.0),
    "class attribute": lambda monkeypatch, op: monkeypatch.setattr(type(op), "shared", 5.0),
    "container": lambda monkeypatch, op: op.several.__setitem__(0, 5.0),
    "method": lambda monkeypatch, op: monkeypatch.setattr(type(op), "times", lambda self: 5.0),
    "closure": lambda monkeypatch, op: op.set_cell(5.0),
}


def all_sources():
    cell = 1.0

    class Op(Base):
        shared = 1.0

        def __init__(self):
            super().__init__()
            self.own, self.several = 1.0, [1.0]

        def times(self):
            return 1.0

        def set_cell(self, value):
            nonlocal cell
            cell = value

        def factor(self):
            return FACTOR * self.own * self.shared * self.several[0] * self.times() * cell * getattr(self, "further", 1.0)

    return Op()


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_between_two_calls_is_seen_by_compiled_code(what, monkeypatch):
    op = all_sources()
    box, x = ops.Sequential(op), torch.ones(2)
    function = torch.compile(box, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), 2 * x)
    CHANGES[what](monkeypatch, op)
    assert torch.equal(function(x), (5 if what == "global" else 10) * x)
    assert torch.equal(function(x), box(x))


class Inherited(Base):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.config, self.slots = Config(2.0), [Slotted(2.0)]
        self.mixed, self.pair = {"k": 2.0, "function": max}, (max, [2.0])
        self.functions, self.partial = [lambda: 2.0], functools.partial(lambda values: values[0], [2.0])


class Child(Inherited):
    pass


ARRAY, CONFIG = np.full(2, 2.0), Config(2.0)


def reading(read, **fields):
    return type("Op", (Child,), {"factor": read, **fields})()


def with_inner(**fields):
    class Op(ops.BasicOperation):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Identity())

        def op_forward(self, ctx, input_, **_):
            return self.inner(input_)

        def op_backward(self, ctx, grad_output):
            return self.inner(grad_output), ()

    return type("Op", (Op,), fields)()


class Times(torch.nn.Module):
    def forward(self, x):
        return x * 5.0


INNER_CHANGES = {
    "a name that only a base had": (lambda: reading(lambda op: op.scale), lambda op, patch: patch(Child, "scale", 5.0)),
    "an option that the class had": (
        lambda: reading(lambda op: op.scale, fuser_options=("scale",)),
        lambda op, patch: patch(op, "scale", 5.0),
    ),
    "an option that is a property": (
        lambda: reading(lambda op: op.alpha, fuser_options=("alpha",), alpha=property(lambda op: op.hidden), hidden=2.0),
        lambda op, patch: patch(op, "hidden", 5.0),
    ),
    "an object": (lambda: reading(lambda op: op.config.k), lambda op, patch: patch(op.config, "k", 5.0)),
    "a new attribute of an object": (
        lambda: reading(lambda op: getattr(op.config, "further", 2.0)),
        lambda op, patch: patch(op.config, "further", 5.0),
    ),
    "a slot": (lambda: reading(lambda op: op.slots[0].k), lambda op, patch: patch(op.slots[0], "k", 5.0)),
    "a global object": (lambda: reading(lambda op: CONFIG.k), lambda op, patch: patch(CONFIG, "k", 5.0)),
    "an attribute of the class of an object": (
        lambda: reading(lambda op: CONFIG.k),
        lambda op, patch: patch(Config, "k", property(lambda config: 5.0)),
    ),
    "the class of an object": (
        lambda: reading(lambda op: op.config.k),
        lambda op, patch: patch(op.config, "__class__", type("Other", (Config,), {"k": property(lambda config: 5.0)})),
    ),
    "a dict with a function": (lambda: reading(lambda op: op.mixed["k"]), lambda op, patch: op.mixed.update(k=5.0)),
    "a list of functions": (lambda: reading(lambda op: op.functions[-1]()), lambda op, patch: op.functions.append(lambda: 5.0)),
    "a list in a tuple": (lambda: reading(lambda op: op.pair[1][0]), lambda op, patch: op.pair[1].__setitem__(0, 5.0)),
    "a list in a partial": (lambda: reading(lambda op: op.partial()), lambda op, patch: op.partial.args[0].__setitem__(0, 5.0)),
    "an array": (lambda: reading(lambda op: float(ARRAY[0])), lambda op, patch: ARRAY.fill(5.0)),
    "an inner module": (with_inner, lambda op, patch: op.inner.append(Times())),
    "an inner module, nothing declared": (lambda: with_inner(fuser_options=()), lambda op, patch: op.inner.append(Times())),
    "an inner hook": (with_inner, lambda op, patch: op.inner[0].register_forward_hook(lambda module, inputs, y: y * 5.0)),
    "an inner pre-hook": (with_inner, lambda op, patch: op.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 5.0,))),
}


@pytest.mark.parametrize("what", INNER_CHANGES)
def test_a_change_inside_of_what_an_op_holds_is_seen(what, monkeypatch):
    make, change = INNER_CHANGES[what]
    op = make()
    box, x = ops.Sequential(op), torch.ones(2)
    function = torch.compile(box, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(x), box(x))
    before = box(x)
    try:
        change(op, lambda place, name, value: monkeypatch.setattr(place, name, value, raising=False))
        assert not torch.equal(box(x), before)
        assert torch.equal(function(x), box(x))
    finally:
        ARRAY.fill(2.0)


def test_a_container_may_hold_itself():
    op = closure(2.0)
    op.several = [max]
    op.several.append(op.several)
    op.plain = {}
    op.plain["self"] = op.plain
    function, x = torch.compile(ops.Sequential(op), backend="aot_eager", fullgraph=True), torch.ones(2)
    assert torch.equal(function(x), 2 * x)


def test_what_code_does_not_name_recompiles_nothing():
    class Trainer:
        step, scale = 0, 2.0

    trainer, lock, logger = Trainer(), threading.Lock(), logging.getLogger(__name__)

    class Op(Base):
        def factor(self):
            logger.debug("called")
            with lock:
                return trainer.scale

    op, counter = Op(), CompileCounterWithBackend("aot_eager")
    function, x = torch.compile(ops.Sequential(op), backend=counter, fullgraph=True), torch.ones(2)
    for trainer.step in range(3):
        assert torch.equal(function(x), 2 * x)
    op.factor_of_nothing = 1.0
    del op.factor_of_nothing
    assert torch.equal(function(x), 2 * x)
    assert counter.frame_count == 1, "the lock is the same one"
    trainer.scale = 5.0
    assert torch.equal(function(x), 5 * x)


def test_what_the_op_itself_changes_is_its_state():
    class Counting(Base):
        total = 0

        def __init__(self):
            super().__init__()
            self.calls, self.seen, self.value = 0, [], 2.0

        def factor(self):
            self.calls += 1
            type(self).total += 1
            self.seen.append(self.calls)
            return self.value

    op = Counting()
    counter = CompileCounterWithBackend("aot_eager")
    function, x = torch.compile(ops.Sequential(op), backend=counter, fullgraph=True), torch.ones(2)
    for _ in range(4):
        assert torch.equal(function(x), 2 * x)
    assert counter.frame_count <= 2, "once more at most: as it has a state of its own now"
    op.value = 3.0
    assert torch.equal(ops.Sequential(op)(x), 3 * x), "an eager call in between hides nothing"
    assert torch.equal(function(x), 3 * x)


def test_watching_an_op_is_cheap():
    op = all_sources()
    python_op.fingerprint(op)
    taken = op.__dict__["_fingerprint"]
    assert taken.holds()
    python_op.fingerprint(op)
    assert op.__dict__["_fingerprint"] is taken
