"""A run of ops as it is at one moment: its operands, its descriptions, and the pipelines and texts that were computed for it."""

from __future__ import annotations

import json
import sys
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from tandem import _C, recipe_state
from tandem.op_base import hooks, main_grad
from tandem.op_base.base import BasicOpBase, OpBase
from tandem.op_base.changes import Changes, structure
from tandem.op_base.places import Place, places
from tandem.pipelines import inspected, workspaces
from tandem.pipelines.buffers import Modes, note_graph
from tandem.recipe_state import history_length, traced_region
from tandem.tracing import constant_while_traced
from tandem.user_ops import fusions, python_op
from tandem.user_ops.identity import identity

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Bindings = tuple  # per basic op: (channel of each extra input, (channel, to caller) of each extra output)
Kwargs = Mapping[int, Mapping[str, Any]]  # keyword arguments by index of the basic op
# What a description depends on besides the ops and their arguments, each a constant that Dynamo guards: `described`, by which the description is shared, or
# None for one of these very ops; the training flags of `training_ops`; that of the container; the recipe; the version of fusions; `Modes`; the budget.
Wanted = tuple[str | None, tuple[bool, ...], bool, str, str | None, tuple[Any, ...], str]


class Terms(NamedTuple):
    """What a container demands of the plans of its pipelines. It is part of their descriptions."""

    required: tuple[str, ...] = ()  # names of fusions; a call raises an error with the reason if one is not made
    memory_budget: str = ""  # a number as tandem.regions.memory_budget writes it; empty: the budget of the region


def own_call(op: OpBase) -> str | None:
    """The method of the module, or of its parts, that is not the library's, so that calling it may do more than its ops do. A method that is patched
    on an instance counts at once, because `OpBase.__setattr__` makes pipelines read the ops anew. No event reports a patched class, and a check
    in each call would cost time, so it counts only for pipelines that are prepared later."""
    for module in (op, *op.flat_ops()) if op.is_fused_op else (op,):
        if "forward" in module.__dict__ or type(module).forward is not type(module)._library_forward:
            return "forward"
        if type(module).__call__ is not torch.nn.Module.__call__:
            return "__call__"
    return None


def has_hooks(op: OpBase) -> bool:
    return any([hooks.any_of(module) for module in ((op, *op.flat_ops()) if op.is_fused_op else (op,))])


def wrong_count(readers: Sequence[str], got: int) -> str:
    """The error for a wrong number of extra inputs. `readers` describes, for each unbound extra input, the op that reads it."""
    return (
        f"pipeline: expected {len(readers)} extra inputs, one per unbound extra input of its ops, got {got}. Pass them after the input, in order"
        f"{', for ' if readers else ''}{', '.join(readers)}."
    )


_NO_MODES = Modes()
_MOST_KEPT = 64  # limit on the texts and pipelines of one run, because flags, fusions, recipes and arguments may have new values at every call


def _keep(cache: dict[Any, Any], key: Any, made: Any) -> Any:
    """Adds an entry, and removes the oldest one if there are many. Other threads may do so at the same time."""
    cache[key] = made
    if len(cache) > _MOST_KEPT:
        cache.pop(next(iter(list(cache))), None)
    return made


def _numbered(ops: Sequence[BasicOpBase], field: str, first: int) -> tuple[tuple[Place, ...], list[list[int]]]:
    """The places of the ops' tensors, each once, and for each op the numbers of its own, which begin at `first`."""
    found: dict[tuple[int, str], Place] = {}
    numbers: dict[tuple[int, str], int] = {}
    by_op = []
    for op in ops:
        own = {(id(module), name): (module, name) for module, name in places(op, field)}
        found.update(own)
        by_op.append([numbers.setdefault(key, first + len(numbers)) for key in own])
    return tuple(found.values()), by_op


class Prepared:
    """The ops and basic ops of a run as they were when the run read them. Only `token`, `deferred` and `products` are replaced, and caches only grow, so
    a call that has taken one of these is not affected by other threads."""

    def __init__(
        self,
        ops: tuple[OpBase, ...],
        basic_ops: tuple[BasicOpBase, ...],
        owner: OpBase | None,
        bindings: Bindings | None,
        terms: Terms,
        own_calls: tuple[str | None, ...],
        captured: Any,
        changes: Changes,
    ) -> None:
        self.ops, self.basic_ops, self.owner, self.terms = ops, basic_ops, owner, terms
        self.changes = changes
        self.captured = captured  # the state of the ops before this constructor read them
        self.training_ops = tuple(op for op in basic_ops if op._depends_on_training)
        self.joined = tuple(op for op in basic_ops if op.__dict__.get("_joined"))
        self.python_ops = tuple(op for op in basic_ops if op.is_python_op)
        self.own_calls = own_calls  # for each op
        self.has_own_calls = any(own_calls)  # if true, the direct path is closed, because it checks for hooks only
        self.notified_ops = tuple(op for op in basic_ops if type(op).pre_fuser_forward is not OpBase.pre_fuser_forward)
        self.is_direct = not self.has_own_calls and not self.notified_ops
        for op in self.python_ops:
            if op._forward_prefix == "op" and (op.num_extra_inputs or op.num_extra_outputs):
                raise RuntimeError(
                    f"{op._get_name()}: expected a forward for its {op.num_extra_inputs} extra inputs and {op.num_extra_outputs} extra outputs, got "
                    "op_forward, which has none. It should override `fuser_forward` instead of `op_forward`."
                )
        for op in basic_ops:
            op.lock_channels()
            op.__dict__.setdefault("_pipelines_of", weakref.WeakSet()).add(self)
        self.bindings: Bindings = bindings or tuple(op.channel_bindings() for op in basic_ops)
        self.num_extra_inputs = sum(inputs.count(None) for inputs, _ in self.bindings)
        self.num_outputs = 1 + sum(to_caller for _, outputs in self.bindings for _, to_caller in outputs)
        self._read_places()
        self._read_state_slots()
        self.deferred: tuple[torch.nn.Module, ...] = ()  # modules whose parameters the first call allocates
        self.products: tuple[int, ...] = ()  # indices of products whose weights define their own product
        self.token: object = None  # the token of `changes` when the ops were last found to be unchanged
        self.pipelines: dict[Any, _C.EagerPipeline] = {}
        self.texts: dict[Any, Any] = {}
        self.descriptions: dict[Any, tuple[str, list[Any]]] = {}  # each text with the objects that it names
        self.held_workspaces = workspaces.Held()  # workspaces of compiled code
        self.cuts: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}  # written by `tandem.pipelines.run`: by indices of ops that run alone
        self.pipeline(())  # raises errors before a tensor is passed

    def _read_places(self) -> None:
        """Finds the modules that hold the operands: parameters, and buffers, which are operands in traces, where nothing else may be read."""
        self.places, self._params = _numbered(self.basic_ops, "_parameters", 0)
        self.buffer_places, self._buffers = _numbered(self.basic_ops, "_buffers", len(self.places))
        # By op: positions of the parameters whose gradient is added to their main_grad. Empty for most pipelines.
        self._main_grads = {index: at for index, op in enumerate(self.basic_ops) if (at := self._absorbed(index, op))}
        self.main_grad_places = {at: self.places[at] for own in self._main_grads.values() for at in own}
        self._delaying = tuple(index for index, op in enumerate(self.basic_ops) if not op.is_python_op and getattr(op, "delay_wgrad_compute", False))
        self.has_modes = bool(self.main_grad_places or self._delaying)
        for index in self._delaying:
            self.basic_ops[index].wgrad_store.pipelines.add(self)

    def _absorbed(self, index: int, op: BasicOpBase) -> list[int]:
        """Positions of an op's parameters with a main_grad. An op in Python has none, because its own backward computes gradients."""
        if op.is_python_op or not getattr(op, "accumulate_into_main_grad", False) or getattr(op, "delay_wgrad_compute", False):
            return []
        return [self._params[index][op._parameter_names.index(name)] for name in op._main_grad_names]

    def _read_state_slots(self) -> None:
        """Finds the modules that keep state of recipes, and the slots of each op in it. The parts of a module share its state."""
        owners: dict[int, torch.nn.Module] = {}
        numbers: dict[int, int] = {}
        self._state_slots: dict[int, tuple[int, int, int]] = {}  # by op: number of the module, first slot in forward, first slot in backward
        for index, op in enumerate(self.basic_ops):
            if any(op._quantize_slots()):
                holder = op._holder
                owners.setdefault(id(holder), holder)
                self._state_slots[index] = (numbers.setdefault(id(holder), len(numbers)), *op._first_slots())
        self.state_owners = tuple([(owner, *owner._quantize_slots()) for owner in owners.values()])

    def state(self, recipe: str) -> list[torch.Tensor]:
        """The state of the recipe as tensors for a dispatched call; empty if the recipe has no state."""
        length = history_length(recipe)
        if length == 0:
            return []
        self._make_state(length)
        state: list[torch.Tensor] = []
        for owner, _, _ in self.state_owners:
            state += recipe_state.tensors_of(owner.recipe_state)
        return [traced_region(), *state] if is_dynamo_compiling() else _C.state_in_region(state)

    @constant_while_traced
    def _make_state(self, length: int) -> None:
        for owner, forward, backward in self.state_owners:
            recipe_state.of(vars(owner), (forward, backward), length)

    def modes(self) -> Modes:
        """How a call returns gradients that are added to a main_grad, and which gradients it delays. Raises RuntimeError if weights of an op differ."""
        found = main_grad.modes(self.main_grad_places)
        for index, own in self._main_grads.items():
            alike = {found.get(at) for at in own}
            if len(alike) > 1:
                raise RuntimeError(
                    f"{self.basic_ops[index]._get_name()}: expected weights that are alike in requires_grad, overwrite_main_grad, "
                    f"grad_added_to_main_grad and zero_out_wgrad, as accumulate_into_main_grad=True asks, got {len(alike)} kinds. Set them for all."
                )
        delaying = self._delaying if torch.is_grad_enabled() else ()
        delayed = [index for index in delaying if any(weight.requires_grad for weight in self.basic_ops[index]._weights())]
        later = [self.basic_ops[index] for index in delayed if self.basic_ops[index].accumulate_into_main_grad]
        written = [self.places[at] for at, (_, overwrites) in found.items() if overwrites]
        overwritten = [(type(module).__name__, getattr(module, name)) for module, name in written]
        overwritten += [(op._get_name(), weight) for op in later for weight in op._weights() if weight.requires_grad and main_grad.is_overwritten(weight)]
        main_grad.check_overwritten_once(overwritten)
        return Modes(tuple(found.items()), tuple(delayed), is_first=bool(later) and main_grad.in_first_microbatch())

    @staticmethod
    def library_training(flags: tuple[bool, ...], training: bool) -> bool:
        """The training flag of the pipeline: that of its ops if they agree, otherwise True. `ops_text` treats the ops that differ."""
        return training if not flags else flags[0] or True in flags

    def check_count(self, extra: Sequence[torch.Tensor]) -> None:
        if len(extra) != self.num_extra_inputs:
            raise ValueError(wrong_count(self.extra_readers(), len(extra)))

    def extra_readers(self) -> list[str]:
        """For each extra input that the caller passes, the op that reads it."""
        found = enumerate(zip(self.basic_ops, self.bindings, strict=True))
        return [f"op {place} ({op._get_name()})" for place, (op, (inputs, _)) in found for channel in inputs if channel is None]

    def notify(self, x: torch.Tensor, extra: Sequence[torch.Tensor]) -> None:
        """Calls `pre_fuser_forward` of the ops that define it."""
        first = self._first_with_gradient(x, extra)
        for op in self.notified_ops:
            op.pre_fuser_forward(requires_grad=self.basic_ops.index(op) >= first)

    def _first_with_gradient(self, x: torch.Tensor, extra: Sequence[torch.Tensor]) -> int:
        """Index of the first op for which a gradient is required, as TransformerEngine counts: all ops from there on take part in backward."""
        if not torch.is_grad_enabled():
            return len(self.basic_ops)
        if getattr(x, "requires_grad", False):  # x may be no tensor; a later check refuses it
            return 0
        rest = list(extra)
        for index, (op, (inputs, _)) in enumerate(zip(self.basic_ops, self.bindings, strict=True)):
            own, rest = rest[: inputs.count(None)], rest[inputs.count(None) :]
            if any([getattr(tensor, "requires_grad", False) for tensor in (*op.parameters(), *own)]):
                return index
        return len(self.basic_ops)

    def hooked(self) -> tuple[int, ...]:
        """Indices of ops that must be called as modules. Hooks for all modules see the modules of a container, but not the parts of one module."""
        everywhere = self.owner is None and hooks.any_of_all_modules()
        return tuple(
            [
                index
                for index, op in enumerate(self.ops)
                if op is not self.owner and (everywhere or self.own_calls[index] is not None or has_hooks(op))
            ]
        )

    def pipeline(self, flags: tuple[bool, ...], modes: Modes = _NO_MODES) -> _C.EagerPipeline:
        """The eager pipeline for these training flags of `training_ops` and these modes. Arguments of ops in Python are passed in each call."""
        key = (flags, modes) if any(modes) else flags
        found = self.pipelines.get(key)
        if found is not None:
            return found
        modules = {id(module): module for op in self.ops for module in (op, *op.flat_ops(), op._holder)}
        made = _C.EagerPipeline(
            self.ops_text(flags, None, modes, buffers=False, shared=False, name_instances=fusions.any_fusions())[0],
            [(module._parameters, module.__dict__, name) for module, name in self.places],
            [(module.__dict__, module is not self.owner) for module in modules.values()],
            self.owner is None,
            list(self.terms.required),
            float(self.terms.memory_budget) if self.terms.memory_budget else None,
            [at for at, _ in modes.main_grads],
            [maker for index in modes.delayed for maker in self.basic_ops[index].wgrad_store.makers(modes.is_first)],
            [(vars(owner), forward, backward) for owner, forward, backward in self.state_owners],
        )
        if number := inspected.number_of(self):
            made.set_watched(number)
        return _keep(self.pipelines, key, made)

    def ops_text(
        self,
        flags: tuple[bool, ...],
        kwargs: Kwargs | None,
        modes: Modes = _NO_MODES,
        *,
        buffers: bool,
        shared: bool,
        name_instances: bool,
    ) -> tuple[str, list[Any]]:
        """The "ops" of a description, with `buffers` among the operands if wanted, and the objects that must live as long as the text. If training
        flags differ, ops in evaluation are written as identities."""
        by_param = dict(modes.main_grads)
        given = dict(modes.given)
        first_in_backward = {at: index for index, absorbing in sorted(self._main_grads.items()) for at in absorbing}
        by_op = dict(zip(map(id, self.training_ops), flags, strict=False))
        mixed = len(set(flags)) == 2
        entries, held = [], []
        for index, op in enumerate(self.basic_ops):
            kind, label, options = op._kind, "", {}
            if op.is_python_op:
                count = len(self._buffers[index]) if buffers else 0
                kind, key, referred = python_op.entry(op, len(self._params[index]), count, (kwargs or {}).get(index, {}), shared=shared)
                label, options = type(op).__name__, {"key": key}
                held.append(referred)
            elif mixed and by_op.get(id(op)) is False:
                kind = "identity"
            else:
                options = op._options()
            if name_instances:
                python_op.instances[op.instance_id] = op
            absorbed = [at for at in self._main_grads.get(index, ()) if at in by_param]
            if absorbed:
                dummy, overwrite = by_param[absorbed[0]]
                overwrite = overwrite and first_in_backward[absorbed[0]] == index  # later ones in backward add
                options |= {"accumulate_into_main_grad": True, "dummy_gradient": dummy, "overwrite_main_grad": overwrite}
            is_delaying = index in modes.delayed
            options |= {"delay_wgrad": True} if is_delaying else {}
            options |= dict.fromkeys(given.get(index, ()), True)
            inputs, outputs = self.bindings[index]
            is_bound = any(channel is not None for channel in op._extra_input_channels)  # a sum with a channel never writes in place
            entries.append(
                _C.OpEntry(
                    op=kind,
                    label=label,
                    options=options,
                    params=self._params[index] + self._buffers[index] if buffers else self._params[index],
                    joins=list(op._joins),
                    main_grads=absorbed,
                    deferred=op.wgrad_store.tensors if is_delaying else 0,
                    given=len(given.get(index, ())),
                    extra_inputs=inputs,
                    extra_outputs=outputs,
                    in_place=getattr(op, "in_place", False) and not op.is_python_op and not is_bound,
                    state=self._state_slots.get(index) if kind == op._kind else None,
                    instance=op.instance_id if name_instances else "",
                    recompute=op._recompute,
                    keeps_dtype=op._keeps_dtype,
                )
            )
        return _C.write_ops(entries), held

    # Dispatched calls: under torch.compile, and for parametrized weights.

    def call_op(self, x: torch.Tensor, extra: Sequence[torch.Tensor], training: bool, kwargs: Kwargs | None) -> Outputs:
        described = self.described if is_dynamo_compiling() else None
        flags = tuple([op.training for op in self.training_ops])
        recipe = _C.in_force.recipe
        # In a region that is entered inside a compiled function, `described` does not depend on what fusion functions return under its recipe.
        version = structure.fusions_text if recipe != _C.in_force.outside_compiled_code else None
        modes = self.modes() if self.has_modes else None
        self._check_traceable(modes, kwargs)
        if modes is not None and modes.delayed:  # no code could compute a graph's gradients later, so its backward computes them
            note_graph(described)
            for index in () if described else modes.delayed:
                self.basic_ops[index].wgrad_store.has_graphs = True
            modes = modes._replace(delayed=())
        budget = self.terms.memory_budget or _C.in_force.memory_budget
        wanted = (described, flags, training, recipe, version, () if modes is None else tuple(modes), budget)
        objects, held = False if is_dynamo_compiling() else python_op.has_objects(kwargs), []
        for_codes: list[torch.Tensor] = []
        name, stamps, likes = "", (), ()
        if described is not None and recipe != "null" and not kwargs and not torch.compiler.is_exporting():
            traits = tuple([(tensor.requires_grad, tensor.dtype, tensor.device) for tensor in (x, *extra)])
            text, name, stamps, likes = self.text_with_workspaces(wanted, traits, torch.is_grad_enabled())
        if name:
            for_codes = getattr(self.workspaces, name)
        elif objects:
            text, held = self.described_now(wanted, kwargs)
        else:
            python_op.check_plain(kwargs)
            text = self.text(wanted, kwargs)
        params = [getattr(module, name, None) for module, name in (*self.places, *self.buffer_places)]
        for (_, name), param in zip((*self.places, *self.buffer_places), params, strict=True):
            if param is None:  # without this check, the dispatcher's error would be about casts
                raise ValueError(f"pipeline: expected a tensor as parameter {name}, got NoneType. Assign a torch.nn.Parameter to it.")
        for at, shape, dtype in likes:
            if tuple(params[at].shape) != shape or params[at].dtype != dtype:  # tensors that replace the module's own, as under functional_call
                text, for_codes, stamps = self.text(wanted, kwargs), [], ()
                break
        if said := _C.in_force.said_of_weights if stamps else "":
            for at in stamps:
                torch.ops.tandem.say_of_weight_(for_codes[at], 1 if said == "first micro-batch" else 2)
        buffers = main_grad.buffers([self.places[at] for at, _ in (() if modes is None else modes.main_grads)])
        try:
            outputs = torch.ops.tandem.pipeline(x, list(extra), params, for_codes, self.state(recipe), buffers, text)
        finally:
            if objects:
                python_op.let_go(self.python_ops, held)
        return tuple([outputs[i] for i in range(self.num_outputs)]) if self.num_outputs > 1 else outputs[0]

    def _check_traceable(self, modes: Modes | None, kwargs: Kwargs | None) -> None:
        """Raises NotImplementedError if the call writes tensors that only a direct call can write."""
        for index in () if modes is None else modes.delayed:
            if self.basic_ops[index].accumulate_into_main_grad:
                raise NotImplementedError(
                    f"{self.basic_ops[index]._get_name()}: expected delay_wgrad_compute=False with accumulate_into_main_grad=True where the call goes "
                    "through torch's dispatcher, got True. Build the op without one of them for compiled code."
                )
        for index in kwargs or ():
            op = self.basic_ops[index]
            if not op.is_python_op and op._call_buffers:
                raise NotImplementedError(
                    f"{op._get_name()}: expected no {' or '.join(op._call_buffers)} where the call goes through torch's dispatcher, got one. Leave "
                    "it out in compiled code."
                )

    def _describe(self) -> str:
        """A text of everything that a description depends on, except the arguments of `text`. Dynamo guards it: equal texts share compiled code."""
        token = self.token
        made = self._made_by_fusions(_C.in_force.outside_compiled_code)
        written = tuple([identity(op) for op in self.python_ops])  # computed each time, because no event reports changes of their attributes
        key = ("described", structure.native_fusions(), made, written)
        if key not in self.texts:
            flags = tuple([True for _ in self.training_ops])
            ops, _ = self.ops_text(flags, None, buffers=True, shared=True, name_instances=bool(made))
            text = _keep(self.texts, key, sys.intern(json.dumps([ops, self.terms, *key])))
        else:
            text = self.texts[key]
        if not self.python_ops and not fusions.any_fusions():  # then nothing but `token` can change the text
            self.__dict__.update(described_text=text, described_token=token)  # in one step, because other threads read both
        return text

    # Workspaces for codes of weights in compiled code: tensors of the graph, which it writes.

    @constant_while_traced
    def text_with_workspaces(
        self, wanted: Wanted, traits: tuple[tuple[bool, torch.dtype, torch.device], ...], grad_mode: bool
    ) -> tuple[str, str, tuple[int, ...], tuple[tuple[int, tuple[int, ...], torch.dtype], ...]]:
        """The description of a call with workspaces for its weights, the name of these workspaces, the positions of stamps among them, and shapes and
        dtypes of the weights. All are empty if the call can have no workspaces."""
        params = workspaces.plain([getattr(module, name, None) for module, name in (*self.places, *self.buffer_places)])
        if params is None:
            return "", "", (), ()
        key = (*wanted, "with workspaces")
        known = self.descriptions.get(key)
        if known is None or self.python_ops:
            known = self.described_now(wanted, None, cache_weights=True)
        with torch.set_grad_enabled(grad_mode):
            found = _C.workspace_specs(known[0], traits, params)
        specs = tuple([(tuple(places), quantizer, tuple(parts)) for places, quantizer, parts in found])
        if not specs:
            return "", "", (), ()
        _keep(self.descriptions, key, known)
        workspaces.note(wanted[0], specs)  # type: ignore[arg-type]
        name = workspaces.fit(self.held_workspaces, specs, params)
        likes = tuple([(at, tuple(params[at].shape), params[at].dtype) for places, _, _ in specs for at in places])
        return known[0], name, workspaces.stamps(getattr(self.held_workspaces, name)), likes

    def _workspaces(self) -> workspaces.Held:
        """The workspaces for all pipelines with this description, so that code compiled for another pipeline finds them at its first call here."""
        token, held = self.token, self.held_workspaces
        described = self.described
        workspaces.watch(described, self)
        if known := workspaces.known(described):
            params = workspaces.plain([getattr(module, name, None) for module, name in (*self.places, *self.buffer_places)])
            for specs in known if params is not None else ():
                workspaces.fit(held, specs, params)  # type: ignore[arg-type]
        self.__dict__.update(workspaces_token=token)
        return held

    workspaces = property(_C.native_getter(_workspaces, "changes", "workspaces_token", "held_workspaces"))

    described = property(_C.native_getter(_describe, "changes", "described_token", "described_text"))

    def _made_by_fusions(self, recipe: str) -> tuple[Any, ...]:
        """What the registered functions return for these ops under a recipe; empty if no function is registered."""
        if not fusions.any_fusions():
            return ()
        key = ("fusions", structure.fusions, recipe)
        made = self.texts.get(key)
        return _keep(self.texts, key, fusions.fusions_made(self.basic_ops, recipe)) if made is None else made

    @constant_while_traced
    def text(self, wanted: Wanted, kwargs: Kwargs | None) -> str:
        """The description of a call. In a trace it depends only on its arguments, all of which Dynamo guards."""
        described, *others = wanted
        ours = (structure.native_fusions(), structure.fusions) if described is None else described
        key = (ours, *others, python_op.kwargs_key(kwargs))
        known = self.descriptions.get(key)
        if known is None or described is not None and self.python_ops:  # these ops are being traced; a known text may name others with equal identity
            known = _keep(self.descriptions, key, self.described_now(wanted, kwargs))
        return known[0]

    def described_now(self, wanted: Wanted, kwargs: Kwargs | None, *, cache_weights: bool = False) -> tuple[str, list[Any]]:
        """The description, and the objects that must live as long as it. `cache_weights`: whether the call has workspaces."""
        described, flags, training, recipe, _, modes, budget = wanted
        made = self._made_by_fusions(recipe)
        ops, held = self.ops_text(flags, kwargs, Modes(*modes), buffers=True, shared=described is not None, name_instances=bool(made))
        description = _C.write_description(
            ops,
            recipe,
            training=self.library_training(flags, training),
            required_fusions=list(self.terms.required),
            fusions_version=_C.fusions_version() if made else structure.native_fusions(),
            process=uuid.uuid4().hex if made or self.python_ops else "",
            memory_budget=float(budget) if budget else None,
            cache_weights=cache_weights,
        )
        return description, held
