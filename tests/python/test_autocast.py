"""What is in force belongs to the thread and to the async context, on every path; regions are left in reverse order or it is an error."""

import asyncio
import contextvars
import gc
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import randomize

import tandem
import tandem.ops as ops
from tandem.recipe import Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

OTHER = Float8CurrentScaling(use_power_2_scales=True)


def eager(box):
    return box


def compiled(box):
    return torch.compile(box, backend="aot_eager", fullgraph=True)


def parametrized(box):
    """The same numbers on the path of parametrized weights."""

    class Same(torch.nn.Module):
        def forward(self, weight):
            return weight.clone()

    torch.nn.utils.parametrize.register_parametrization(box[0], "weight", Same())
    return box


PATHS = [eager, compiled, parametrized]


@pytest.fixture
def box():
    return randomize(ops.Sequential(ops.Linear(16, 16)))


@pytest.fixture
def x():
    return torch.randn(4, 16)


@pytest.fixture
def numbers(box, x):
    """The output of the pipeline without a recipe, under the default one and under OTHER."""
    found = types.SimpleNamespace(plain=box(x).detach())
    with tandem.autocast():
        found.quantized = box(x).detach()
    with tandem.autocast(recipe=OTHER):
        found.other = box(x).detach()
    assert not torch.equal(found.plain, found.quantized) and not torch.equal(found.quantized, found.other)
    return found


def on_a_thread(function):
    """The result of a function that another thread runs; its error is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("path", PATHS)
def test_a_thread_outside_any_region_is_not_in_that_of_another(path, box, x, numbers):
    function = path(box)
    function(x)
    entered, done = threading.Event(), threading.Event()

    def hold():
        with tandem.autocast():
            entered.set()
            done.wait()
            return function(x)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        entered.wait()
        assert torch.equal(function(x), numbers.plain)
        with tandem.autocast(recipe=OTHER):
            assert torch.equal(function(x), numbers.other)
            assert torch.equal(on_a_thread(lambda: function(x)), numbers.plain)
    finally:
        done.set()
        holder.join()
    assert torch.equal(function(x), numbers.plain)


@pytest.mark.parametrize("path", PATHS)
def test_regions_of_two_threads_overlap(path, box, x, numbers):
    function = path(box)
    one = tandem.autocast()  # the same object in both threads
    inside, outside = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def work():
        with one:
            inside.wait()
            first = function(x)
        outside.wait()
        return first, function(x)

    function(x)
    with ThreadPoolExecutor(2) as pool:
        for first, second in pool.map(lambda _: work(), range(2)):
            assert torch.equal(first, numbers.quantized) and torch.equal(second, numbers.plain)


@pytest.mark.parametrize("path", PATHS)
def test_leaving_out_of_order_raises_and_the_others_stay_in_force(path, box, x, numbers):
    function = path(box)
    outer, inner = tandem.autocast(), tandem.autocast(recipe=OTHER)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="autocast: expected the innermost region to be left first, got one that others were entered"):
        outer.__exit__(None, None, None)
    assert torch.equal(function(x), numbers.other)
    inner.__exit__(None, None, None)
    assert torch.equal(function(x), numbers.plain)
    with pytest.raises(RuntimeError, match="autocast: expected a region that was entered in this thread and async context, got one that"):
        inner.__exit__(None, None, None)
    assert torch.equal(function(x), numbers.plain)


def test_generators_that_leave_their_regions_out_of_order(box, x, numbers):
    def batches():
        with tandem.autocast():
            yield 1

    first, second = batches(), batches()
    next(first)
    next(second)
    with pytest.raises(RuntimeError, match="left first"):
        next(first)
    assert torch.equal(box(x), numbers.quantized)
    assert next(second, None) is None
    assert torch.equal(box(x), numbers.plain)


def test_a_region_that_another_thread_leaves(box):
    region = tandem.autocast()
    with region:
        with pytest.raises(RuntimeError, match="entered in this thread and async context"):
            on_a_thread(lambda: region.__exit__(None, None, None))
        assert tandem._C.active_recipe() is not None


@pytest.mark.parametrize("path", PATHS)
def test_one_object_is_entered_again_and_as_a_recursive_decorator_of_several_threads(path, box, x, numbers):
    function, region = path(box), tandem.autocast()

    @region
    def inner(depth):
        if depth:
            with tandem.autocast(enabled=False):
                assert torch.equal(function(x), numbers.plain)
                inner(depth - 1)
                assert torch.equal(function(x), numbers.plain)
        return function(x)

    assert torch.equal(function(x), numbers.plain)
    with region, region:
        assert torch.equal(function(x), numbers.quantized)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, numbers.quantized) for y in (*pool.map(inner, [3] * 4), inner(3)))
    assert torch.equal(function(x), numbers.plain)


def test_an_exception_leaves_every_region(box, x, numbers):
    for path in (eager, compiled):
        function = path(box)
        with pytest.raises(KeyError), tandem.autocast(), tandem.autocast(recipe=OTHER):
            function(x)
            raise KeyError
        assert torch.equal(function(x), numbers.plain)


@pytest.mark.parametrize("path", PATHS)
def test_tasks_that_interleave_have_regions_of_their_own(path, box, x, numbers):
    function = path(box)

    async def task(recipe, expected):
        with tandem.autocast(recipe=recipe):
            for _ in range(3):
                assert torch.equal(function(x), expected)
                await asyncio.sleep(0)
        assert torch.equal(function(x), numbers.plain)

    async def without_a_region():
        for _ in range(5):
            assert torch.equal(function(x), numbers.plain)
            await asyncio.sleep(0)

    async def main():
        with tandem.autocast(recipe=OTHER):
            pass
        await asyncio.gather(task(None, numbers.quantized), without_a_region(), task(OTHER, numbers.other))

    asyncio.run(main())
    assert torch.equal(function(x), numbers.plain)


def test_a_context_that_is_copied_has_what_was_in_force(box, x, numbers):
    with tandem.autocast():
        context = contextvars.copy_context()
        assert torch.equal(on_a_thread(lambda: context.run(box, x)), numbers.quantized)
    assert torch.equal(context.run(box, x), numbers.plain), "a region that was left is in force nowhere"


def test_codes_of_weights_serve_every_context(box, x):
    box.requires_grad_(False)

    async def task():
        with tandem.autocast():
            for _ in range(4):
                box(x)
                await asyncio.sleep(0)

    with tandem.autocast():
        box(x)
        made = tandem._C.refresh_counts().made
        box(x)
        assert tandem._C.refresh_counts().made == made
    asyncio.run(task())
    assert tandem._C.refresh_counts().made == made, "the bytes are the same in any region"


def test_regions_that_are_never_left_die_with_their_context():
    class Watched(tandem.autocast):
        pass

    def forget():
        Watched().__enter__()

    contextvars.Context().run(forget)
    with tandem.autocast():  # this thread's own chain goes on from here
        pass
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, Watched)]
    assert tandem._C.active_recipe() is None


def test_a_region_inside_a_compiled_function(box, x, numbers):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x):
        before = box(x)
        with tandem.autocast(), tandem.autocast(recipe=OTHER):
            return before, box(x)

    for _ in range(2):
        before, inside = function(x)
        assert torch.equal(before, numbers.plain) and torch.equal(inside, numbers.other)
    with tandem.autocast():
        before, inside = function(x)
        assert torch.equal(before, numbers.quantized) and torch.equal(inside, numbers.other)
    before, inside = on_a_thread(lambda: function(x))
    assert torch.equal(before, numbers.plain) and torch.equal(inside, numbers.other)


def test_a_graph_break_inside_a_region(box, x, numbers):
    seen = []

    @torch.compile(backend="aot_eager")
    def function(x):
        with tandem.autocast():
            first = box(x)
            torch._dynamo.graph_break()
            seen.append(tandem._C.active_recipe())
            return first, box(x), box(x)

    for _ in range(2):
        assert all(torch.equal(y, numbers.quantized) for y in function(x))
        assert torch.equal(box(x), numbers.plain)
    assert all(recipe is not None for recipe in seen)


def test_a_compiled_function_that_leaves_a_region_open_raises(box, x, numbers):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def forgets(x):
        tandem.autocast().__enter__()
        return box(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def wrong_order(x):
        outer, inner = tandem.autocast(), tandem.autocast(recipe=OTHER)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)
        return box(x)

    for function in (forgets, wrong_order):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="autocast: expected a compiled function to leave the regions that it enters, innermost first"):
                function(x)
            assert torch.equal(box(x), numbers.plain) and torch.equal(compiled(box)(x), numbers.plain)


@pytest.mark.parametrize("run", [lambda body: body(), lambda body: torch.compile(body, backend="eager", fullgraph=True)()], ids=["eager", "compiled"])
def test_as_gives_the_region(run):
    def body():
        with tandem.autocast(recipe=OTHER) as region, tandem.autocast(enabled=False, calibrating=True) as inner:
            return torch.ones(2) * 2, region.enabled, region.calibrating, inner.enabled, inner.calibrating, region.amax_reduction_group

    assert run(body)[1:] == (True, False, False, True, None)
    with tandem.fp8_autocast(fp8_recipe=OTHER) as region:
        assert region.recipe is OTHER


@pytest.mark.parametrize(("arguments", "name"), [((OTHER,), "enabled"), (("no",), "enabled"), ((False, 2), "calibrating")])
def test_a_recipe_in_the_place_of_a_flag_is_refused(arguments, name):
    with pytest.raises(ValueError, match=rf"autocast: expected {name} to be True or False, got .*\. Pass a recipe as recipe=\."):
        tandem.autocast(*arguments)
