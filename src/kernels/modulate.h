// Rows multiplied and shifted by vectors that several rows share.
#pragma once

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// y = x * (offset + scale) + shift. The rows of x form as many groups of equal size as `scale` has
/// rows; the rows of a group share one row of scale and of shift.
///
/// Shapes:   x, y [groups * n, cols]; scale, shift [groups, cols].
/// Memory:   y may be x.
/// Dtypes:   any Element each; arithmetic in float32, rounded once.
/// Error:    2^-22 (|x (offset + scale)| + |shift|) before that rounding (test
///          Modulate.IsTheFormula).
/// Bytes:    reads x once, writes y once.
/// Optional: shift.
void modulate(ConstRows x, ConstRows scale, float offset, ConstRows shift, Rows y);

/// sums[g, c] = sum over the rows r of group g of grad_y[r, c] x[r, c]: the gradient of scale. Sums
/// do not depend on the number of threads.
///
/// Shapes:   grad_y, x [groups * n, cols]; sums [groups, cols].
/// Dtypes:   any Element each; arithmetic in float32, rounded once.
/// Error:    2^-24 (n / 64 + 66) times the sum of magnitudes before that rounding
///           (test Modulate.SumsAreTheFormula).
/// Bytes:    reads grad_y and x once.
void modulate_sums(ConstRows grad_y, ConstRows x, Rows sums);

}  // namespace tandem::kernels::cpu
