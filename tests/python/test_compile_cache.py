"""Compile caches on disk must not outlive what they were made from: a changed Python op gives other numbers, not a cache hit."""

import os
import subprocess
import sys
import textwrap

OP = """
import tandem, torch

class Scaled(tandem.ops.BasicOperation):
    def op_forward_compute(self, input_, **unused):
        return input_ * {factor}, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        ctx.save_for_backward()

    def op_backward(self, ctx, grad_output):
        return grad_output * {factor}, ()
"""

GLOBAL = OP.replace("{factor}", "FACTOR").replace("import tandem, torch\n", "import tandem, torch\nfrom factor_of_op import FACTOR\n")

RUN = """
import torch, tandem
import scaled_op

torch.manual_seed(0)
model = torch.compile(tandem.ops.Sequential(scaled_op.Scaled(), tandem.ops.GELU()), fullgraph=True)
x = torch.ones(4, requires_grad=True)
y = model(x)
y.sum().backward()
print(f"{y[0].item():.6f} {x.grad[0].item():.6f}")
"""


def run(folder, factor, source=OP):
    (folder / "scaled_op.py").write_text(source.replace("{factor}", str(factor)))
    (folder / "factor_of_op.py").write_text(f"FACTOR = {factor}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(RUN)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [float(word) for word in result.stdout.split()]


def test_a_changed_op_is_compiled_again_from_a_warm_cache(tmp_path):
    two, again, three = run(tmp_path, 2.0), run(tmp_path, 2.0), run(tmp_path, 3.0)
    assert two == again
    assert abs(two[0] - 1.954598) < 1e-4  # gelu(2), tanh form
    assert abs(three[0] - 2.996363) < 1e-4  # gelu(3)
    assert three[1] > 2.9 > two[1]


def test_a_changed_global_is_compiled_again_from_a_warm_cache(tmp_path):
    two, three = run(tmp_path, 2.0, GLOBAL), run(tmp_path, 3.0, GLOBAL)
    assert abs(two[0] - 1.954598) < 1e-4 and abs(three[0] - 2.996363) < 1e-4


def test_what_no_fingerprint_sees_is_read_again_in_another_process(tmp_path, monkeypatch):
    source = OP.replace("{factor}", 'float(os.environ["FACTOR"])').replace("import tandem, torch\n", "import os, tandem, torch\n")
    results = []
    for factor in ("2.0", "3.0"):
        monkeypatch.setenv("FACTOR", factor)
        results.append(run(tmp_path, 0.0, source))
    assert abs(results[0][0] - 1.954598) < 1e-4 and abs(results[1][0] - 2.996363) < 1e-4
