// Quantize points: where a recipe wants the operands of products in its formats, on the unfused
// list. What is computed must not depend on what fuses.
#pragma once

#include "planner/draft.h"
#include "planner/key.h"

namespace tandem {

/// Makes the products of `draft` read codes as the recipe of `description` says, each written by a
/// step before its first reader, and turns points of rounding into a quantize and a dequantize
/// step. In a traced plan backward mutates no workspace, which a compiler would copy.
///
/// Throws: c10::NotImplementedError where an operand has a dtype that no format takes.
void put_quantize_points(const Description& description, const PlanKey& key, Draft& draft);

}  // namespace tandem
