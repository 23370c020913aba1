// Recipes: the user's choice of low-precision format and scaling, as frozen values that say how
// each operand is quantized.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "core/json_fwd.h"
#include "core/op_def.h"
#include "core/signature.h"
#include "core/value.h"
#include "kernel_ops/quantize/delayed.h"
#include "tandem/recipe.h"

namespace tandem {

/// Who is to be quantized: which operand of a product, of which op of the pipeline, which of a
/// list.
struct QuantizeSlot {
  Role role = Role::input;
  /// Kind and label of the op: "basic_linear", "2.linear".
  std::string_view kind = {}, op = {};
  size_t slot = 0;
};

/// What a recipe is asked by those who quantize; null: the tensor is not quantized. Throws
/// c10::ValueError where a recipe of the user's names what is no quantizer, one with a state, or,
/// for a weight, whose codes are kept from call to call, one that rounds by chance.
TANDEM_API const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot);

/// What quantizes a tensor, as a quantizer's text; empty: nothing does.
using QuantizerChoice = std::function<std::string(const QuantizeSlot& slot)>;
/// Makes a function known to recipes (CustomRecipe::quantizers). It is asked once for each slot in
/// a process, by any thread. Throws c10::ValueError if the name is taken.
TANDEM_API void register_quantizer_choice(std::string name, QuantizerChoice choice);

/// What backward multiplies by.
TANDEM_API BackwardOverride backward_override(const Recipe& recipe);

/// Whether amaxes are kept of what products take as it is, in plain numbers.
bool is_calibrating(const Recipe& recipe);
/// Rows of the amax history of a recipe that keeps one; 0: it has no state.
TANDEM_API int64_t history_length(const Recipe& recipe);
/// How the scales of a recipe with a state come about, of what is quantized in forward, or of
/// gradients.
const ScaleUpdate& update_of(const Recipe& recipe, bool is_backward);

/// The fields of a recipe, by the name of either, as Python's constructor calls them: reading,
/// writing and Python follow it. Throws c10::ValueError on an unknown recipe.
TANDEM_API const Signature& recipe_signature(std::string_view name);

/// As canonical JSON, and back: the recipe's name, and all of its fields. Throws c10::ValueError on
/// an unknown recipe or field.
TANDEM_API nlohmann::json to_json(const Recipe& recipe);
std::optional<Recipe> recipe_from_json(const nlohmann::json& recipe);

}  // namespace tandem
