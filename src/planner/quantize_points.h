// Quantize points: where a recipe quantizes the operands of products. They are inserted before
// fusion, so that results do not depend on what fuses.
#pragma once

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Makes the products of `draft` read codes as the recipe of `description` demands; a step before
/// the first reader writes them. Points of rounding become a quantize and a dequantize step. In a
/// traced plan backward mutates no workspace, because a compiler would copy it.
///
/// Throws: c10::NotImplementedError if an operand has a dtype that no format takes.
void put_quantize_points(const Description& description, const PlanKey& key, Draft& draft);

}  // namespace tandem
