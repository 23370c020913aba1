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

/// y = x_hat * gamma, x_hat = x * inv_rms, inv_rms = 1 / sqrt(mean(x^2) + eps).
///
/// Shapes:  x, y [rows, hidden]; weight [hidden]; inv_rms [rows], float32.
/// Dtypes:  any Element each; arithmetic in float32.
/// Error:   at most 8 float32 ULP from float64 for hidden <= 16384 (test NormTarget), then one
///          rounding to y's element; rounds_before_weight rounds x_hat too.
/// Bytes:   reads x once from memory (the second read hits L1/L2), writes y once.
void rms_norm_forward(ConstRows x, ConstVector weight, const NormOptions& options, Rows y,
                      float* inv_rms);

/// grad_x = inv_rms * (g - x_hat * mean(g * x_hat)) + grad_residual, rounded once; g = grad_y *
/// gamma, x_hat = x * inv_rms; grad_weight = sum over rows of grad_y * x_hat, in float32, rounded
/// once; y has the bits of forward's y. With rounds_before_weight, y and grad_weight use the
/// rounded x_hat, and grad_x ignores the rounding.
///
/// Optional: grad_residual, grad_x, grad_weight, y (null data: not read, not computed, not
///          written).
/// Bytes:    reads grad_y, x (and grad_residual) once from memory, writes grad_x (and y) once.
void rms_norm_backward(ConstRows grad_y, ConstRows x, ConstVector weight, const float* inv_rms,
                       const NormOptions& options, ConstRows grad_residual, Rows grad_x,
                       Vector grad_weight, Rows y);

/// y = x * inv_norm, inv_norm = 1 / sqrt(sum(x^2) + eps).
///
/// Shapes:  x, y [rows, hidden]; inv_norm [rows], float32.
/// Error:   as rms_norm_forward.
void l2_norm_forward(ConstRows x, double eps, Rows y, float* inv_norm);

/// grad_x = inv_norm * (grad_y - x_hat * sum(grad_y * x_hat)), x_hat = x * inv_norm; y has the bits
/// of forward's y.
///
/// Optional: grad_x, y.
void l2_norm_backward(ConstRows grad_y, ConstRows x, const float* inv_norm, Rows grad_x, Rows y);

/// y = (x - mean) * inv_std * gamma + bias, inv_std = 1 / sqrt(variance + eps). The variance takes
/// two passes over the row in cache (in parts, for float32).
///
/// Shapes:  x, y [rows, hidden]; weight, bias [hidden]; mean, inv_std [rows], float32.
/// Limits:  a row with NaN, an infinity or squares that overflow float32 becomes NaN;
///          rms_norm_forward gives 0 where squares overflow.
void layer_norm_forward(ConstRows x, ConstVector weight, ConstVector bias,
                        const NormOptions& options, Rows y, float* mean, float* inv_std);

/// sum = x + extra, rounded to sum_element; y, mean and inv_norm have the bits that
/// layer_norm_forward gives for the sum, or rms_norm_forward where `mean` is null.
///
/// Optional: bias, and sum (null data: not written, but rounded all the same).
/// Bytes:    reads x and extra once, writes sum and y once.
void add_norm_forward(ConstRows x, ConstRows extra, ConstVector weight, ConstVector bias,
                      const NormOptions& options, Element sum_element, Rows sum, Rows y,
                      float* mean, float* inv_norm);

/// rms_norm_backward with x_hat = (x - mean) * inv_std and grad_x = inv_std * (g - mean(g) - x_hat
/// * mean(g * x_hat)) + grad_residual; grad_bias = sum over rows of grad_y. `bias` is read only
/// where y is requested.
void layer_norm_backward(ConstRows grad_y, ConstRows x, ConstVector weight, ConstVector bias,
                         const float* mean, const float* inv_std, const NormOptions& options,
                         ConstRows grad_residual, Rows grad_x, Vector grad_weight, Vector grad_bias,
                         Rows y);

/// The operands and results of rms_norm_backward or layer_norm_backward by rows; `bias` and `mean`
/// are null for RMSNorm.
struct NormBackward {
  ConstRows grad_y, x;
  ConstVector weight, bias;
  const float* mean;
  const float* inv_norm;
  NormOptions options;
  ConstRows grad_residual;
  Rows grad_x, y;
};

/// Columns of the sums of some_rows_norm_backward: those of grad_weight, then with a mean those of
/// grad_bias. They are padded to whole vectors of any target, and to no multiple of 4 KiB, because
/// then the rows of a kernel would share cache sets.
constexpr size_t norm_sum_cols(size_t hidden, bool has_mean) {
  return ((hidden + 63) / 64 * 64 + 64) * (has_mean ? 2 : 1);
}

/// some_rows_norm_backward computes rms_norm_backward or layer_norm_backward for some rows of a
/// matrix, and adds the shares of these rows in grad_weight and grad_bias to the sums of their
/// blocks. add_norm_sums computes both gradients from the blocks of all `rows` rows. Together they
/// give the bits of one call for all rows.
///
/// Optional: the sums, grad_weight, grad_bias.
void some_rows_norm_backward(const NormBackward& rows, const PartialSums& part);
void add_norm_sums(const PartialSums& part, size_t rows, Vector grad_weight, Vector grad_bias);

}  // namespace tandem::kernels::cpu
