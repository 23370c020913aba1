"""Recipes whose scales come from the current tensor: one per tensor, or one per block."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.recipe.base import Format, MMParams, QParams, Recipe

__all__ = ["Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the amax of the current tensor.

    scale = FP8 maximum / max(amax, epsilon), rounded down to a power of two with `use_power_2_scales`.

    Args:
        use_power_2_scales: whether scales are powers of two.
        fp8_format: element types of the operands: Format.HYBRID or Format.E4M3.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: at least 0; lower bound of the amax of inputs, weights and gradients.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: without effect: products sum in float32 or wider.
        backward_override: the operands of products in backward. None: codes, also of gradients. "high_precision": the unquantized inputs and weights, which
            are kept. "dequantized": the dequantized values of forward's codes, which are kept instead. With a text, gradients are not quantized.
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
    """FP8 with one power of two as scale per block of 32 numbers along the dimension that a product sums over (OCP MX).

    Args:
        margin: 0, because these scales have no margin; another value raises NotImplementedError.
        fp8_format: element types of the operands: Format.HYBRID or Format.E4M3.
        enable_2d_quantization: whether blocks of weights are 32 by 32, so that forward and backward multiply equal codes.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        backward_override: as for `Float8CurrentScaling`.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _only_defaults = (("margin", 0), *Recipe._only_defaults)


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per block of 128 numbers along the dimension that a product sums over, or per block of 128 by 128.

    scale = FP8 maximum / max(amax of the block, epsilon), rounded down to a power of two unless `use_f32_scales`.

    Args:
        use_f32_scales: whether scales are any float32 numbers rather than powers of two.
        fp8_format: element types of the operands: Format.HYBRID or Format.E4M3.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: blocks of inputs, weights and gradients. 1: lines of 128 numbers. 2: squares of
            128 by 128, with equal codes in forward and backward. No product takes two operands in squares: more than one 2 raises ValueError.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: MMParams(); another value raises NotImplementedError. Products sum in float32 or wider.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        backward_override: as for `Float8CurrentScaling`.
        amax_epsilon_input, amax_epsilon_weight, amax_epsilon_grad_output: at least 0; lower bound of the amax of a block of inputs, weights and gradients.
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
        *Recipe._only_defaults,
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
    """FP4 (E2M1) with one E4M3 scale per block of 16 numbers along the dimension that a product sums over, and one float32 scale per tensor.

    Both operands of the product for the gradient of a weight are rotated by one random Hadamard transform, which spreads outliers. Gradients are
    rounded stochastically, without bias. Blocks of weights are 16 by 16, so that forward and backward multiply equal codes.

    Args:
        disable_rht: whether operands are not rotated.
        disable_stochastic_rounding: whether gradients are rounded to nearest.
        disable_2d_quantization: whether blocks of weights are lines of 16.
        row_scaled_activation: False; another value raises NotImplementedError.
        nvfp4_4over6: "none", "weights", "activations" or "all": operands in which the largest number of each block becomes 6 or 4, whichever has the
            smaller error. Gradients never do. Rotated columns compare errors after the rotation.
        nvfp4_4over6_e4m3_use_256: "none", "weights", "activations" or "all": operands, among those of `nvfp4_4over6`, whose block scales reach up to
            256 instead of 448, so that 1.5 times as much still fits E4M3.
        nvfp4_4over6_err_mode: the error of a block: "MAE", a sum of absolute errors, or "MSE", a sum of their squares.
        fp4_format, fp8_format: Format.E2M1 and Format.E4M3; another value raises NotImplementedError.
        fp8_dpa, fp8_mha: False; another value raises NotImplementedError.
        backward_override: as for `Float8CurrentScaling`.
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
        *Recipe._only_defaults,
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
