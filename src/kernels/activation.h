// Activations and gated linear units, with the bias of the product before them, forward and
// backward.
#pragma once

#include <iterator>
#include <string_view>
#include <utility>

#include "kernels/views.h"
#include "tandem/activations.h"

namespace tandem::kernels {

/// The rows of tandem/activations.h. The derivative of relu at 0 is 0.
#define TANDEM_NAME(name, ...) name,
enum class Activation : uint8_t { TANDEM_ACTIVATIONS(TANDEM_NAME) };
#undef TANDEM_NAME
#define TANDEM_NAME(name, ...) #name,
inline constexpr std::string_view kActivationNames[] = {TANDEM_ACTIVATIONS(TANDEM_NAME)};
#undef TANDEM_NAME

/// Their places in the table, for what is made for each of them.
using ActivationIndices = std::make_index_sequence<std::size(kActivationNames)>;

namespace cpu {

/// z = x + bias (x where bias is absent), rounded to z_element; y = act(z).
///
/// Shapes:   x, z, y [rows, cols]; bias [cols].
/// Optional: bias; z (null data: not written, but rounded the same).
/// Error:    from float64, before the rounding to y's element, for every finite z: 4 float32 ULP of
///           |y|, plus 2^-121, where z is float32; 2^-16 |y| + 2^-121 where z has 16 bits (tests
///           ActivationAccuracy.*MatchFloat64, EveryBfloat16, *Sweep).
/// Limits:   y is x at infinity; at -infinity gelu and silu give NaN, as torch does, and relu 0;
///           NaN gives NaN, in relu too.
void activation_forward(Activation activation, ConstRows x, ConstVector bias, Element z_element,
                        Rows z, Rows y);

/// grad_z = grad_y * act'(z); grad_bias = sum over rows of grad_z as rounded, in float32, rounded
/// once; y as forward wrote it, to the bit.
///
/// Optional: grad_bias, y.
/// Error:    of grad_z before the rounding to its element: |grad_y| max(1, |act'|) times 2^-21
///           where z is float32, 2^-15 where it has 16 bits (same tests). relu passes grad_y on at
///           NaN, and gelu and silu give NaN at both infinities, as torch does.
void activation_backward(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                         Vector grad_bias, Rows y);

/// y = act(a) * b with [a, b] the halves of the last dimension of z = x + bias. Error: as act, and
/// one rounding of the product.
///
/// Shapes:   x, z [rows, 2 * cols]; bias [2 * cols]; y [rows, cols].
/// Optional: bias; z.
void glu_forward(Activation activation, ConstRows x, ConstVector bias, Element z_element, Rows z,
                 Rows y);

/// grad_z = [grad_y * b * act'(a), grad_y * act(a)]; grad_bias and y as in activation_backward.
void glu_backward(Activation activation, ConstRows grad_y, ConstRows z, Rows grad_z,
                  Vector grad_bias, Rows y);

}  // namespace cpu
}  // namespace tandem::kernels
