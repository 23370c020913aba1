// The only list of built-in fusions. What has the most members comes first, in this order among the
// same number; the first that matches and does not refuse wins; `explain` prints every refusal.
#include "fusions/table.h"

#include <vector>

#include "fusions/activation.h"
#include "fusions/dropout.h"
#include "fusions/grouped_mlp.h"
#include "fusions/linear.h"
#include "fusions/norm.h"

namespace tandem {

std::span<const Fusion> built_in_fusions(Pass pass) {
  using namespace fusions;
  static const std::vector<Fusion> joint{kGroupedMlpActivation, kGroupedMlpGlu,
                                         kGroupedMlpScaledActivation, kGroupedMlpScaledGlu};
  // linear_add gives way to add_rms_norm, and add_rms_norm_quantize to linear_bias_add: so these
  // are two fusions of a sum and a norm.
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
      kRmsNormBackwardAdd,   kLayerNormBackwardAdd, kActivationBackward,  kGluBackward,
      kRmsNormBackward,      kLayerNormBackward,    kLinearBackwardScale, kDropoutBackward,
      kBiasBackwardQuantize, kLinearBackwardAdd};
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

}  // namespace tandem
