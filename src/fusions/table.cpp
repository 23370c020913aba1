// The only list of built-in fusions. The first that matches and does not refuse wins; `explain`
// prints every refusal.
#include "fusions/table.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "fusions/activation.h"
#include "fusions/dropout.h"
#include "fusions/grouped_mlp.h"
#include "fusions/linear.h"
#include "fusions/norm.h"

namespace tandem {

namespace {

std::vector<Fusion> longest_first(std::vector<Fusion> fusions) {
  const auto length = [](const Fusion& fusion) { return fusion.pattern.size(); };
  TORCH_INTERNAL_ASSERT(std::ranges::is_sorted(fusions, std::greater(), length),
                        "longer patterns come first, otherwise a shorter one hides them");
  return fusions;
}

}  // namespace

std::span<const Fusion> built_in_fusions(Pass pass) {
  using namespace fusions;
  static const auto joint = longest_first(
      {kGroupedMlpActivation, kGroupedMlpGlu, kGroupedMlpScaledActivation, kGroupedMlpScaledGlu});
  static const auto forward = longest_first({kLinearBiasScaleAdd,
                                             kLinearBiasActivationQuantize,
                                             kLinearBiasGluQuantize,
                                             kGroupedMlpActivationForward,
                                             kGroupedMlpGluForward,
                                             kGroupedMlpScaledActivationForward,
                                             kGroupedMlpScaledGluForward,
                                             kLinearBiasActivation,
                                             kLinearBiasGlu,
                                             kLinearBiasAdd,
                                             kLinearBiasScale,
                                             kLinearScaleAdd,
                                             kBiasDropoutAdd,
                                             kBiasActivationQuantize,
                                             kBiasGluQuantize,
                                             kAddRmsNormQuantize,
                                             kAddLayerNormQuantize,
                                             kAddRmsNorm,
                                             kAddLayerNorm,
                                             kDropoutAdd,
                                             kActivationQuantize,
                                             kGluQuantize,
                                             kLinearActivation,
                                             kLinearGlu,
                                             kLinearAdd,
                                             kLinearScale,
                                             kLinearBias,
                                             kBiasActivation,
                                             kBiasGlu,
                                             kRmsNormQuantize,
                                             kLayerNormQuantize});
  static const auto backward = longest_first(
      {kRmsNormBackwardAdd, kLayerNormBackwardAdd, kActivationBackward, kGluBackward,
       kRmsNormBackward, kLayerNormBackward, kLinearBackwardScale, kDropoutBackwardBiasQuantize,
       kDropoutBackwardQuantize, kDropoutBackwardBias, kBiasBackwardQuantize, kLinearBackwardAdd,
       kLinearGradXScale, kLinearGradWeightScale});
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
