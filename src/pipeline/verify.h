// Fused against unfused: every fused step on its own, and outputs, gradients and kept values of the
// whole, for every mask.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "pipeline/pipeline.h"
#include "tandem/export.h"

namespace tandem {

/// Runs a pipeline unfused, keeping every value, and compares with it, for all given and asked
/// gradients and `masks` random subsets:
///
///   1. each fused step of that subset's plan, run on the very values that the ops which it
///      replaces have read. What it writes may differ by the rounding of the dtypes that these ops
///      write, once per op, and of the arithmetic within. In bfloat16 and float16 it must also be
///      as near to what these ops write in float32 as roundings allow, each half a unit at most.
///      Codes that differ must decode to numbers within half a unit of their format, in relative
///      norm. For each random subset also where inputs and given gradients lie in memory of another
///      layout.
///   2. the fused pipeline as a whole: outputs, gradients, kept values. Behind fused steps that
///      gave the same bits in 1 they are the same bits; elsewhere the roundings on the way to them
///      add up, and behind codes that may differ the format's bound holds, in norm.
///
/// The text names fusions of users that were refused wherever they matched: nothing of them was
/// compared. NaN and infinity equal themselves. A difference in 1 names the fused step. On one that
/// shows in 2 alone the fusions are left out one by one, and the one whose absence mends it is
/// named. Tensors and generators of the caller are left as they were.
///
/// `state_of`: as a call has it; what it gives is copied. Throws: what a call throws.
TANDEM_API VerifyReport verify(const Pipeline& pipeline, at::TensorList inputs,
                               at::TensorList params, bool training, int masks = 8,
                               const StateOf& state_of = {});

}  // namespace tandem
