// Recipes: the user's choice of low-precision formats and scales, as values that are never changed.
// A recipe determines how each operand is quantized.
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

/// The operand to quantize: its role in a product, the op, and its index if it is a list element.
struct QuantizeSlot {
  Role role = Role::input;
  /// Kind and label of the op: "basic_linear", "2.linear".
  std::string_view kind = {}, op = {};
  size_t slot = 0;
};

/// The recipe's quantizer for an operand; nullptr: the operand is not quantized. Throws
/// c10::ValueError if a function of the user names an invalid quantizer, one with a state, or, for
/// a weight, whose codes are kept from call to call, one that rounds stochastically.
TANDEM_API const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot);

/// A function that returns the text of an operand's quantizer; empty: the operand is not quantized.
using QuantizerChoice = std::function<std::string(const QuantizeSlot& slot)>;
/// Registers a function for recipes (CustomRecipe::quantizers). Any thread may call it; its answer
/// for a slot is kept for the life of the process. Throws c10::ValueError if the name is taken.
TANDEM_API void register_quantizer_choice(std::string name, QuantizerChoice choice);

/// What the products of backward read.
TANDEM_API BackwardOverride backward_override(const Recipe& recipe);

/// Whether the recipe only records amaxes, and products read unquantized operands.
bool is_calibrating(const Recipe& recipe);
/// The number of rows of the recipe's amax history; 0: the recipe has no state.
TANDEM_API int64_t history_length(const Recipe& recipe);
/// How a stateful recipe updates the scales of forward's operands, or of gradients.
const ScaleUpdate& update_of(const Recipe& recipe, bool is_backward);

/// The fields of a recipe by their names in Python's constructor. `name` is the recipe's name. JSON
/// and the Python classes follow from them. Throws c10::ValueError for an unknown recipe.
TANDEM_API const Signature& recipe_signature(std::string_view name);

/// The recipe's name and all of its fields as canonical JSON, and back. Throws c10::ValueError for
/// an unknown recipe or field.
TANDEM_API nlohmann::json to_json(const Recipe& recipe);
std::optional<Recipe> recipe_from_json(const nlohmann::json& recipe);

}  // namespace tandem
