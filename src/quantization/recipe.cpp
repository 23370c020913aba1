#include "quantization/recipe.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/json_fields.h"

namespace tandem {

namespace {

constexpr const char* kEpsilons[] = {"amax_epsilon_input", "amax_epsilon_weight",
                                     "amax_epsilon_grad_output"};

template <typename Format>
const char* name_of(Format format) {
  return format == Format::hybrid ? "HYBRID" : "E4M3";
}

template <typename Format>
Format format_of(const std::string& name) {
  TORCH_CHECK_VALUE(name == "HYBRID" || name == "E4M3",
                    "recipe: expected fp8_format HYBRID or E4M3, got ", shown(name),
                    ". Pure E5M2 has too few bits for inputs and weights.");
  return name == "HYBRID" ? Format::hybrid : Format::e4m3;
}

/// HYBRID gives gradients the wider range.
template <typename Recipe>
bool is_wide(const Recipe& recipe, Role role) {
  return role == Role::grad_output && recipe.fp8_format == Recipe::Format::hybrid;
}

/// How a recipe is written, read and asked: one of these each.
template <typename Recipe>
struct Rules;

template <>
struct Rules<Float8CurrentScaling> {
  using Recipe = Float8CurrentScaling;
  static constexpr const char* kName = "Float8CurrentScaling";

  static const Quantizer& quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    Quantizer options = quantizer(is_wide(recipe, slot.role) ? "fp8_e5m2" : "fp8_e4m3");
    options.amax_epsilon = recipe.amax_epsilon[static_cast<size_t>(slot.role)];
    options.power_of_two = recipe.use_power_2_scales;
    return quantizer(std::move(options));
  }

  static nlohmann::json fields(const Recipe& recipe) {
    nlohmann::json fields{{"fp8_format", name_of(recipe.fp8_format)},
                          {"use_power_2_scales", recipe.use_power_2_scales}};
    for (size_t role = 0; role < std::size(kEpsilons); ++role)
      fields[kEpsilons[role]] = recipe.amax_epsilon[role];
    return fields;
  }

  static Recipe parse(Fields& fields) {
    Recipe recipe;
    std::string format = name_of(recipe.fp8_format);
    fields.get("fp8_format", format).get("use_power_2_scales", recipe.use_power_2_scales);
    for (size_t role = 0; role < std::size(kEpsilons); ++role) {
      double& epsilon = recipe.amax_epsilon[role];
      fields.get(kEpsilons[role], epsilon);
      TORCH_CHECK_VALUE(epsilon >= 0 && std::isfinite(epsilon), "recipe: expected ",
                        kEpsilons[role], " finite and at least 0, got ", epsilon,
                        ". It is the least amax.");
    }
    recipe.fp8_format = format_of<Recipe::Format>(format);
    return recipe;
  }
};

constexpr int64_t kMostMargin = 64, kMostHistory = 65536;

template <>
struct Rules<DelayedScaling> {
  using Recipe = DelayedScaling;
  static constexpr const char* kName = "DelayedScaling";

  static const Quantizer& quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    return quantizer(is_wide(recipe, slot.role) ? "fp8_e5m2:delayed" : "fp8_e4m3:delayed");
  }

  static nlohmann::json fields(const Recipe& recipe) {
    nlohmann::json fields{{"amax_compute_algo", name_of(recipe.amax_compute_algo)},
                          {"amax_history_len", recipe.amax_history_len},
                          {"fp8_format", tandem::name_of(recipe.fp8_format)},
                          {"margin", recipe.margin},
                          {"reduce_amax", recipe.reduce_amax}};
    if (!recipe.amax_reduction_group.empty())
      fields["amax_reduction_group"] = recipe.amax_reduction_group;
    if (!recipe.scale_update.empty()) fields["scale_update"] = recipe.scale_update;
    return fields;
  }

  static Recipe parse(Fields& fields) {
    Recipe recipe;
    std::string format = tandem::name_of(recipe.fp8_format),
                algorithm = name_of(recipe.amax_compute_algo);
    fields.get("amax_compute_algo", algorithm)
        .get("amax_history_len", recipe.amax_history_len, 1, kMostHistory)
        .get("fp8_format", format)
        .get("margin", recipe.margin, -kMostMargin, kMostMargin)
        .get("reduce_amax", recipe.reduce_amax)
        .get("amax_reduction_group", recipe.amax_reduction_group)
        .get("scale_update", recipe.scale_update);
    TORCH_CHECK_VALUE(algorithm == "max" || algorithm == "most_recent",
                      "recipe: expected amax_compute_algo max or most_recent, got ",
                      shown(algorithm), ". Name which amax of the history counts.");
    recipe.fp8_format = format_of<Recipe::Format>(format);
    recipe.amax_compute_algo =
        algorithm == "max" ? Recipe::AmaxAlgorithm::max : Recipe::AmaxAlgorithm::most_recent;
    return recipe;
  }

  static const char* name_of(Recipe::AmaxAlgorithm algorithm) {
    return algorithm == Recipe::AmaxAlgorithm::max ? "max" : "most_recent";
  }
};

template <>
struct Rules<MXFP8BlockScaling> {
  using Recipe = MXFP8BlockScaling;
  static constexpr const char* kName = "MXFP8BlockScaling";

  static const Quantizer& quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    Quantizer options = quantizer(is_wide(recipe, slot.role) ? "mxfp8_e5m2" : "mxfp8_e4m3");
    options.square_blocks = recipe.enable_2d_quantization && slot.role == Role::weight;
    return quantizer(std::move(options));
  }

  static nlohmann::json fields(const Recipe& recipe) {
    return {{"fp8_format", name_of(recipe.fp8_format)},
            {"enable_2d_quantization", recipe.enable_2d_quantization}};
  }

  static Recipe parse(Fields& fields) {
    Recipe recipe;
    std::string format = name_of(recipe.fp8_format);
    fields.get("fp8_format", format).get("enable_2d_quantization", recipe.enable_2d_quantization);
    recipe.fp8_format = format_of<Recipe::Format>(format);
    return recipe;
  }
};

template <size_t... I>
std::optional<Recipe> parse_named(const std::string& name, Fields& fields,
                                  std::index_sequence<I...>) {
  std::optional<Recipe> parsed;
  const auto attempt = [&]<typename R>(std::type_identity<R>) {
    if (name == Rules<R>::kName) parsed = Rules<R>::parse(fields);
  };
  (attempt(std::type_identity<std::variant_alternative_t<I, Recipe>>()), ...);
  return parsed;
}

template <size_t... I>
std::string names_of(std::index_sequence<I...>) {
  std::string names;
  const auto add = [&](const char* name) {
    names += std::string(names.empty() ? "\"" : " or \"") + name + "\"";
  };
  (add(Rules<std::variant_alternative_t<I, Recipe>>::kName), ...);
  return names;
}

constexpr std::make_index_sequence<std::variant_size_v<Recipe>> kAll;

}  // namespace

const Quantizer& quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
  return std::visit(
      [&]<typename R>(const R& each) -> const Quantizer& {
        return Rules<R>::quantizer_of(each, slot);
      },
      recipe);
}

int64_t history_length(const Recipe& recipe) {
  const auto* delayed = std::get_if<DelayedScaling>(&recipe);
  return delayed == nullptr ? 0 : delayed->amax_history_len;
}

const ScaleUpdate& update_of(const Recipe& recipe, bool is_backward) {
  const auto& delayed = std::get<DelayedScaling>(recipe);
  using Algorithm = DelayedScaling::AmaxAlgorithm;
  const bool is_wide = is_backward && delayed.fp8_format == DelayedScaling::Format::hybrid;
  ScaleUpdate update;
  update.scaling.format = is_wide ? kernels::Fp8Format::e5m2 : kernels::Fp8Format::e4m3;
  update.scaling.margin = static_cast<int>(delayed.margin);
  update.scaling.algorithm = delayed.amax_compute_algo == Algorithm::max
                                 ? kernels::AmaxAlgorithm::max
                                 : kernels::AmaxAlgorithm::most_recent;
  update.function = delayed.scale_update;
  if (delayed.reduce_amax) update.group = delayed.amax_reduction_group;
  return scale_update(std::move(update));
}

nlohmann::json to_json(const Recipe& recipe) {
  return std::visit(
      []<typename R>(const R& each) {
        nlohmann::json fields = Rules<R>::fields(each);
        fields["name"] = Rules<R>::kName;
        return fields;
      },
      recipe);
}

std::optional<Recipe> recipe_from_json(const nlohmann::json& recipe) {
  if (recipe.is_null()) return std::nullopt;
  Fields fields(recipe, "recipe");
  std::string name;
  fields.get("name", name);
  auto parsed = parse_named(name, fields, kAll);
  TORCH_CHECK_VALUE(parsed, "recipe: expected ", names_of(kAll), ", got \"", shown(name),
                    "\". These are the recipes that this version knows.");
  fields.finish();
  return parsed;
}

}  // namespace tandem
