// Heads rotated by the angles of their positions.
#pragma once

#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// Rotates heads. A row of x has heads of head_dim columns side by side. In the first `heads` of
/// them, a pair (a, b) of the first `features` columns becomes
///   (a cos_a - b sin_a, b cos_b + a sin_b), or, `inverse`, (a cos_a + b sin_b, b cos_b - a sin_a),
/// with cosines and sines of row r % positions and of the columns of a and b. The columns of a pair
/// are i and i + features / 2, or 2 i and 2 i + 1 with `interleaved`. All other columns are copied.
///
/// Shapes:  x, y [rows, any number of whole heads]; cosines, sines [positions, features].
/// Memory:  y may be x.
/// Dtypes:  any Element, equal for x and y; arithmetic in float32.
/// Error:   2^-23 (|a cos_a| + |b sin_a|) before the one rounding, and likewise for the other
///          results (test Rotary.Turns).
/// Bytes:   reads x once, writes y once.
struct Rotary {
  ConstRows x;
  const float *cosines, *sines;
  size_t positions, heads, head_dim, features;
  bool interleaved = false, inverse = false;
  Rows y;
};
void rotary(const Rotary& rows);

}  // namespace tandem::kernels::cpu
