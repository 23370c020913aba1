"""Files that versions with other names of modules have written: pickles name the module of what they hold."""

import importlib
import io
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

import tandem

PRINT = "print(type(x).__name__, x.quantizer, x.dequantize().sum().item())"
LOADS = {
    "pickle": f"import pickle, sys; x = pickle.load(open(sys.argv[1], 'rb')); {PRINT}",
    "torch": f"import torch, tandem, sys; x = torch.load(sys.argv[1], weights_only=True); {PRINT}",
}


def as_before(data: bytes) -> bytes:
    """A pickle with the names that modules had."""
    for former, module in tandem._FORMER_MODULES.items():
        data = data.replace(f"ctandem.{module}\n".encode(), f"ctandem.{former}\n".encode())
    return data


def pickled(x: torch.Tensor) -> bytes:
    return as_before(pickle.dumps(x, protocol=0))


def saved(x: torch.Tensor) -> bytes:
    written, renamed = io.BytesIO(), io.BytesIO()
    torch.save(x, written)
    with zipfile.ZipFile(written) as before, zipfile.ZipFile(renamed, "w") as behind:
        for name in before.namelist():
            data = before.read(name)
            behind.writestr(name, as_before(data) if name.endswith("data.pkl") else data)
    return renamed.getvalue()


@pytest.mark.parametrize(("write", "load"), [(pickled, "pickle"), (saved, "torch")], ids=["pickle", "torch"])
def test_a_process_that_has_not_loaded_the_package_reads_quantized_tensors(write, load, tmp_path):
    x = tandem.quantize(torch.ones(4, 64), tandem.MXFP8Quantizer(torch.float8_e4m3fn))
    data = write(x)
    assert b"tandem._quantized_tensor" in data and b"tandem._quantizer" in data and b"tandem.quantized" not in data
    (tmp_path / "saved").write_bytes(data)
    result = subprocess.run([sys.executable, "-c", LOADS[load], tmp_path / "saved"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"QuantizedTensor {x.quantizer} 256.0\n"


@pytest.mark.parametrize("thing", [tandem.autocast, tandem.checkpoint, tandem.quantize, tandem.MXFP8Quantizer, tandem.report.inspection.Watched])
def test_what_is_known_by_its_name_is_found(thing):
    data = as_before(pickle.dumps(thing, protocol=0))
    assert b"tandem._" in data
    assert pickle.loads(data) is thing


@pytest.mark.parametrize("former", tandem._FORMER_MODULES)
def test_former_names_are_those_of_modules(former):
    module = importlib.import_module(f"tandem.{former}")
    assert module is importlib.import_module(f"tandem.{tandem._FORMER_MODULES[former]}")
