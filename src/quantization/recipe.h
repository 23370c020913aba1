// Recipes: the user's choice of low-precision format and scaling, as frozen values.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "core/op_def.h"
#include "core/value.h"
#include "tandem/recipe.h"

namespace tandem {

/// How one role is quantized: the options of a quantize step.
struct QuantizePoint {
  Format format = Format::fp8_e4m3;
  double amax_epsilon = 0;
  bool use_power_2_scales = false;
};

/// What a quantize step's options hold: the arguments of kernel op quantize_current.
struct QuantizeArguments {
  std::string_view format;
  double amax_epsilon = 0;
  bool use_power_2_scales = false;
};

QuantizePoint quantize_point(const Float8CurrentScaling& recipe, Role role);

/// As canonical JSON, and back. Throws c10::ValueError on an unknown recipe or field.
TANDEM_API nlohmann::json to_json(const Float8CurrentScaling& recipe);
std::optional<Float8CurrentScaling> recipe_from_json(const nlohmann::json& recipe);

}  // namespace tandem
