// Activations and gated units, forward and backward, after a bias or before a factor for each row.
#pragma once

#include <array>
#include <iterator>
#include <string_view>
#include <utility>

#include "kernels/partial_sums.h"
#include "kernels/views.h"
#include "tandem/activations.h"

namespace tandem::kernels {

/// The rows of tandem/activations.h, then the gated units with numeric options. The derivative of
/// relu at 0 is 0.
#define TANDEM_NAME(name, ...) name,
enum class Activation : uint8_t {
  TANDEM_ACTIVATIONS(TANDEM_NAME) TANDEM_NUMBERED_UNITS(TANDEM_NAME)
};
#undef TANDEM_NAME
#define TANDEM_NAME(name, ...) #name,
inline constexpr std::string_view kActivationNames[] = {TANDEM_ACTIVATIONS(TANDEM_NAME)};
#undef TANDEM_NAME

/// The indices of the activations, for code that is generated for each of them.
using ActivationIndices = std::make_index_sequence<std::size(kActivationNames)>;

/// The numeric options of a unit, in the order of its row. Kernels take them as float32: at most
/// 2^100, and betas at least 2^-100.
using UnitNumbers = std::array<double, 3>;
struct NumberedUnit {
  std::string_view name;
  /// Names of the options; empty after the last one.
  std::array<std::string_view, 3> numbers;
};
#define TANDEM_UNIT(name, formula, ...) {#name, {__VA_ARGS__}},
inline constexpr NumberedUnit kNumberedUnits[] = {TANDEM_NUMBERED_UNITS(TANDEM_UNIT)};
#undef TANDEM_UNIT
using NumberedUnitIndices = std::make_index_sequence<std::size(kNumberedUnits)>;

/// The nth unit of kNumberedUnits.
constexpr Activation numbered_unit(size_t n) {
  return static_cast<Activation>(std::size(kActivationNames) + n);
}

/// A function with its options, which kernels apply.
struct Function {
  Function(Activation applied, bool gated = false)  // NOLINT(google-explicit-constructor)
      : activation(applied), is_gated(gated) {}

  Activation activation;
  /// The function is a gated unit: its formula of a and b, such as act(a) * b, where z = [a, b].
  bool is_gated;
  UnitNumbers numbers = {};
  /// For a gated unit: a and b alternate in blocks of this many columns; 0: they are the halves of
  /// z.
  size_t interleave = 0;
};

namespace cpu {

/// z = x + bias (x where bias is absent), rounded to z_element; y = act(z), or the formula of the
/// gated unit.
///
/// Shapes:   x, z, y [rows, cols]; bias [cols]; for a gated unit x, z [rows, 2 * cols], bias
///          [2 * cols].
/// Optional: bias; z (null data: not written, but rounded all the same).
/// Error:    from float64, before the rounding to y's element, for every finite z: 4 float32 ULP of
///          |y|, plus 2^-121, where z is float32; 2^-16 |y| + 2^-121 where z has 16 bits (tests
///          ActivationAccuracy.*MatchFloat64, EveryBfloat16, *Sweep); for a gated unit one rounding
///          of the product more; for a unit with numeric options 8 float32 ULP or 2^-15 of |y|,
///          plus 2^-121 of the other factor (test UnitAccuracy).
/// Limits:   the values of torch's formulas: at -infinity gelu, qgelu, silu, erf_gelu, mish and
///          hard_swish are NaN. NaN gives NaN, also in relu.
void activation_forward(const Function& function, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y);

/// grad_z = grad_y * act'(z), or for a gated unit [grad_y * b * act'(a), grad_y * act(a)];
/// grad_bias = sum over rows of the rounded grad_z, in float32, rounded once; y has the bits of
/// forward's y.
///
/// Optional: grad_bias, y.
/// Error:    of grad_z before the rounding to its element: |grad_y| max(1, |act'|) times 2^-21
///          where z is float32, 2^-15 where it has 16 bits (tests
///          ActivationAccuracy.*MatchFloat64, EveryBfloat16, *Sweep).
/// Limits:   the values of torch's formulas: at NaN relu gives grad_y, and leaky_relu a hundredth
///          of it; at both infinities gelu, qgelu, silu, erf_gelu and mish give NaN.
void activation_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y);

/// activation_backward for some rows of a matrix, which adds the sums of the rows to the sums of
/// their blocks. After all rows, add_partial_sums gives the bits of one call.
/// Optional: sums, y.
void some_rows_backward(const Function& function, ConstRows grad_y, ConstRows z, Rows grad_z,
                        const PartialSums& part, Rows y);

/// y = the function of x * row_factors, rounded once. The error has one rounding more than
/// activation_forward.
///
/// Shapes:  x [rows, cols] or [rows, 2 * cols], row_factors [rows], y [rows, cols].
void scaled_forward(const Function& function, ConstRows x, ConstVector row_factors, Rows y);

/// grad_x as in activation_backward of grad_y * row_factors; grad_row_factors = sum over columns of
/// grad_y times the unscaled result, in float32, rounded once; y has the bits of forward's y.
///
/// Optional: grad_row_factors, y.
void scaled_backward(const Function& function, ConstRows grad_y, ConstRows x,
                     ConstVector row_factors, Rows grad_x, Vector grad_row_factors, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
