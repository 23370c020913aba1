"""Ops that are written in Python: what compiled code notices of odd objects, enumerations, and what nobody reads."""

import enum
import sys
import types
import weakref
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tandem.ops as ops
from tandem.ops import python_op
from test_fingerprint import CONFIG, Config, closure, reading

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Level(enum.IntFlag):
    LOW = 8


class Mode(enum.Enum):
    A = 2.0

    def times(self):
        return 1.0


MODE = Mode.A


class Meta(type):
    scale = 2.0


class WithMeta(metaclass=Meta):
    pass


FURTHER_CHANGES = {
    "a method of an enumeration": (lambda: reading(lambda op: MODE.times()), lambda op, patch: patch(Mode, "times", lambda mode: 5.0)),
    "a metaclass": (lambda: reading(lambda op: WithMeta.scale), lambda op, patch: patch(Meta, "scale", 5.0)),
    "what is behind a weak reference": (
        lambda: reading(lambda op: op.parent().k, parent=weakref.ref(CONFIG)),
        lambda op, patch: patch(CONFIG, "k", 5.0),
    ),
    "a module that a function imports": (
        lambda: reading(lambda op: imported()),
        lambda op, patch: patch(sys.modules["imported_by_an_op"], "FACTOR", 5.0),
    ),
}


def imported():
    import imported_by_an_op

    return imported_by_an_op.FACTOR


@pytest.mark.parametrize("what", FURTHER_CHANGES)
def test_a_further_change_is_seen(what, monkeypatch):
    monkeypatch.setitem(sys.modules, "imported_by_an_op", types.ModuleType("imported_by_an_op"))
    sys.modules["imported_by_an_op"].FACTOR = 2.0
    make, change = FURTHER_CHANGES[what]
    op = make()
    box, x = ops.Sequential(op), torch.ones(2)
    function = torch.compile(box, backend="aot_eager", fullgraph=True)
    before = function(x)
    change(op, lambda place, name, value: monkeypatch.setattr(place, name, value, raising=False))
    assert not torch.equal(box(x), before)
    assert torch.equal(function(x), box(x))


def test_members_of_a_flag_without_a_name_differ():
    assert python_op.fingerprint(reading(lambda op: op.k, k=Level(16))) != python_op.fingerprint(reading(lambda op: op.k, k=Level(32)))


class Raising:
    def __getattr__(self, name):
        raise RuntimeError("raised")

    __iter__ = __eq__ = __bool__ = __len__ = lambda self, *_: 1 / 0
    __hash__ = None


def odd_objects():
    deep = []
    for _ in range(5000):
        deep = [deep]

    class Items(list):
        def __iter__(self):
            raise RuntimeError("raised")

    class Lying:
        __class__ = property(lambda self: types.FunctionType)

    return [deep, 10**5000, Items([1]), Lying(), Raising(), mock.create_autospec(Config), {"k": Raising()}]


def test_odd_objects_are_told_apart_or_opaque():
    for value in odd_objects():
        op = reading(lambda op: 2.0 if op.odd is not None else 1.0)
        op.__dict__["odd"] = value
        function = torch.compile(ops.Sequential(op), backend="aot_eager", fullgraph=True)
        assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
        assert python_op.fingerprint(op) == python_op.fingerprint(op)


def test_an_op_may_refer_to_its_pipeline():
    op = reading(lambda op: op.parent[0].k)
    box = ops.Sequential(op)
    op.parent, box.k = [box], 2.0
    counter = CompileCounterWithBackend("aot_eager")
    function, x = torch.compile(box, backend=counter, fullgraph=True), torch.ones(2)
    for _ in range(3):
        assert torch.equal(function(x), 2 * x)
    assert counter.frame_count == 1


def test_attributes_that_no_code_reads_recompile_nothing():
    op = closure(2.0)
    counter = CompileCounterWithBackend("aot_eager")
    function, x = torch.compile(ops.Sequential(op), backend=counter, fullgraph=True), torch.ones(2)
    op.log = []
    for op.step in range(3):
        op.log.append(op.step)
        assert torch.equal(function(x), 2 * x)
    assert counter.frame_count == 1


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_refused_in_compiled_code():
    op = reading(lambda op: op.factors)
    op.factors = torch.full((2,), 2.0)
    box, x = ops.Sequential(op), torch.ones(2)
    assert torch.equal(box(x), 2 * x)
    message = "Op: expected parameters and buffers in compiled code, got a tensor that is a plain attribute or a global. Register it with register_buffer."
    with pytest.raises(Exception, match=message):
        torch.compile(box, backend="aot_eager", fullgraph=True)(x)
