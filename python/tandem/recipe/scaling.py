"""Recipes whose scales come from the tensor as it is: one per tensor, or per block."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.recipe.base import Format, MMParams, QParams, Recipe


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the largest magnitude of the tensor as it is.

    scale = FP8 maximum / max(amax, epsilon), rounded down to a power of two with `use_power_2_scales`.

    Args:
        use_power_2_scales: whether scales are powers of two.
        fp8_format: formats of the operands.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: least amax of inputs, weights and gradients, at least 0.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of no meaning: products sum in float32 or wider.
        backward_override: what backward multiplies by: None: codes, of gradients too; "high_precision": the numbers that forward has quantized, which are
            kept; "dequantized": the numbers that the codes of forward stand for, which are kept instead. Gradients are as they are then.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    amax_epsilon_input: float = 0.0
    amax_epsilon_weight: float = 0.0
    amax_epsilon_grad_output: float = 0.0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    _only_defaults = (("fp8_dpa", False), ("fp8_mha", False))

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_input)

    @property
    def fp8_quant_fwd_weight(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_weight)

    @property
    def fp8_quant_bwd_grad(self) -> QParams:
        return QParams(self.use_power_2_scales, self.amax_epsilon_grad_output)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with one power of two as scale per block of 32 numbers, along the dimension that a product sums over (OCP MX).

    Args:
        margin: 0; these scales have no margin.
        fp8_format: formats of the operands.
        enable_2d_quantization: whether blocks of weights are 32 by 32, so that forward and backward see the same codes.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (("margin", 0), *Float8CurrentScaling._only_defaults)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per block of 128 numbers along the dimension that a product sums over, or of 128 by 128.

    scale = FP8 maximum / max(amax of the block, epsilon), rounded down to a power of two unless `use_f32_scales`.

    Args:
        use_f32_scales: whether scales are any float32 numbers, not powers of two.
        fp8_format: formats of the operands.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: blocks of inputs, weights and gradients, 1: lines of 128 numbers, 2: squares
            of 128 by 128, of which forward and backward see the same codes. No product takes two operands in squares.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of no meaning: products sum in float32 or wider; split accumulators are required.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: least amax of blocks of inputs, weights and gradients, at least 0.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    amax_epsilon_input: float = 0.0
    amax_epsilon_weight: float = 0.0
    amax_epsilon_grad_output: float = 0.0

    _only_defaults = (
        *[(name, MMParams()) for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")],
        *Float8CurrentScaling._only_defaults,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if dims.count(2) > 1:
            raise ValueError(
                f"Float8BlockScaling: expected squares for one operand at most, got x_block_scaling_dim={dims[0]}, w_block_scaling_dim={dims[1]}, "
                f"grad_block_scaling_dim={dims[2]}. No product takes two."
            )

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_input)

    @property
    def fp8_quant_fwd_weight(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_weight)

    @property
    def fp8_quant_bwd_grad(self) -> QParams:
        return QParams(not self.use_f32_scales, self.amax_epsilon_grad_output)


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Four bits, E2M1, with one E4M3 scale per block of 16 numbers along the dimension that a product sums over, and one float32 per tensor.

    The operands of the gradient of a weight are rotated by a random Hadamard transform, the same for both, which spreads outliers; gradients are rounded
    by chance, right on average; blocks of weights are 16 by 16, so that forward and backward see the same codes.

    Args:
        disable_rht: whether nothing is rotated.
        disable_stochastic_rounding: whether gradients are rounded to nearest.
        disable_2d_quantization: whether blocks of weights are lines of 16.
        row_scaled_activation: False; no other value is known yet.
        nvfp4_4over6: "none", "weights", "activations" or "all": operands of whose blocks the largest number becomes 6 or 4, whichever errs less.
            Gradients are none of them. Rotated columns choose by what they are after the rotation.
        nvfp4_4over6_e4m3_use_256: the same words: those of them the scales of whose blocks reach up to 256, so that 1.5 times as much is in E4M3 too; of
            others up to 448.
        nvfp4_4over6_err_mode: what errs less, by sums over a block: "MAE", of absolute errors, or "MSE", of their squares.
        fp4_format, fp8_format: Format.E2M1 and Format.E4M3; there are no others.
        fp8_dpa, fp8_mha: False; no other value is known yet.
        backward_override: as of `Float8CurrentScaling`.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (
        ("row_scaled_activation", False),
        ("fp4_format", Format.E2M1),
        ("fp8_format", Format.E4M3),
        *Float8CurrentScaling._only_defaults,
    )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding)
