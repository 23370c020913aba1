// Recipes: which low-precision format the operands of products take, and how they are scaled.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

namespace tandem {

/// FP8 formats of the operands of a product.
enum class RecipeFormat : unsigned char {
  /// Inputs and weights E4M3, gradients E5M2.
  hybrid,
  /// Everything E4M3.
  e4m3,
};

/// What backward multiplies by where forward has multiplied codes.
enum class BackwardOverride : unsigned char {
  /// Codes, of gradients too.
  none,
  /// The numbers that forward has quantized, and gradients as they are.
  high_precision,
  /// The numbers that the codes of forward stand for, and gradients as they are.
  dequantized,
};

/// Per-tensor scaling from the tensor's own amax: scale = format max / amax, for every tensor, at
/// every call.
struct Float8CurrentScaling {
  /// Scales are rounded down to powers of two.
  bool use_power_2_scales = false;
  RecipeFormat fp8_format = RecipeFormat::hybrid;
  /// Lower bounds of amax, finite and at least 0.
  double amax_epsilon_input = 0, amax_epsilon_weight = 0, amax_epsilon_grad_output = 0;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const Float8CurrentScaling&) const = default;
};

/// FP8 with one scale per block of 128 numbers along the dimension that a product sums over, or of
/// 128 by 128: scale = format max / amax, for every block, at every call.
struct Float8BlockScaling {
  /// Scales are any float32 numbers, not powers of two.
  bool use_f32_scales = false;
  RecipeFormat fp8_format = RecipeFormat::e4m3;
  /// 1: blocks are 128 numbers of a line; 2: 128 by 128. No product takes two operands in squares.
  int64_t x_block_scaling_dim = 1, w_block_scaling_dim = 2, grad_block_scaling_dim = 1;
  /// Lower bounds of amax, finite and at least 0.
  double amax_epsilon_input = 0, amax_epsilon_weight = 0, amax_epsilon_grad_output = 0;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const Float8BlockScaling&) const = default;
};

/// FP8 with one power of two as scale per block of 32 numbers along the dimension that a product
/// sums over (OCP MX).
struct MXFP8BlockScaling {
  RecipeFormat fp8_format = RecipeFormat::e4m3;
  /// Blocks of weights are 32 by 32, so that both directions have the same codes.
  bool enable_2d_quantization = false;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const MXFP8BlockScaling&) const = default;
};

/// E2M1, four bits, with one E4M3 scale per block of 16 numbers along the dimension that a product
/// sums over and one float32 per tensor (NVFP4).
struct NVFP4BlockScaling {
  enum class Operands : unsigned char { none, weights, activations, all };
  enum class ErrorMetric : unsigned char { mae, mse };
  /// Operands of the gradients of weights are not rotated by a random Hadamard transform.
  bool disable_rht = false;
  /// Gradients are rounded to nearest, not by chance.
  bool disable_stochastic_rounding = false;
  /// Blocks of weights are lines, not 16 by 16.
  bool disable_2d_quantization = false;
  /// Operands of whose blocks the largest number becomes 6 or 4, the largest codes of E2M1,
  /// whichever errs less ("four over six"). Gradients are none of them.
  Operands nvfp4_4over6 = Operands::none;
  /// Those of them the scales of whose blocks reach up to 256, so that E4M3 has 1.5 times as much
  /// too; of others up to 448, its largest number.
  Operands nvfp4_4over6_e4m3_use_256 = Operands::all;
  /// What "errs" means: the sum of absolute errors, or of their squares.
  ErrorMetric nvfp4_4over6_err_mode = ErrorMetric::mae;
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const NVFP4BlockScaling&) const = default;
};

/// Per-tensor scaling from the amaxes of past steps: scale = format max 2^-margin / amax of the
/// history. Modules keep the history of each tensor that is quantized for them in their
/// `recipe_state`; it moves on once per outermost Autocast, for forward when that ends with
/// gradients enabled, for backward when the last backward of its calls has run.
struct DelayedScaling {
  enum class AmaxAlgorithm : unsigned char {
    /// The largest amax of the history.
    max,
    /// That of the last step.
    most_recent,
  };
  /// Scales are 2^margin times smaller than they could be, in [-64, 64].
  int64_t margin = 0;
  RecipeFormat fp8_format = RecipeFormat::hybrid;
  /// Steps that count, in [1, 65536].
  int64_t amax_history_len = 1024;
  AmaxAlgorithm amax_compute_algo = AmaxAlgorithm::max;
  /// Over `amax_reduction_group`.
  bool reduce_amax = true;
  /// Name of the process group whose processes share their amaxes, as torch.distributed knows it;
  /// empty: none do.
  std::string amax_reduction_group = {};
  /// Name of a function that makes scales instead (register_scale_update); empty: as
  /// `amax_compute_algo` says.
  std::string scale_update = {};
  /// Amaxes are kept as otherwise, and products take plain numbers.
  bool calibrating = false;
  bool operator==(const DelayedScaling&) const = default;
};

/// Each tensor as a function of the user says: one that register_quantizer_choice
/// (quantization/recipe.h) knows by this name.
struct CustomRecipe {
  std::string quantizers = {};
  BackwardOverride backward_override = BackwardOverride::none;
  bool operator==(const CustomRecipe&) const = default;
};

/// A recipe, whichever it is.
using Recipe = std::variant<Float8CurrentScaling, DelayedScaling, Float8BlockScaling,
                            MXFP8BlockScaling, NVFP4BlockScaling, CustomRecipe>;

}  // namespace tandem
