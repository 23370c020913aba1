// Fused against unfused: outputs, gradients and kept values of every mask.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "pipeline/pipeline.h"
#include "tandem/export.h"

namespace tandem {

/// Runs a pipeline fused and unfused on the same tensors and generator state: all gradients, and `masks` random subsets of them.
/// Values agree within the tolerance of their dtype (32 units in the last place of the largest element, or of FP8 codes where a recipe
/// is on). On a difference the fusions are switched off one by one, and the one whose absence mends it is named.
TANDEM_API VerifyReport verify(const Pipeline& pipeline, at::TensorList inputs,
                               at::TensorList params, bool training, int masks = 8);

}  // namespace tandem
