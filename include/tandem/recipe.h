// Recipes: the choice of a low-precision format and a kind of scale for each operand of a product.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace tandem {

/// The FP8 formats of a product's operands.
enum class RecipeFormat : unsigned char {
  /// E4M3 for inputs and weights, E5M2 for gradients.
  hybrid,
  /// E4M3 for all operands.
  e4m3,
};

/// The operands of backward's products where forward multiplied codes.
enum class BackwardOverride : unsigned char {
  /// Codes, also of gradients.
  none,
  /// The numbers that forward quantized, and gradients without quantization.
  high_precision,
  /// The dequantized values of forward's codes, and gradients without quantization.
  dequantized,
};

/// FP8 with one scale per tensor, from the tensor's own amax at every call: scale = format max /
/// amax.
struct Float8CurrentScaling {
  /// Scales are rounded down to powers of two.
  bool use_power_2_scales = false;
  RecipeFormat fp8_format = RecipeFormat::hybrid;
  /// Lower bounds of amax, finite and at least 0.
  double amax_epsilon_input = 0, amax_epsilon_weight = 0, amax_epsilon_grad_output = 0;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const Float8CurrentScaling&) const = default;
};

/// FP8 with one scale per block, at every call: scale = format max / amax of the block. A block is
/// 128 numbers along the dimension that a product sums over, or 128 by 128 numbers.
struct Float8BlockScaling {
  /// Scales are any float32 numbers, not powers of two.
  bool use_f32_scales = false;
  RecipeFormat fp8_format = RecipeFormat::e4m3;
  /// 1: blocks of 128 numbers; 2: blocks of 128 by 128. No product takes two operands with square
  /// blocks.
  int64_t x_block_scaling_dim = 1, w_block_scaling_dim = 2, grad_block_scaling_dim = 1;
  /// Lower bounds of amax, finite and at least 0.
  double amax_epsilon_input = 0, amax_epsilon_weight = 0, amax_epsilon_grad_output = 0;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const Float8BlockScaling&) const = default;
};

/// FP8 with a power of two as the scale of each block of 32 numbers along the dimension that a
/// product sums over (OCP MX).
struct MXFP8BlockScaling {
  RecipeFormat fp8_format = RecipeFormat::e4m3;
  /// Blocks of weights are 32 by 32, so that row codes and column codes are equal.
  bool enable_2d_quantization = false;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const MXFP8BlockScaling&) const = default;
};

/// E2M1, four bits, with an E4M3 scale for each block of 16 numbers along the dimension that a
/// product sums over, and a float32 scale for the tensor (NVFP4).
struct NVFP4BlockScaling {
  enum class Operands : unsigned char { none, weights, activations, all };
  enum class ErrorMetric : unsigned char { mae, mse };
  /// Operands of the weight gradients are not rotated by a random Hadamard transform.
  bool disable_rht = false;
  /// Gradients are rounded to nearest, not stochastically.
  bool disable_stochastic_rounding = false;
  /// Blocks of weights are 16 numbers of a line, not 16 by 16.
  bool disable_2d_quantization = false;
  /// Operands quantized by "four over six": the largest number of a block becomes 6, the largest
  /// code of E2M1, or 4, whichever has the smaller error. Gradients never are.
  Operands nvfp4_4over6 = Operands::none;
  /// The operands of nvfp4_4over6 whose block scales reach up to 256, so that E4M3 can hold 1.5
  /// times as much. Block scales of other operands reach up to 448, the largest number of E4M3.
  Operands nvfp4_4over6_e4m3_use_256 = Operands::all;
  /// The error that decides between 6 and 4: the sum of absolute errors, or the sum of their
  /// squares.
  ErrorMetric nvfp4_4over6_err_mode = ErrorMetric::mae;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const NVFP4BlockScaling&) const = default;
};

/// FP8 with one scale per tensor, from the amaxes of past steps: scale = format max 2^-margin /
/// amax of the history. Modules keep the history of each quantized tensor in their `recipe_state`.
/// The history advances once per outermost Autocast: in forward at the end of the region, if
/// gradients are enabled then, and in backward after the last backward of the region's calls.
struct DelayedScaling {
  enum class AmaxAlgorithm : unsigned char {
    /// The largest amax of the history.
    max,
    /// The amax of the last step.
    most_recent,
  };
  /// An exponent in [-64, 64]; scales are 2^margin times smaller than the largest possible ones.
  int64_t margin = 0;
  RecipeFormat fp8_format = RecipeFormat::hybrid;
  /// The number of steps in the history, in [1, 65536].
  int64_t amax_history_len = 1024;
  AmaxAlgorithm amax_compute_algo = AmaxAlgorithm::max;
  /// Processes share their amaxes over `amax_reduction_group`.
  bool reduce_amax = true;
  /// The name by which torch.distributed knows the process group; empty: no process shares amaxes.
  std::string amax_reduction_group = {};
  /// The name of a function that computes scales (register_scale_update); empty:
  /// `amax_compute_algo` decides.
  std::string scale_update = {};
  /// Amaxes are recorded, but products take unquantized operands.
  bool calibrating = false;
  bool operator==(const DelayedScaling&) const = default;
};

/// A function of the user chooses the quantizer of each tensor; `quantizers` is the name under
/// which register_quantizer_choice (quantization/recipe.h) knows it.
struct CustomRecipe {
  std::string quantizers = {};
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const CustomRecipe&) const = default;
};

/// Any recipe.
using Recipe = std::variant<Float8CurrentScaling, DelayedScaling, Float8BlockScaling,
                            MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe>;

}  // namespace tandem
