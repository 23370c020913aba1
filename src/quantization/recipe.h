// Recipes: the user's choice of low-precision format and scaling, as frozen values that say how each operand is quantized.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "core/op_def.h"
#include "core/value.h"
#include "tandem/recipe.h"

namespace tandem {

/// Who is to be quantized: which operand of a product, of which op of the pipeline (npos: of a point of rounding), which of a list.
struct QuantizeSlot {
  Role role = Role::input;
  size_t op = npos;
  size_t slot = 0;
};

/// The only question that a recipe answers.
const Quantizer& quantizer_of(const Recipe& recipe, const QuantizeSlot& slot);

/// As canonical JSON, and back: the recipe's name, and its fields as Python's constructor calls them. Throws c10::ValueError on an unknown
/// recipe or field.
TANDEM_API nlohmann::json to_json(const Recipe& recipe);
std::optional<Recipe> recipe_from_json(const nlohmann::json& recipe);

}  // namespace tandem
