"""Compile caches on disk must not outlive what they were made from: a changed Python op gives other numbers, not a cache hit."""

import json
import os
import subprocess
import sys

OP = """
import os, tandem
from factor_of_op import FACTOR

class {name}(tandem.ops.BasicOperation):
    def op_forward_compute(self, input_, **unused):
        return input_ * {factor}, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        ctx.save_for_backward()

    def op_backward(self, ctx, grad_output):
        return grad_output * {factor}, ()
"""
# What its factor is written as. Both processes know the op by the same number, and it has no attributes.
OPS = {"Changed": "{factor}", "Global": "FACTOR", "Environment": 'float(os.environ["FACTOR"])', "Unchanged": "2.0"}

# One graph for each op, so that each is found or not found by itself.
RUN = """
import json, torch, torch._inductor, tandem
import scaled_ops

torch._inductor.config.fallback_by_default = True  # caches are the same, and no C++ compiler runs
results = {}
for name in %r:
    model = torch.compile(tandem.ops.Sequential(getattr(scaled_ops, name)(), tandem.ops.GELU()), fullgraph=True)
    x = torch.ones(4, requires_grad=True)
    y = model(x)
    y.sum().backward()
    results[name] = [y[0].item(), x.grad[0].item()]
counters = torch._dynamo.utils.counters
print(json.dumps([results, counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]]))
"""


def run(folder, factor):
    (folder / "scaled_ops.py").write_text("".join(OP.format(name=name, factor=text.format(factor=factor)) for name, text in OPS.items()))
    (folder / "factor_of_op.py").write_text(f"FACTOR = {factor}")
    environment = {
        **os.environ,
        "FACTOR": str(factor),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    result = subprocess.run([sys.executable, "-c", RUN % [*OPS]], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_what_has_changed_is_compiled_again_from_a_warm_cache(tmp_path):
    (two, _), (three, hits) = run(tmp_path, 2.0), run(tmp_path, 3.0)
    assert hits > 0, "the op that is as it was is found, so the others could have been"
    for name in OPS:
        assert abs(two[name][0] - 1.954598) < 1e-4, name  # gelu(2), tanh form
    assert three.pop("Unchanged") == two["Unchanged"]
    for name, (y, grad) in three.items():
        assert abs(y - 2.996363) < 1e-4, name  # gelu(3)
        assert grad > 2.9 > two[name][1], name
