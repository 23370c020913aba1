"""Threads that share ops: first calls at the same time, and changes during calls. Python hands over after nearly every line here."""

import sys
import threading

import pytest
import torch

import tandem.ops as ops


@pytest.fixture(autouse=True)
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work, threads=4):
    """What `work` returns in each thread; its errors are raised here."""
    results, errors, start = [], [], threading.Barrier(threads, timeout=60)

    def run():
        start.wait()
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    if errors:
        raise errors[0]
    return results


MANY = {
    "fused": lambda: ops.FusedOperation([ops.BasicLinear(8, 8) for _ in range(12)]),
    "linear": lambda: ops.Linear(8, 8),
    "container": lambda: ops.Sequential(*[ops.BasicLinear(8, 8) for _ in range(12)]),
}


@pytest.mark.parametrize("name", MANY)
def test_first_calls_at_once(name):
    x = torch.randn(3, 8)
    for _ in range(30):
        op = MANY[name]()
        results = at_once(lambda op=op: op(x))
        expected = x
        for weight in [parameter for parameter in op.parameters() if parameter.dim() == 2]:
            expected = expected @ weight.T
        for result in (*results, op(x)):
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


class Told(ops.BasicLinear):
    """Tells when a pipeline is about to read what its ops are."""

    about_to_read = staticmethod(lambda: None)

    def channel_bindings(self):
        self.about_to_read()
        return super().channel_bindings()


@pytest.mark.parametrize("make", [ops.FusedOperation, lambda parts: ops.Sequential(*parts)])
def test_two_first_calls_in_the_middle_of_each_other(make):
    parts, x, results = [Told(8, 8) for _ in range(3)], torch.randn(3, 8), []
    box = make(parts)
    second = threading.Thread(target=lambda: results.append(box(x)))
    second_has_begun, first_is_done = threading.Event(), threading.Event()

    def first_waits():
        if second.ident is None:
            second.start()
            assert second_has_begun.wait(60)

    def second_waits():
        if threading.current_thread() is second:
            second_has_begun.set()
            assert first_is_done.wait(60)

    parts[0].about_to_read, parts[1].about_to_read = first_waits, second_waits
    try:
        results.append(box(x))
    finally:
        first_is_done.set()
        second.join()
    results.append(box(x))
    expected = x @ parts[0].weight.T @ parts[1].weight.T @ parts[2].weight.T
    for result in results:
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    assert len(results) == 3


def change_while_others_call(box, values, change, steps):
    """`change(step)` tells what a call that begins after it gives; calls on two other threads give one of `values`."""
    x, done = torch.ones(4), threading.Event()

    def read():
        while not done.is_set():
            assert float(box(x)[0]) in values

    def write():
        try:
            for step in range(steps):
                expected = change(step)
                assert float(box(x)[0]) == expected, "a call that begins after a change sees it"
        finally:
            done.set()

    tasks = iter([write, read, read])
    at_once(lambda: next(tasks)(), threads=3)


@pytest.mark.parametrize("alone", [False, True])
def test_an_option_that_another_thread_changes(alone):
    scale = ops.ConstantScale(2.0)

    def change(step):
        scale.scale = 2.0 + step % 2
        return scale.scale

    change_while_others_call(scale if alone else ops.Sequential(ops.Identity(), scale), (2.0, 3.0), change, 1500)


def test_a_list_that_another_thread_changes():
    box = ops.Sequential(ops.ConstantScale(2.0), ops.Identity())

    def change(step):
        box[1] = ops.Identity() if step % 2 else ops.ConstantScale(3.0)
        return 2.0 if step % 2 else 6.0

    change_while_others_call(box, (2.0, 6.0), change, 300)
