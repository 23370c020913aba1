// RMSNorm and LayerNorm over the last dimension, forward and backward.
#pragma once

#include "kernels/partial_sums.h"
#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Options of norms. gamma = weight, or 1 + weight with `zero_centered_gamma`.
struct NormOptions {
  /// A term inside the square root.
  double eps = 1e-5;
  bool zero_centered_gamma = false;
  /// For RMSNorm: x_hat is rounded to the element of x before gamma multiplies it.
  bool rounds_before_weight = false;
  /// Sums over the row replace means, as in L2 normalization.
  bool sums = false;
};

/// The operands and results of norm_forward.
struct NormForward {
  ConstRows x, extra = {};
  ConstVector weight = {}, bias = {};
  NormOptions options = {};
  Element sum_element = Element::float32;
  Rows sum = {}, y = {};
  float *mean = nullptr, *inv_norm = nullptr;
};

/// Without `mean`, RMSNorm: y = x_hat * gamma, x_hat = x * inv_norm, inv_norm = 1 / sqrt(mean(x^2)
/// + eps). With options.sums, L2 normalization: inv_norm = 1 / sqrt(sum(x^2) + eps).
///
/// With `mean`, LayerNorm: y = (x - mean) * inv_norm * gamma + bias, inv_norm = 1 / sqrt(variance +
/// eps). The variance takes two passes over the row in cache (in parts, for float32).
///
/// With `extra`, sum = x + extra, rounded to sum_element; y, mean and inv_norm have the bits that
/// they have for the sum as x.
///
/// Shapes:   x, extra, sum, y [rows, hidden]; weight, bias [hidden]; mean, inv_norm [rows],
///           float32.
/// Dtypes:   any Element each; arithmetic in float32.
/// Optional: extra; weight (ones), bias; sum (null data: not written, but rounded all the same).
/// Error:    at most 8 float32 ULP from float64 for hidden <= 16384 (test NormTarget), then one
///           rounding to y's element; rounds_before_weight rounds x_hat too.
/// Bytes:    reads x and extra once from memory (the second read hits L1/L2), writes sum and y
///           once.
/// Limits:   in LayerNorm, a row with NaN, an infinity or squares that overflow float32 becomes
///           NaN; RMSNorm gives 0 where squares overflow.
void norm_forward(const NormForward& norm);

/// The operands and results of norm_backward by rows; `bias` and `mean` are null for RMSNorm.
struct NormBackward {
  ConstRows grad_y, x;
  ConstVector weight = {}, bias = {};
  const float* mean = nullptr;
  const float* inv_norm = nullptr;
  NormOptions options = {};
  ConstRows grad_residual = {};
  Rows grad_x = {}, y = {};
};

/// grad_x = inv_norm * (g - x_hat * mean(g * x_hat)) + grad_residual, rounded once; g = grad_y *
/// gamma, x_hat = x * inv_norm; grad_weight = sum over rows of grad_y * x_hat, in float32, rounded
/// once; y has the bits of forward's y. With rounds_before_weight, y and grad_weight use the
/// rounded x_hat, and grad_x ignores the rounding. With options.sums, the sum of g * x_hat replaces
/// the mean.
///
/// With `mean`, x_hat = (x - mean) * inv_norm and grad_x = inv_norm * (g - mean(g) - x_hat * mean(g
/// * x_hat)) + grad_residual; grad_bias = sum over rows of grad_y. `bias` is read only where y is
/// requested.
///
/// Optional: grad_residual, grad_x, grad_weight, grad_bias, y (null data: not read, not computed,
///           not written).
/// Bytes:    reads grad_y, x (and grad_residual) once from memory, writes grad_x (and y) once.
void norm_backward(const NormBackward& norm, Vector grad_weight = {}, Vector grad_bias = {});

/// Columns of the sums of some_rows_norm_backward: those of grad_weight, then with a mean those of
/// grad_bias. They are padded to whole vectors of any target, and to no multiple of 4 KiB, because
/// then the rows of a kernel would share cache sets.
constexpr size_t norm_sum_cols(size_t hidden, bool has_mean) {
  return ((hidden + 63) / 64 * 64 + 64) * (has_mean ? 2 : 1);
}

/// some_rows_norm_backward computes norm_backward for some rows of a matrix, and adds the shares of
/// these rows in grad_weight and grad_bias to the sums of their blocks. add_norm_sums computes both
/// gradients from the blocks of all `rows` rows. Together they give the bits of one call for all
/// rows.
///
/// Optional: the sums, grad_weight, grad_bias.
void some_rows_norm_backward(const NormBackward& rows, const PartialSums& part);
void add_norm_sums(const PartialSums& part, size_t rows, Vector grad_weight, Vector grad_bias);

}  // namespace tandem::kernels::cpu
