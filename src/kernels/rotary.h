// Heads turned by the angles of their positions.
#pragma once

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Of each row of x, heads of head_dim columns side by side: in the first `heads` of them, pair i
/// of the first `features` columns becomes
///   (a cos - b sin, b cos + a sin), with cos and sin of row r % positions, column i,
/// and with sin negated where `inverse`. The pair is (i, i + features / 2), or (2 i, 2 i + 1) where
/// `interleaved`. All other columns are copied.
///
/// Shapes:   x, y [rows, any number of whole heads]; cosines, sines [positions, features / 2].
/// Memory:   y may be x.
/// Dtypes:   any Element, the same for x and y; arithmetic in float32.
/// Error:    2^-23 (|a cos| + |b sin|) before its one rounding, and the same of the other
///           (test Rotary.Turns).
/// Bytes:    reads x once, writes y once.
struct Rotary {
  ConstRows x;
  const float *cosines, *sines;
  size_t positions, heads, head_dim, features;
  bool interleaved = false, inverse = false;
  Rows y;
};
void rotary(const Rotary& rows);

}  // namespace tandem::kernels::cpu
