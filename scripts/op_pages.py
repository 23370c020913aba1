"""A page per op, from its definition and from one call of it: shapes, dtypes, kept values, and the steps of both directions."""

import json

ROWS, WIDTH, OUT, GROUPS = 6, 44, 26, 3  # distinct sizes, so that a size identifies its dimension

RULES = {
    "weight": "Computes in the dtype of `torch.autocast` of the tensor's device, else in that of its first parameter; the other operands are cast to it.",
    "input": "Computes in the dtype of `torch.autocast` of the tensor's device, else in that of x; the other operands are cast to it.",
    "promote": "Computes in the dtype to which torch promotes the operands. `torch.autocast` changes nothing{but}.",
    "promote_number": "Computes in the dtype to which torch promotes x with a number that has a fraction. `torch.autocast` changes nothing.",
}
NO_FUSIONS = "None that is built in.\n"
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "bool")


def rule(op: dict) -> str:
    return RULES[op["dtype_rule"]].replace("{but}", ", but that a parameter follows x" if op["parameters"] else "")


def sample(op: dict, dtype=None):
    """The op as a module, and a function that returns its extra inputs for an x; None if the op needs other processes."""
    import torch
    from tandem.ops import library

    made = library.class_of(op["name"])
    if any(option["is_required"] and option["name"] == "group" for option in op["options"]):
        return None
    given = {"dtype": dtype} if op["parameters"] else {}
    special = {
        "basic_linear": lambda: made(WIDTH, OUT, **given),
        "grouped_linear": lambda: made(GROUPS, WIDTH, OUT, **given),
        "cross_entropy": lambda: made(),
        "linear_cross_entropy": lambda: made(WIDTH, OUT, **given),
        "linear_cross_entropy_with_predictions": lambda: made(WIDTH, OUT, **given),
        "rotary": lambda: made(9, 4, num_kv_heads=1),
        "attention": lambda: made(9, 4, num_kv_heads=1),
        "qk_norm": lambda: made(9, 4, num_kv_heads=1, **given),
        "reshape": lambda: made((-1, 4)),
        "constant_scale": lambda: made(2.0),
        "dropout": lambda: made(0.25),
    }
    module = special[op["name"]]() if op["name"] in special else made(*[WIDTH] * len(op["sizes"]), **given)

    def extras(x):
        like = {"scale": lambda: torch.ones(x.shape[-1], dtype=x.dtype), "shift": lambda: torch.ones(x.shape[-1], dtype=x.dtype), "splits": lambda: torch.tensor([1, 0, len(x) - 1]), "scales": lambda: torch.ones(x.shape[:-1], dtype=x.dtype), "targets": lambda: torch.zeros(x.shape[:-1], dtype=torch.int64)}
        return [like.get(name, lambda: torch.ones_like(x))() for name in op["extra_inputs"]]

    return module, extras


def _input(dtype):
    import torch

    return torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=dtype.is_floating_point)


def _first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _size(op: dict, size: int) -> str:
    width = op["sizes"][0]["name"] if op["sizes"] else "in_features" if op["name"] == "grouped_linear" else "features"
    names = {WIDTH: width, OUT: "out_features", WIDTH // 2: f"{width} / 2", ROWS: "rows", 4: "4"}
    return names.get(size, str(size))


def shapes(op: dict) -> str:
    """The shapes of a call, in one line."""
    import torch

    module, extras = sample(op)
    x = _input(torch.float32)
    y = _first(module(x, *extras(x)))
    if op["name"] in OWN_SHAPES:
        return OWN_SHAPES[op["name"]]
    if op["name"] in OF_HEADS:
        return f"x [..., sequence, (num_heads + 2 num_kv_heads) head_dim], queries, keys and values side by side -> {OF_HEADS[op['name']]}."
    operands = [f"x [..., {_size(op, x.shape[-1])}]"]
    for name, tensor in zip(op["extra_inputs"], extras(x)):
        inner = {"splits": "num_groups"}.get(name) or ("..." if tensor.dim() < x.dim() else f"..., {_size(op, tensor.shape[-1])}")
        operands.append(f"{name} [{inner}]")
    outputs = [f"y [..., {_size(op, y.shape[-1])}]" if y.dim() else "y []"] + [f"{name} like {'targets' if name == 'predictions' else 'x'}" for name in op["extra_outputs"]]
    broadcasts = " Either is broadcast to the other where the caller passes it, or where no gradient of it is needed." if op["name"] == "add_extra_input" else ""
    return f"{', '.join(operands)} -> {', '.join(outputs)}.{broadcasts}"


OWN_SHAPES = {
    "reshape": "x of any shape with a fitting number of elements -> y of `shape`.",
    "modulate": "x [..., features], scale and shift that broadcast to x, such as [batch, 1, features] or [features] -> y [..., features].",
}
OF_HEADS = {
    "rotary": "y like x; with `tables` the extra inputs cosines and sines, [sequence, rotated_features] each, or what broadcasts to [..., sequence, rotated_features]",
    "attention": "y [..., sequence, num_heads head_dim]; with `mask` the extra input mask, which broadcasts to [..., num_heads, sequence, sequence]",
    "qk_norm": "y like x",
}


# The shape of y on each rank, for x [rows, ...] on each of `size` ranks.
COLLECTIVES = {
    "all_gather": "x [rows, ...] -> y [rows size, ...]; backward sums and scatters: grad of x [rows, ...]",
    "reduce_scatter": "x [rows, ...] -> y [rows / size, ...]; backward gathers: grad of x [rows, ...]",
    "all_reduce": "x [...] -> y [...]; backward passes the gradient on, which is the same on each rank",
    "reduce_gradient": "x [...] -> y [...], x itself; backward sums the gradient over the ranks",
}


def call(op: dict) -> str:
    """The call of the op's class in Python, with its arguments and defaults."""
    import inspect

    shown, is_behind_star = [], False
    for name, parameter in inspect.signature(op["class"]).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_behind_star:
            shown.append("*")
            is_behind_star = True
        shown.append(name if parameter.default is parameter.empty else f"{name}={parameter.default!r}")
    return f"```text\n{op['python']}({', '.join(shown)})\n```\n"


def dtypes(op: dict) -> list[str]:
    """The rows of a table of dtypes: x, parameters if there are any, y, y under autocast."""
    import torch

    rows = []
    kinds = [(name, name if name.startswith(("float", "bfloat")) else "float32") for name in _DTYPES]
    if op["parameters"] or op["name"] == "grouped_linear":
        kinds.insert(3, ("bfloat16", "float32"))
    for of_x, of_params in kinds:
        module, extras = sample(op, getattr(torch, of_params))
        x = _input(getattr(torch, of_x))

        def result(module=module, extras=extras, x=x) -> str:
            try:
                return str(_first(module(x, *extras(x))).dtype).removeprefix("torch.")
            except (TypeError, NotImplementedError, RuntimeError, ValueError):
                return "refused"

        plain = result()
        with torch.autocast("cpu", torch.bfloat16):
            under = result()
        params = f" {of_params} |" if op["parameters"] or op["name"] == "grouped_linear" else ""
        rows.append(f"| {of_x} |{params} {plain} | {under} |")
    return rows


def _short(op: dict, name: str) -> str:
    for index, extra in enumerate(op["extra_inputs"]):
        name = name.replace(f"extra {index}", extra)
    return name.replace(f"0.{op['name']}.", "")


def plan(op: dict) -> dict:
    """The plan of one call with gradients."""
    import torch
    import tandem.ops

    module, extras = sample(op, torch.float32)
    box = tandem.ops.Sequential(module)
    x = _input(torch.float32)
    given = [extra.requires_grad_() if extra.is_floating_point() else extra for extra in extras(x)]
    outputs = box(x, *given)
    outputs = [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return json.loads(box.explain("json"))["plans"][-1]


def kept(op: dict, planned: dict) -> str:
    held = planned.get("kept") or []
    if not held:
        return "Nothing.\n"
    rows = []
    for value in held:
        name = _short(op, value["value"])
        if not value["costs_memory"]:
            rows.append(f"| `{name}` | {value['type']} | the argument itself |")
            continue
        per_row = value["bytes"] / ROWS
        size = f"{per_row:g} bytes per row" if per_row == int(per_row) else f"{value['bytes']} bytes"
        rows.append(f"| `{name}` | {value['type']} | {size} |")
    return f"By itself, in float32, with {WIDTH} features:\n\n| | | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def picture(op: dict, planned: dict) -> str:
    """The steps of both directions."""
    lines = []
    for direction in ("forward", "backward"):
        for step in planned.get(direction) or []:
            reads, writes = [", ".join(_short(op, name) for name in step[field]) for field in ("reads", "writes")]
            lines.append((direction, step["kind"], f"{reads} -> {writes}"))
    if not lines:
        return "No step: a name for what is there.\n"
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "```text\n" + "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in lines) + "\n```\n"


def fusions(op: dict) -> str:
    from tandem import _C

    rows = [f"| {fusion.pass_name} | `{fusion.name}` | `{fusion.picture}` |" for fusion in _C.built_in_fusions() if fusion.name in op["fusions"]]
    return "| pass | fusion | what it replaces |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else NO_FUSIONS


def opening(op: dict, section: str) -> str:
    """The start of an op's page, which needs only the definition."""
    return f"# {op['name']}\n\n{section}\nBack to [all ops](../ops.md).\n\n## In Python\n\n{call(op)}"


def page(op: dict, section: str) -> str:
    """The page of an op. `section` documents its arguments."""
    text = opening(op, section)
    if sample(op) is None:
        text += f"\n## Shapes\n\n{COLLECTIVES[op['name']]}.\n\n## Dtypes\n\n{rule(op)}\n\n## Kept for backward\n\nNothing.\n"
        text += f"\n## Steps\n\n```text\nforward   {op['name']}           x -> y\nbackward  {op['name']}.backward  grad of y -> grad of x\n```\n"
        text += "\nEach is one call of `torch.distributed`: see [distributed training](../guide/distributed.md).\n"
    else:
        planned = plan(op)
        head = "| x | parameters | y | y under autocast to bfloat16 |" if "parameters" in _head(op) else "| x | y | y under autocast to bfloat16 |"
        text += f"\n## Shapes\n\n{shapes(op)}\n"
        text += f"\n## Dtypes\n\n{rule(op)}\n\n{head}\n{'|---' * (head.count('|') - 1)}|\n" + "\n".join(dtypes(op)) + "\n"
        text += f"\n## Kept for backward\n\n{kept(op, planned)}"
        text += f"\n## Steps\n\n{picture(op, planned)}"
    return text + f"\n## Fusions\n\n{fusions(op)}"


def _head(op: dict) -> tuple[str, ...]:
    return ("parameters",) if op["parameters"] or op["name"] == "grouped_linear" else ()
