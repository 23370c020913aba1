// Activations and gated linear units, with the bias of the product before them or a factor per row,
// forward and backward.
#pragma once

#include <array>
#include <iterator>
#include <string_view>
#include <utility>

#include "kernels/partial_sums.h"
#include "kernels/views.h"
#include "tandem/activations.h"

namespace tandem::kernels {

/// The rows of tandem/activations.h, then the units with numbers, which are gated alone. The
/// derivative of relu at 0 is 0.
#define TANDEM_NAME(name, ...) name,
enum class Activation : uint8_t {
  TANDEM_ACTIVATIONS(TANDEM_NAME) TANDEM_NUMBERED_UNITS(TANDEM_NAME)
};
#undef TANDEM_NAME
#define TANDEM_NAME(name, ...) #name,
inline constexpr std::string_view kActivationNames[] = {TANDEM_ACTIVATIONS(TANDEM_NAME)};
#undef TANDEM_NAME

/// Their places in the table, for what is made for each of them.
using ActivationIndices = std::make_index_sequence<std::size(kActivationNames)>;

/// Of a unit in the order of its row. Kernels take them as float32, none larger than 2^100, and
/// betas none smaller than 2^-100.
using UnitNumbers = std::array<double, 3>;
struct NumberedUnit {
  std::string_view name;
  /// Empty behind the last.
  std::array<std::string_view, 3> numbers;
};
#define TANDEM_UNIT(name, formula, ...) {#name, {__VA_ARGS__}},
inline constexpr NumberedUnit kNumberedUnits[] = {TANDEM_NUMBERED_UNITS(TANDEM_UNIT)};
#undef TANDEM_UNIT
using NumberedUnitIndices = std::make_index_sequence<std::size(kNumberedUnits)>;

/// The nth of kNumberedUnits.
constexpr Activation numbered_unit(size_t n) {
  return static_cast<Activation>(std::size(kActivationNames) + n);
}

/// What kernels apply.
struct Function {
  Function(Activation applied) : activation(applied) {}  // NOLINT(google-explicit-constructor)

  Activation activation;
  UnitNumbers numbers = {};
  /// Of a gated unit: a and b take turns in blocks of so many columns; 0: they are halves.
  size_t interleave = 0;
};

namespace cpu {

/// z = x + bias (x where bias is absent), rounded to z_element; y = act(z).
///
/// Shapes:   x, z, y [rows, cols]; bias [cols].
/// Optional: bias; z (null data: not written, but rounded the same).
/// Error:    from float64, before the rounding to y's element, for every finite z: 4 float32 ULP of
///           |y|, plus 2^-121, where z is float32; 2^-16 |y| + 2^-121 where z has 16 bits (tests
///           ActivationAccuracy.*MatchFloat64, EveryBfloat16, *Sweep).
/// Limits:   what torch's formulas give: at -infinity gelu, qgelu, silu, erf_gelu, mish and
///           hard_swish are NaN. NaN gives NaN, in relu too.
void activation_forward(const Function& function, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y);

/// grad_z = grad_y * act'(z); grad_bias = sum over rows of grad_z as rounded, in float32, rounded
/// once; y as forward wrote it, to the bit.
///
/// Optional: grad_bias, y.
/// Error:    of grad_z before the rounding to its element: |grad_y| max(1, |act'|) times 2^-21
///           where z is float32, 2^-15 where it has 16 bits (same tests). As torch does,
///           relu passes grad_y on at NaN, and leaky_relu a hundredth of it; gelu, qgelu, silu,
///           erf_gelu and mish give NaN at both infinities.
void activation_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y);

/// y = act(a) * b, or the unit's formula, with [a, b] the halves of the last dimension of z = x +
/// bias, or blocks by turns. Error: as act, and one rounding of the product; of a unit with numbers
/// 8 float32 ULP or 2^-15 of |y|, plus 2^-121 of the other factor (test UnitAccuracy).
///
/// Shapes:   x, z [rows, 2 * cols]; bias [2 * cols]; y [rows, cols].
/// Optional: bias; z.
void glu_forward(const Function& function, ConstRows x, ConstVector bias, Element z_element, Rows z,
                 Rows y);

/// grad_z = [grad_y * b * act'(a), grad_y * act(a)]; grad_bias and y as in activation_backward.
void glu_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                  Vector grad_bias, Rows y);

/// Either of these backwards for some rows of a matrix, added to the sums of their blocks:
/// with add_partial_sums of all of them the same bits. Optional: sums, y.
void some_rows_backward(const Function& function, bool is_gated, ConstRows grad_y, ConstRows z,
                        Rows grad_z, const PartialSums& part, Rows y);

/// y = act(x) * row_factors, of a gated unit glu(x) * row_factors: one rounding more than these
/// have, none between.
///
/// Shapes: x [rows, cols] or [rows, 2 * cols], row_factors [rows], y [rows, cols].
void scaled_forward(const Function& function, bool is_gated, ConstRows x, ConstVector row_factors,
                    Rows y);

/// grad_x as of the functions above for grad_y * row_factors; grad_row_factors = sum over columns
/// of grad_y times the result without its factor, in float32, rounded once; y as forward wrote it.
///
/// Optional: grad_row_factors, y.
void scaled_backward(const Function& function, bool is_gated, ConstRows grad_y, ConstRows x,
                     ConstVector row_factors, Rows grad_x, Vector grad_row_factors, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
