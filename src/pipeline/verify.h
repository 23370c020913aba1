// Compares fused with unfused: every fused step alone, and outputs, gradients and kept values of
// the whole, for every mask.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "pipeline/pipeline.h"
#include "tandem/export.h"

namespace tandem {

/// Runs a pipeline unfused, keeping every value, and compares with it, for all given and requested
/// gradients and for `masks` random subsets:
///
///   1. each fused step of that subset's plan, run on the values that the replaced ops have read.
///      What it writes may differ by the rounding of the dtypes that these ops write, once per op,
///      and of the arithmetic within. In bfloat16 and float16 it must also be as near to what these
///      ops write in float32 as roundings of half a unit each allow. If codes differ, their
///      dequantized values must agree within half a unit of the format, in relative norm. For each
///      random subset, steps are also compared on inputs and given gradients in memory of another
///      layout.
///   2. the fused pipeline as a whole: outputs, gradients, kept values. They are bitwise equal if
///      the fused steps before them were bitwise equal in 1. Otherwise the roundings before them
///      add up, and after codes that may differ the format's bound holds, in norm.
///
/// The text names users' fusions that were refused wherever they matched, because nothing of them
/// was compared. NaN and infinity equal themselves. A difference in 1 names the fused step. For a
/// difference that shows only in 2, fusions are left out one by one, and the one whose absence
/// removes the difference is named. Tensors and generators of the caller are not changed.
///
/// `state_of`: as in a call; its tensors are copied.
/// Throws: what a call throws.
TANDEM_API VerifyReport verify(const Pipeline& pipeline, at::TensorList inputs,
                               at::TensorList params, bool training, int masks = 8,
                               const StateOf& state_of = {});

}  // namespace tandem
