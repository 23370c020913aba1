#include "quantization/recipe.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/json_fields.h"

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
  Fields fields(recipe, "recipe");
  std::string name, format = "HYBRID";
  fields.get("name", name);
  TORCH_CHECK_VALUE(name == "Float8CurrentScaling",
                    "recipe: expected \"Float8CurrentScaling\", got \"", shown(name),
                    "\". It is the recipe that this version knows.");
  Float8CurrentScaling parsed;
  std::vector<double> epsilons(std::begin(parsed.amax_epsilon), std::end(parsed.amax_epsilon));
  fields.get("fp8_format", format)
      .get("use_power_2_scales", parsed.use_power_2_scales)
      .get("amax_epsilon", epsilons, std::size(parsed.amax_epsilon))
      .finish();
  TORCH_CHECK_VALUE(format == "HYBRID" || format == "E4M3",
                    "recipe: expected fp8_format HYBRID or E4M3, got ", shown(format),
                    ". Pure E5M2 has too few bits for inputs and weights.");
  parsed.fp8_format = format == "HYBRID" ? Float8CurrentScaling::Format::hybrid
                                         : Float8CurrentScaling::Format::e4m3;
  TORCH_CHECK_VALUE(epsilons.size() == std::size(parsed.amax_epsilon) &&
                        *std::min_element(epsilons.begin(), epsilons.end()) >= 0,
                    "recipe: expected ", std::size(parsed.amax_epsilon),
                    " numbers >= 0 as amax_epsilon, got ", shown_json(nlohmann::json(epsilons)),
                    ". Give one for inputs, weights and gradients each.");
  std::copy(epsilons.begin(), epsilons.end(), std::begin(parsed.amax_epsilon));
  return parsed;
}

}  // namespace tandem
