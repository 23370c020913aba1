"""What a QuantizedTensor survives: copies, moves, views, slices, pickles, checkpoints, workers."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support import saved_and_loaded

import tandem
from tandem import ops
from tandem.quantized.parts import PARTS
from tandem.recipe import Float8CurrentScaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QUANTIZERS = {
    "current": tandem.Float8CurrentScalingQuantizer(E4M3),
    "rows": tandem.Float8CurrentScalingQuantizer(E5M2, columnwise=False),
    "mxfp8": tandem.MXFP8Quantizer(E4M3),
    "squares": tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "lines": tandem.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "nvfp4": tandem.NVFP4Quantizer(),
    "columns": tandem.MXFP8Quantizer(E4M3, rowwise=False),
}
EACH = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def same(a, b):
    assert type(a) is type(b) is tandem.QuantizedTensor
    assert a.shape == b.shape and a.dtype == b.dtype and a.quantizer.text == b.quantizer.text
    for name in PARTS:
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), name
    assert (a.columnwise_data is a.rowwise_data) == (b.columnwise_data is b.rowwise_data)
    return True


@EACH
def test_copies_and_moves(quantizer):
    x = torch.randn(64, 160)
    codes = tandem.quantize(x, quantizer)
    for other in (codes.detach(), codes.clone(), codes.to("cpu"), codes.to("cpu", copy=True), codes.cpu(), codes.contiguous(), copy.deepcopy(codes), copy.copy(codes)):
        same(other, codes)
    half = codes.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.dequantize(), codes.dequantize().bfloat16())
    same(half.float(), codes)
    assert type(codes.double()) is torch.Tensor and torch.equal(codes.double(), codes.dequantize().double())
    meta = codes.to("meta")
    assert isinstance(meta, tandem.QuantizedTensor) and meta.is_meta
    written = tandem.quantize(torch.zeros(64, 160), quantizer)
    same(written.copy_(codes), codes)
    same(written.copy_(x), codes)
    plain = torch.empty(64, 160)
    assert torch.equal(plain.copy_(codes), codes.dequantize())


@EACH
def test_views_of_rows_share_the_codes(quantizer):
    codes = tandem.quantize(torch.randn(8, 16, 160), quantizer)
    for view in (codes.view(-1, 160), codes.view(2, 4, 16, 160), codes.flatten(0, 1), codes.reshape(128, 160), codes.unsqueeze(0), codes.view_as(codes)):
        assert isinstance(view, tandem.QuantizedTensor)
        wanted = codes.dequantize().view(view.shape)
        assert torch.equal(view.dequantize(), wanted)
        if codes.columnwise_data is not None:
            assert torch.equal(view.dequantize(columnwise=True), codes.dequantize(columnwise=True).view(view.shape))
        part = "rowwise_data" if codes.rowwise_data is not None else "columnwise_data"
        assert getattr(view, part).data_ptr() == getattr(codes, part).data_ptr()
    view = codes.view(-1, 160)
    with torch.no_grad():
        view.copy_(torch.ones(128, 160))
    assert torch.equal(codes.dequantize(), torch.ones(8, 16, 160))
    flat = codes.view(-1)
    assert torch.equal(flat * 2, codes.dequantize().view(-1) * 2) and "QuantizedTensor" in repr(flat) and flat.shape == (8 * 16 * 160,)
    for plain in (codes.transpose(0, 1), codes[0], codes.expand(2, 8, 16, 160)):
        assert not isinstance(plain, tandem.QuantizedTensor) and type(plain + 1) is type(plain.clone()) is torch.Tensor


@EACH
def test_slices_of_whole_blocks_of_rows_stay_quantized(quantizer):
    codes = tandem.quantize(torch.randn(384, 160), quantizer)
    for part, first in zip(codes.split(128), (0, 128, 256), strict=True):
        assert isinstance(part, tandem.QuantizedTensor) and part.shape == (128, 160)
        for columnwise in (False, True):
            if columnwise and codes.columnwise_data is None:
                continue
            assert torch.equal(part.dequantize(columnwise=columnwise), codes.dequantize(columnwise=columnwise)[first : first + 128])
        same(codes[first : first + 128], part)
    assert torch.equal(codes[5:9], codes.dequantize()[5:9])  # decoded where it cuts blocks
    assert torch.equal(codes[::2], codes.dequantize()[::2])


def test_gradients_go_through_views():
    weight = torch.nn.Parameter(tandem.quantize(torch.randn(4, 8, 32), QUANTIZERS["mxfp8"]))
    x = torch.randn(5, 32)
    (x @ weight.view(32, 32).t()).sum().backward()
    assert torch.allclose(weight.grad, x.sum(0).expand(4, 8, 32))


@EACH
@pytest.mark.parametrize("shape", [(64, 160), (3, 5, 21), (7,), (0, 8)])
def test_pickles_and_copies_of_any_shape(quantizer, shape):
    codes = tandem.quantize(torch.randn(shape).bfloat16(), quantizer)
    codes.note = "kept"
    loaded = saved_and_loaded({"weight": codes, "again": codes})
    assert loaded["weight"] is loaded["again"] and loaded["weight"].note == "kept"
    for other in (loaded["weight"], pickle.loads(pickle.dumps(codes)), copy.deepcopy(codes), codes.clone(), codes.detach()):
        same(other, codes)
        assert other.dequantize().shape == shape
    param = pickle.loads(pickle.dumps(torch.nn.Parameter(codes)))
    assert isinstance(param, torch.nn.Parameter) and param.requires_grad


def test_the_scale_of_a_given_one_is_pickled():
    quantizer = tandem.Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3)
    codes = tandem.quantize(torch.randn(4, 32), quantizer)
    for other in (pickle.loads(pickle.dumps(codes)), copy.deepcopy(codes)):
        same(other, codes)
        assert other.quantizer.scale.item() == 4 and other.quantizer.scale is not quantizer.scale


class Items(torch.utils.data.Dataset):
    def __init__(self, codes):
        self.codes = codes

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.codes


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_get_and_give_them(context):
    codes = tandem.quantize(torch.randn(64, 160), QUANTIZERS["nvfp4"])
    loader = torch.utils.data.DataLoader(Items(codes), batch_size=None, num_workers=1, multiprocessing_context=context)
    for other in loader:
        same(other, codes)


def linear(quantizer, seed=0):
    torch.manual_seed(seed)
    made = ops.Linear(160, 64)
    made.weight = torch.nn.Parameter(tandem.quantize(made.weight.detach(), quantizer))
    return made


@EACH
def test_safetensors(quantizer, tmp_path):
    module, other = linear(quantizer), linear(quantizer, 1)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    other.load_state_dict(load_file(tmp_path / "state.safetensors"))
    same(other.weight.detach(), module.weight.detach())


@EACH
def test_distributed_checkpoints(quantizer, tmp_path):
    module, other = linear(quantizer), linear(quantizer, 1)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    same(other.weight.detach(), module.weight.detach())


@pytest.mark.parametrize("in_place", [False, True])
def test_what_another_quantizer_made_is_decoded(in_place, tmp_path):
    module = linear(tandem.MXFP8Quantizer(E4M3))
    for quantizer in (tandem.MXFP8Quantizer(E5M2), *([] if in_place else QUANTIZERS.values())):
        other = linear(quantizer, 1)
        state = module.state_dict()
        if in_place:  # codes of the other format are read into this one's memory
            dcp.save(state, checkpoint_id=tmp_path)
            state = other.state_dict()
            dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state)
        wanted = tandem.quantize(module.weight.detach().dequantize(), quantizer)
        same(other.weight.detach(), wanted)
    plain = ops.Linear(160, 64)
    plain.load_state_dict(module.state_dict())
    assert type(plain.weight) is torch.nn.Parameter and torch.equal(plain.weight, module.weight.dequantize())
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight.dequantize(), tandem.quantize(plain.weight.detach(), module.weight.quantizer).dequantize())


def test_states_without_the_quantizer_are_those_of_the_parameter():
    module, other = linear(QUANTIZERS["current"]), linear(QUANTIZERS["current"], 1)
    state = module.state_dict()
    del state["weight.quantizer"]
    old = {**state, "weight.columnwise_data": state["weight.rowwise_data"], "weight.columnwise_scale_inv": state["weight.rowwise_scale_inv"]}
    for each in (state, old):
        other.load_state_dict(each, strict=False)  # strictly a key is missing
        same(other.weight.detach(), module.weight.detach())
    with pytest.raises(RuntimeError, match="weight: expected plain numbers in the state dict, as the parameter has, got rowwise_data"):
        ops.Linear(160, 64).load_state_dict(state)
    scales = {"weight.rowwise_scale_inv": state["weight.rowwise_scale_inv"], "weight.quantizer": module.state_dict()["weight.quantizer"], "bias": state["bias"]}
    with pytest.raises(RuntimeError, match="weight: expected codes among its parts in the state dict, got rowwise_scale_inv"):
        ops.Linear(160, 64).load_state_dict(scales)
    with pytest.raises(RuntimeError, match=r"weight.rowwise_data: expected shape \[64, 160\], got \[64, 128\]"):
        torch.manual_seed(0)
        small = ops.Linear(128, 64)
        small.weight = torch.nn.Parameter(tandem.quantize(small.weight.detach(), QUANTIZERS["current"]))
        ops.Linear(160, 64).load_state_dict(small.state_dict())


@EACH
def test_as_input_and_output_of_ops(quantizer):
    codes = tandem.quantize(torch.randn(64, 160), quantizer)
    torch.manual_seed(0)
    op = ops.Linear(160, 32)
    for recipe in (None, Float8CurrentScaling()):
        with tandem.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(op(codes), op(codes.dequantize()))
    compiled = torch.compile(lambda tensor: tensor.view(8, 8, 160) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(codes), codes.dequantize().view(8, 8, 160) * 2)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_write_into_a_slice_reaches_other_rows(name):
    text = "QuantizedTensor: expected a write into a tensor that has its scales to itself, got one into a slice of rows whose scales serve other rows too"
    for rows in (32, 64, 128, 256):
        for write in (
            lambda part: part.zero_(),
            lambda part: part.mul_(2),
            lambda part: part.copy_(1000 * torch.randn(part.shape)),
            lambda part: part.copy_(tandem.quantize(torch.ones(part.shape), part.quantizer)),
            lambda part: part.detach().zero_(),
            lambda part: part.view(2, -1, 256).zero_(),
        ):
            whole = tandem.quantize(torch.randn(256, 256), QUANTIZERS[name])
            numbers = whole.dequantize()
            part = whole[:rows]
            if not isinstance(part, tandem.QuantizedTensor):
                continue
            try:
                write(part)
            except RuntimeError as error:
                assert text in str(error) and rows < 256
                assert torch.equal(whole.dequantize(), numbers)
            else:
                assert torch.equal(whole.dequantize()[rows:], numbers[rows:])
                assert torch.equal(whole.dequantize()[:rows], part.dequantize()) and not torch.equal(part.dequantize(), numbers[:rows])
            assert torch.equal(whole[:rows].clone().zero_().dequantize(), torch.zeros(rows, 256))  # a clone is its own


def test_slices_of_tensors_with_one_scale_are_not_written():
    whole = tandem.quantize(torch.randn(64, 64), QUANTIZERS["current"])
    for part in (whole[:32], whole.split(32)[1], whole[:32].detach(), whole[:32].view(2, 16, 64), copy.copy(whole[:32].view(32, 64))):
        with pytest.raises(RuntimeError, match="got one into a slice of rows whose scales serve other rows too. Write into the whole"):
            part.zero_()
    together = copy.deepcopy((whole, whole[:32]))  # which share memory as these do
    with pytest.raises(RuntimeError, match="got one into a slice of rows"):
        together[1].zero_()
    assert whole[:32].clone().zero_().dequantize().count_nonzero() == 0
    whole[:64].zero_()
    assert whole.dequantize().count_nonzero() == 0


@EACH
def test_a_quantized_source_is_broadcast(quantizer):
    for shape in ((1, 64), (64,), (1, 1), (64, 1)):
        numbers = torch.full(shape, 3.0)
        source = tandem.quantize(numbers, quantizer)
        target = tandem.quantize(torch.randn(64, 64), quantizer)
        wanted = tandem.quantize(source.dequantize().expand(64, 64).contiguous(), quantizer)
        assert torch.equal(target.copy_(source).dequantize(), wanted.dequantize())


@EACH
def test_columns_of_views_without_rows(quantizer):
    codes = tandem.quantize(torch.zeros(0, 64), quantizer).view(1, 0, 64)
    if codes.columnwise_data is not None:
        assert codes.dequantize(columnwise=True).numel() == 0


@EACH
@pytest.mark.parametrize(
    "write",
    [
        lambda codes: [row.zero_() for row in codes.unbind()],
        lambda codes: codes.view(-1).zero_(),
        lambda codes: codes.flatten().add_(1),
        lambda codes: codes.view(-1)[:5].fill_(0),
        lambda codes: codes.t().copy_(torch.zeros(160, 64)),
        lambda codes: codes[0].mul_(0),
        lambda codes: codes[:, 3].zero_(),
        lambda codes: codes[5:9].zero_() if not isinstance(codes[5:9], tandem.QuantizedTensor) else codes.t().zero_(),
        lambda codes: codes.t()[0].__setitem__(3, 0.0),
        lambda codes: torch.add(codes.t(), 1, out=codes.t()),
        lambda codes: torch._foreach_mul_([codes.view(-1)], 2),
        lambda codes: codes.data.view(-1).zero_(),
    ],
)
def test_no_write_into_a_copy_is_lost(quantizer, write):
    codes = tandem.quantize(torch.randn(64, 160), quantizer)
    numbers = codes.dequantize()
    with pytest.raises(RuntimeError, match="QuantizedTensor: expected a write into the tensor itself, got .* of a view that is a copy of its numbers, where it"):
        write(codes)
    assert torch.equal(codes.dequantize(), numbers)
    param = torch.nn.Parameter(codes)
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected a write into the tensor itself, got zero_"):
        param.unbind()[0].zero_()


def test_copies_are_read_as_plain_tensors():
    codes = tandem.quantize(torch.randn(64, 96), QUANTIZERS["mxfp8"])
    numbers = codes.dequantize()
    for view, wanted in ((codes.t(), numbers.t()), (codes.view(-1), numbers.view(-1)), (codes[3], numbers[3]), (codes.t()[:5].unsqueeze(0), numbers.t()[:5].unsqueeze(0))):
        assert view.shape == wanted.shape and view.stride() == wanted.stride()
        assert torch.equal(view, wanted) and (view.numpy() == wanted.numpy()).all() and view.tolist() == wanted.tolist()
        for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), saved_and_loaded(view), view.clone(), view.contiguous() + 0):
            assert type(other) is torch.Tensor and torch.equal(other, wanted)
    view = codes.t().clone()
    view.zero_()
    assert view.count_nonzero() == 0 and torch.equal(codes.dequantize(), numbers)
    assert repr(codes[3]) == repr(numbers[3]) and f"{codes[3]}" == f"{numbers[3]}" and f"{codes.view(-1)}" == f"{codes!r}.view(-1)"
    assert f"{codes[0, 0]:.3f} {codes[1, 2]}" == f"{numbers[0, 0]:.3f} {numbers[1, 2]}"
    for x in (codes, codes.t(), codes.view(-1)):
        for array in (x.numpy(), x.numpy(force=True), np.asarray(x)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0


@EACH
def test_a_source_with_the_negative_bit(quantizer):
    """As `z.conj().imag` has: its memory holds the numbers with the other sign."""
    x = torch.randn(32, 64)
    strided, codes = torch.conj(torch.complex(torch.zeros(32, 64), -x)).imag, tandem.quantize(x, quantizer)
    wanted = codes.dequantize()
    for source in (torch._neg_view(-x), strided, torch._neg_view(-x.double()), torch._neg_view(-x.t().contiguous()).t()):
        assert source.is_neg() and torch.equal(source.float(), x)
        made = tandem.quantize(torch.zeros(32, 64), quantizer)
        for write in (lambda: made.copy_(source), lambda: made.quantize_(source), lambda: setattr(made, "data", source.float())):  # noqa: B023
            made.zero_()
            write()
            assert torch.equal(made.dequantize(), wanted)
    row = torch._neg_view(-x[:1])
    assert torch.equal(made.copy_(row).dequantize(), tandem.quantize(x[:1].expand(32, 64), quantizer).dequantize())
    same(codes.copy_(torch._neg_view(-wanted)), tandem.quantize(x, quantizer))


def test_a_state_with_the_negative_bit_is_loaded():
    with tandem.quantized_model_init(recipe=Float8CurrentScaling()):
        linear = tandem.Linear(64, 32, bias=False)
    x = torch.randn(32, 64)
    for source in (torch._neg_view(-x), torch.conj(torch.complex(torch.zeros(32, 64), -x)).imag):
        linear.load_state_dict({"weight": source})
        assert (linear.weight.dequantize() - x).abs().max() < 0.25


READERS = {  # how another library may come to the numbers of a tensor
    "numpy": lambda x: x.numpy(),
    "numpy by force": lambda x: x.numpy(force=True),
    "lists": lambda x: x.tolist(),
    "arrays": np.asarray,
    "copies": np.array,
    "DLPack of numpy": np.from_dlpack,
    "DLPack of torch": torch.from_dlpack,
    "DLPack of before": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "buffers": memoryview,
    "bytes": lambda x: np.frombuffer(x, dtype=np.float32),
    "array interface": lambda x: x.__array_interface__,
    "interface of CUDA": lambda x: x.__cuda_array_interface__,
    "address": lambda x: x.data_ptr(),
    "address of the storage": lambda x: x.untyped_storage().data_ptr(),
    "storage": lambda x: x.storage()[0],
    "bytes of the storage": lambda x: bytes(x.untyped_storage()[:4]),
    "file of the storage": lambda x: x.untyped_storage()._share_filename_cpu_(),
    "the same memory": lambda x: torch.empty(0).set_(x),
    "the same storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride()).clone(),
    "other processes": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    "pickles": lambda x: pickle.loads(pickle.dumps(x)),
    "copies of torch": lambda x: torch.tensor(x),
    "what torch takes": torch.asarray,
    "as the base class": lambda x: x.as_subclass(torch.Tensor).clone(),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_other_libraries_read_numbers_or_get_an_error(name):
    codes = tandem.quantize(torch.randn(64, 32), QUANTIZERS["mxfp8"])
    numbers = codes.dequantize()
    param = torch.nn.Parameter(codes.clone())
    for x, wanted in ((codes, numbers), (param, numbers), (codes[:32], numbers[:32]), (codes.t(), numbers.t()), (codes.view(-1), numbers.view(-1)), (codes[3], numbers[3])):
        try:
            got = READERS[name](x)
        except (RuntimeError, TypeError, BufferError, AttributeError):
            continue
        got = got.detach().clone() if isinstance(got, torch.Tensor) else torch.tensor(np.array(got))
        assert torch.equal(got.dequantize() if isinstance(got, tandem.QuantizedTensor) else got, wanted)


def test_who_asks_for_the_memory_is_told_what_to_do(tmp_path):
    codes = tandem.quantize(torch.randn(64, 64), QUANTIZERS["mxfp8"])
    told = r"QuantizedTensor: expected a tensor whose numbers lie in one memory, got one in codes, .* Use its numbers: x.dequantize\(\), or view.clone\(\). To save it use the state_dict"
    for ask in (lambda: codes.data_ptr(), lambda: codes.t().share_memory_(), lambda: np.from_dlpack(codes), lambda: save_file({"weight": codes}, tmp_path / "bare.safetensors")):
        with pytest.raises(RuntimeError, match=told):
            ask()


def test_views_and_states_in_inference_mode():
    with tandem.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = tandem.Linear(64, 64)
    for quantizer in QUANTIZERS.values():
        codes = tandem.quantize(torch.randn(64, 160), quantizer)
        numbers = codes.dequantize()
        with torch.inference_mode():
            for view in (codes.detach(), codes.view(64, 160), codes.data, codes[:64], torch.nn.Parameter(codes), codes.clone()):
                same(view, codes)
            for view, wanted in ((codes.t(), numbers.t()), (codes.view(-1)[5:], numbers.view(-1)[5:]), (codes.split(7)[1], numbers[7:14])):
                assert torch.equal(view + 0, wanted + 0)
            same(codes.clone().detach(), codes)
            state = layer.state_dict()
        codes.add_(1.0)
        codes.detach().requires_grad_().sum().backward()
    layer.load_state_dict(state)


def test_its_own_numbers_change_no_code():
    """Of columns in blocks of their own other codes would come of numbers that rows have rounded."""
    for name, quantizer in QUANTIZERS.items():
        x = torch.randn(64, 160)
        codes, first = tandem.quantize(x, quantizer), tandem.quantize(x, quantizer)
        codes.copy_(codes.dequantize())
        codes.quantize_(codes.dequantize())
        codes.mul_(1.0)
        codes.data = codes.dequantize()
        same(codes, first)
        same(codes.copy_(x + 1), tandem.quantize(x + 1, quantizer))


def test_zeros_of_which_the_first_rows_are_written():
    """As fully_shard fills up a share: the rows behind mean zeros under any scale, until somebody writes them."""
    for quantizer in QUANTIZERS.values():
        zeros = tandem.quantize(torch.randn(64, 160), quantizer).new_zeros(64, 160)
        first, x = zeros[:43], torch.randn(43, 160)
        first.copy_(x)
        wanted = tandem.quantize(x, quantizer).dequantize()
        assert torch.equal(first.dequantize(), wanted) and torch.equal(zeros[:43].dequantize(), wanted)
        assert torch.equal(zeros.dequantize()[:43], wanted) and not zeros.dequantize()[43:].any()
        zeros.fill_(1.0)
        with pytest.raises(RuntimeError, match="got one into a slice of rows whose scales serve other rows too"):
            first.zero_()
        assert torch.equal(zeros.dequantize(), torch.ones(64, 160))
