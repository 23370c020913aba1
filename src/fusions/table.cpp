// The only list of built-in fusions. A match with more members takes precedence; among equals, this
// order decides. The first fusion that matches and does not refuse is made, and `explain` prints
// every refusal.
#include "fusions/table.h"

#include <algorithm>
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
