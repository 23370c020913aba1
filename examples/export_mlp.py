"""Exports a pipeline as an AOTInductor package, which run_exported.cpp runs without Python: `export_mlp.py mlp.pt2`, `run_exported mlp.pt2`."""

import sys

import torch

import tandem


def main(path: str) -> None:
    torch.manual_seed(0)
    ops = tandem.ops
    mlp = ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 64), ops.SwiGLU(), ops.Linear(32, 8)).eval()
    x = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)
    with torch.no_grad():
        rows = torch.export.Dim("rows", min=2, max=1024)
        program = torch.export.export(mlp, (x,), dynamic_shapes={"input": {0: rows}})
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        for row in mlp(x).tolist():
            print(*(f"{value:.9g}" for value in row))


if __name__ == "__main__":
    main(sys.argv[1])
