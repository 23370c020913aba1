"""tandem.cast and tandem.cast_back: the casts of the numerics page, on the kernel, the composite form and other devices' path; refusals."""

import pytest
import torch

import tandem

E4M3, E5M2, E2M1, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu
FORMATS = [E4M3, E5M2, E2M1, E8M0]
EVERY_BFLOAT16 = torch.arange(65536).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def composite(x, dtype, **options):
    """The form for devices without a kernel: float64 has none."""
    return tandem.cast(x.double(), dtype, **options)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("seed", [None, torch.tensor([7, 3])], ids=["nearest", "chance"])
def test_kernel_and_composite_form_agree(dtype, saturate, seed):
    if dtype is E8M0 and seed is not None:
        return
    bits = torch.randint(-(2**31), 2**31, (100_003,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    for x in (EVERY_BFLOAT16, bits, bits[:35].view(5, 7).t()):
        assert torch.equal(tandem.cast(x, dtype, saturate=saturate, seed=seed), composite(x.float(), dtype, saturate=saturate, seed=seed))


def test_edges():
    x = torch.tensor([-0.0, 464.0, 464.5, 61440.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    assert tandem.cast(x, E4M3).tolist() == [0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F]
    assert tandem.cast(x, E4M3, saturate=False).tolist() == [0x80, 0x7E, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0x7F]
    assert tandem.cast(x, E5M2).tolist() == [0x80, 0x5F, 0x5F, 0x7B, 0x7B, 0xFB, 0x7F, 0x7F]
    assert tandem.cast(x, E5M2, saturate=False).tolist() == [0x80, 0x5F, 0x5F, 0x7C, 0x7C, 0xFC, 0x7F, 0x7F]
    assert tandem.cast(x, E2M1, saturate=False).tolist() == [8, 7, 7, 7, 7, 15, 7, 7]
    assert tandem.cast(torch.tensor([0.0, 1.0, 1.5, 2.0**127, torch.inf, torch.nan, -3.0]), E8M0).tolist() == [0, 127, 128, 254, 254, 255, 0]
    values = tandem.cast_back(torch.arange(8, dtype=torch.uint8), E2M1, torch.bfloat16)
    assert values.dtype == torch.bfloat16 and values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize(("dtype", "count"), [(E4M3, 127), (E5M2, 124), (E2M1, 8)], ids=str)
def test_float64_is_rounded_once(dtype, count):
    """Beside the middle of two numbers float32 has the middle alone, from which the even code is the nearest."""
    codes = torch.arange(count, dtype=torch.uint8)
    values = tandem.cast_back(codes, dtype, torch.float64)
    middle = (values[:-1] + values[1:]) / 2
    for sign, bits in ((1, 0), (-1, 0x8 if dtype is E2M1 else 0x80)):
        for saturate in (True, False):
            assert torch.equal(tandem.cast(sign * middle * (1 + 2.0**-40), dtype, saturate=saturate), codes[1:] + bits)
            assert torch.equal(tandem.cast(sign * middle * (1 - 2.0**-40), dtype, saturate=saturate), codes[:-1] + bits)


def test_float64_is_rounded_up_once_to_a_power_of_two():
    powers = 2.0 ** torch.arange(-120, 120, dtype=torch.float64)
    assert torch.equal(tandem.cast(powers * (1 + 2.0**-40), E8M0), tandem.cast(powers, E8M0) + 1)
    assert torch.equal(tandem.cast(powers * (1 - 2.0**-40), E8M0), tandem.cast(powers, E8M0))
    assert tandem.cast(torch.tensor([0, 1e-300, 1e300, -1e-300], dtype=torch.float64), E8M0).tolist() == [0, 0, 254, 0]


def test_chance_is_right_on_average_and_repeats_with_its_seed():
    x, seed = torch.full((20_000,), 4.5), torch.tensor(11)
    codes = tandem.cast(x, E2M1, seed=seed)
    assert set(codes.tolist()) == {6, 7} and abs(tandem.cast_back(codes, E2M1).mean() - 4.5) < 0.05
    assert torch.equal(codes, tandem.cast(x, E2M1, seed=seed)) and not torch.equal(codes, tandem.cast(x, E2M1, seed=seed + 1))
    assert not torch.equal(codes, tandem.cast(x, E2M1, seed=torch.tensor([11, 1]))), "another offset"


def test_compiles():
    x = torch.randn(5, 9)
    compiled = torch.compile(lambda t: tandem.cast(t, E4M3), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), tandem.cast(x, E4M3))


ERRORS = [
    (lambda: tandem.cast(torch.ones(2), torch.float16), ValueError, "cast: expected a dtype among torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, got torch.float16"),
    (lambda: tandem.cast_back(torch.ones(2), torch.int8), ValueError, "cast_back: expected a dtype among"),
    (lambda: tandem.cast_back(torch.ones(2), E4M3), TypeError, "cast_from_codes: expected uint8 codes, got float32"),
    (lambda: tandem.cast(torch.ones(2), E8M0, seed=torch.tensor(1)), ValueError, "cast_to_codes: expected no seed for e8m0, which rounds up, got one. Leave it out."),
    (lambda: torch.ops.tandem.cast_to_codes(torch.ones(2), "e3m4", True), ValueError, 'cast_to_codes: expected a format among e4m3, e5m2, e2m1, e8m0, got "e3m4". Name one of them.'),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "text"), ERRORS)
def test_errors(make, kind, text):
    with pytest.raises(kind) as error:
        make()
    assert text in str(error.value)
