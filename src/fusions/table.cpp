// The only list of built-in fusions. A match with more members takes precedence; among equals, this
// order decides. The first fusion that matches and does not refuse is made, and `explain` prints
// every refusal.
#include "fusions/table.h"

#include <algorithm>
#include <vector>

namespace tandem {

namespace fusions {

// Fusions of experts: a product of groups of rows, a unit, and a second product of these groups.

/// grouped_linear -> activation, gated unit or scaled unit -> grouped_linear, one group after the
/// other. The values between the products are computed for the rows of one group, and read while
/// they are in the cache.
///
///   x_g, weight_g -> product -> + bias_g -> z_g -> unit -> h_g, weight'_g -> product -> y_g
///                                            |
///                                            +--> z, written only if demanded
///
/// The joint fusions replace both directions. Of the values between the products they keep only z:
///
///   grad_y_g, weight'_g -> product -> unit.backward(z_g) -> grad_z_g, h_g
///   grad_y_g^T h_g, grad_z_g weight_g, grad_z_g^T x_g, sums over rows -> gradients
///
/// As without the fusion, gradients of weights are returned, added to main_grad, or delayed, and
/// under a recipe each product quantizes the rows of each group separately.
///
/// Both products need the same rows in each group. Where their splits differ, the step computes all
/// groups of one product before the next product.
extern const Fusion kGroupedMlpActivation, kGroupedMlpGlu, kGroupedMlpScaledActivation,
    kGroupedMlpScaledGlu;
extern const Fusion kGroupedMlpActivationForward, kGroupedMlpGluForward,
    kGroupedMlpScaledActivationForward, kGroupedMlpScaledGluForward;

// Fusions of a product with the steps after it, and of its gradients with the steps before and
// after them. Each adds at most one pass over memory to the product.

/// linear (-> bias) (-> constant_scale) (-> add_extra_input). Without a bias the product itself
/// multiplies and adds; an extra input with `in_place` is the tensor that it adds to.
///
///   x, weight -> product -> + bias -> * factor -> + extra -> y
extern const Fusion kLinearSum;

/// linear (-> bias) -> activation (-> quantize), and linear (-> bias) -> gated unit (-> quantize).
/// The quantize step is included only with a bias; without one, the product is z, and the unit and
/// its quantizer are a fusion of their own.
///
///   x, weight -> product (-> + bias) -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///                                    |
///                                    +--> z, written only if demanded, into the memory of the
///                                         product: the activation's backward reads it
extern const Fusion kLinearActivation, kLinearGlu;

/// Backward of a linear that reads the residual stream: grad_x = grad_y W + grad_residual.
///
///   grad_y, weight -> product -> + grad_residual -> grad_x
extern const Fusion kLinearBackwardAdd;

/// Backward of linear -> constant_scale. Both products are multiplied by the factor, and the
/// gradient between linear and constant_scale is not written.
///
///   grad_y, weight -> factor * product -> grad_x
///   grad_y, x      -> factor * product -> grad_weight
extern const Fusion kLinearBackwardScale;

// Fusions of an activation with a bias before it that follows no product, and with a quantizer
// after it; fusions of its backward, or of a bias's backward, with the gradient of the bias and a
// quantizer.

/// activation -> quantize, and gated unit -> quantize. The amax of y is measured while y is in the
/// cache; a quantizer with a given scale then also computes the codes.
///
///   z -> act -> y (if demanded) -> codes, dequant_scale, amax
extern const Fusion kActivationQuantize, kGluQuantize;

/// bias -> activation (-> quantize), and bias -> gated unit (-> quantize).
///
///   x -> + bias -> act -> y (if demanded) (-> codes, dequant_scale, amax)
///           |
///           +--> z, written only if demanded: the activation's backward reads it
extern const Fusion kBiasActivation, kBiasGlu;

/// activation.backward -> (bias.grad_bias) (quantize), and the quantize step of the re-emitted y;
/// also for gated units. One pass computes the gradient of z, its column sums, its codes in both
/// directions and the codes of y, with the bits of the separate steps.
///
///   grad_y, z -> act.backward -> grad_z (if demanded) -> (sum over rows -> grad_bias)
///                    |             |
///                    |             +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kActivationBackward, kGluBackward;

/// bias.grad_bias and the quantize step of the gradient that it sums.
///
///   grad_y -> sum over rows -> grad_bias
///      |
///      +--> codes, dequant_scale, amax
extern const Fusion kBiasBackwardQuantize;

/// constant_scale.backward (-> bias.grad_bias) -> quantize, with the bits of the separate steps.
///
///   grad_y -> factor * grad_y -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                   |
///                                   +--> codes, dequant_scale, amax
extern const Fusion kScaleBackwardQuantize;

// Fusions of a norm with the reader of its output, and of its backward with the gradient of the
// residual stream.

/// rms_norm -> quantize, and layer_norm -> quantize, with the bits of the separate steps. y is
/// written to memory only if it is demanded.
///
///   x -> norm -> y (if demanded) -> codes, dequant_scale, amax
extern const Fusion kRmsNormQuantize, kLayerNormQuantize;

/// add_extra_input -> rms_norm (-> quantize), and add_extra_input -> layer_norm (-> quantize). One
/// pass computes the sum of the residual stream, the norm of the next branch and its codes.
///
///   x, extra -> + -> norm -> y (if demanded) (-> codes, dequant_scale, amax)
///               |
///               +--> sum, written only if demanded
extern const Fusion kAddRmsNorm, kAddLayerNorm, kAddRmsNormQuantize, kAddLayerNormQuantize;

/// norm.backward -> (bias.grad_bias) (quantize), and the quantize step of the re-emitted y. The
/// gradient of x is summed over rows for the bias before the norm; the gradient, and the y that a
/// product of backward reads, are quantized. All this happens while rows are in the cache, with the
/// bits of the separate steps.
///
///   grad_y, x -> norm.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                    |              |
///                    |              +--> (codes, dequant_scale, amax)
///                    +--> y (if demanded) -> (codes, dequant_scale, amax)
extern const Fusion kRmsNormBackward, kLayerNormBackward;

/// The backward fusions above for a norm at the head of a residual branch: grad_x =
/// norm.backward(grad_y) + grad_residual.
///
///   grad_y, x ----> norm.backward --+--> add --> grad_x (if demanded) -> ...
///   grad_residual ------------------+
extern const Fusion kRmsNormBackwardAdd, kLayerNormBackwardAdd;

// Fusions of the dropout of a residual branch with the sums before and after it, and of its
// backward with the gradient of the bias.

/// (bias ->) dropout -> add_extra_input, in one pass. The mask is not written; backward recomputes
/// it from the seed.
///
///   x -> + bias -> dropout -> + extra -> y
extern const Fusion kBiasDropoutAdd, kDropoutAdd;

/// dropout.backward (-> bias.grad_bias) (-> quantize), in one pass. The gradient of x is the
/// gradient of the sum with the bias; it is summed over rows and quantized while rows of it are in
/// the cache, with the bits of the separate steps. The bias may also follow a product.
///
///   grad_y, seed -> dropout.backward -> grad_x (if demanded) -> (sum over rows -> grad_bias)
///                                          |
///                                          +--> (codes, dequant_scale, amax)
extern const Fusion kDropoutBackward;

}  // namespace fusions

std::span<const Fusion> built_in_fusions(Pass pass) {
  using namespace fusions;
  static const std::vector<Fusion> joint{kGroupedMlpActivation, kGroupedMlpGlu,
                                         kGroupedMlpScaledActivation, kGroupedMlpScaledGlu};
  // A sum between a product and a norm can join either. With two members, sum + norm takes
  // precedence over linear + sum; with three, linear + bias + sum takes precedence over sum + norm
  // + quantize. So sum and norm have two fusions, one before kLinearSum and one after it.
  static const std::vector<Fusion> forward{kGroupedMlpActivationForward,
                                           kGroupedMlpGluForward,
                                           kGroupedMlpScaledActivationForward,
                                           kGroupedMlpScaledGluForward,
                                           kAddRmsNorm,
                                           kAddLayerNorm,
                                           kDropoutAdd,
                                           kActivationQuantize,
                                           kGluQuantize,
                                           kLinearActivation,
                                           kLinearGlu,
                                           kLinearSum,
                                           kBiasDropoutAdd,
                                           kBiasActivation,
                                           kBiasGlu,
                                           kAddRmsNormQuantize,
                                           kAddLayerNormQuantize,
                                           kRmsNormQuantize,
                                           kLayerNormQuantize};
  static const std::vector<Fusion> backward{
      kRmsNormBackwardAdd,   kLayerNormBackwardAdd, kActivationBackward, kGluBackward,
      kRmsNormBackward,      kLayerNormBackward,    kDropoutBackward,    kScaleBackwardQuantize,
      kBiasBackwardQuantize, kLinearBackwardAdd,    kLinearBackwardScale};
  switch (pass) {
    case Pass::forward:
      return forward;
    case Pass::backward:
      return backward;
    case Pass::joint:
      return joint;
  }
  return {};
}

bool is_built_in(const Fusion& fusion) {
  return std::ranges::any_of(built_in_fusions(fusion.pass),
                             [&](const Fusion& each) { return &each == &fusion; });
}

}  // namespace tandem
