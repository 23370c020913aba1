#include "quantization/recipe.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

namespace tandem {

QuantizePoint quantize_point(const Float8CurrentScaling& recipe, Role role) {
  const bool wide_range =
      role == Role::grad_output && recipe.fp8_format == Float8CurrentScaling::Format::hybrid;
  return {wide_range ? Format::fp8_e5m2 : Format::fp8_e4m3,
          recipe.amax_epsilon[static_cast<size_t>(role)], recipe.use_power_2_scales};
}

nlohmann::json to_json(const Float8CurrentScaling& recipe) {
  return {
      {"name", "Float8CurrentScaling"},
      {"fp8_format", recipe.fp8_format == Float8CurrentScaling::Format::hybrid ? "HYBRID" : "E4M3"},
      {"use_power_2_scales", recipe.use_power_2_scales},
      {"amax_epsilon", {recipe.amax_epsilon[0], recipe.amax_epsilon[1], recipe.amax_epsilon[2]}}};
}

std::optional<Float8CurrentScaling> recipe_from_json(const nlohmann::json& recipe) {
  if (recipe.is_null()) return std::nullopt;
  const std::string name = recipe.value("name", "");
  TORCH_CHECK_VALUE(name == "Float8CurrentScaling",
                    "recipe: expected \"Float8CurrentScaling\", got \"", name,
                    "\". It is the recipe that this version knows.");
  Float8CurrentScaling parsed;
  const std::string format = recipe.value("fp8_format", "HYBRID");
  TORCH_CHECK_VALUE(format == "HYBRID" || format == "E4M3",
                    "recipe: expected fp8_format HYBRID or E4M3, got ", format,
                    ". Pure E5M2 has too few bits for inputs and weights.");
  parsed.fp8_format = format == "HYBRID" ? Float8CurrentScaling::Format::hybrid
                                         : Float8CurrentScaling::Format::e4m3;
  parsed.use_power_2_scales = recipe.value("use_power_2_scales", false);
  if (recipe.contains("amax_epsilon"))
    for (size_t role = 0; role < 3; ++role)
      parsed.amax_epsilon[role] = recipe.at("amax_epsilon").at(role).get<double>();
  return parsed;
}

}  // namespace tandem
