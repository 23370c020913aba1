#include "quantization/recipe.h"

#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <tuple>
#include <typeinfo>

#include "core/json_fields.h"
#include "quantization/formats/format.h"

namespace tandem {

namespace {

/// Under HYBRID, gradients have the format with the wider range.
bool is_wide(RecipeFormat format, bool is_gradient) {
  return is_gradient && format == RecipeFormat::hybrid;
}

/// The field that all recipes have.
template <typename Recipe>
Option<Recipe> format_option() {
  return {
      "fp8_format", &Recipe::fp8_format, one_of({"HYBRID", "E4M3"}),
      "formats of the operands: HYBRID is E5M2 for gradients, E4M3 for the others; pure E5M2 has "
      "too few bits for inputs and weights"};
}

template <typename Recipe>
Option<Recipe> override_option() {
  return {"backward_override", &Recipe::backward_override,
          one_of({"none", "high_precision", "dequantized"}),
          "what backward multiplies by instead of codes"};
}

/// The functions that users registered, and their answers.
class Choices {
 public:
  void add(std::string name, QuantizerChoice choice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [entry, is_new] = choices_.try_emplace(std::move(name));
    TORCH_CHECK_VALUE(is_new, "register_quantizer_choice: expected a new name, got \"",
                      entry->first, "\", which is taken. Choose another.");
    entry->second = std::make_shared<Choice>(Choice{std::move(choice), {}});
  }

  const Quantizer* of(const std::string& name, const QuantizeSlot& slot) {
    const std::shared_ptr<Choice> choice = find(name);
    const Key key{slot.role, std::string(slot.kind), std::string(slot.op), slot.slot};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto known = choice->made.find(key); known != choice->made.end())
        return known->second;
    }
    const std::string text = choice->choose(slot);  // unlocked: it may wait for another thread
    const Quantizer* const chosen = text.empty() ? nullptr : &quantizer(text);
    TORCH_CHECK_VALUE(chosen == nullptr || given_to(*chosen) != Given::scale,
                      "CustomRecipe: expected quantizers whose scales follow from the numbers, ",
                      "got \"", text, "\" for ", slot.op.empty() ? slot.kind : slot.op,
                      ", whose scale is one of the past. Use DelayedScaling for the whole region.");
    TORCH_CHECK_VALUE(
        chosen == nullptr || slot.role != Role::weight || given_to(*chosen) != Given::seed,
        "CustomRecipe: expected a quantizer that rounds to nearest for the weight of ",
        slot.op.empty() ? slot.kind : slot.op, ", as its codes are kept from call to call, got \"",
        text, "\". Round gradients so, whose role is grad_output.");
    const std::lock_guard<std::mutex> lock(mutex_);
    return choice->made.try_emplace(key, chosen).first->second;
  }

 private:
  using Key = std::tuple<Role, std::string, std::string, size_t>;
  struct Choice {
    QuantizerChoice choose;
    std::map<Key, const Quantizer*> made;
  };

  std::shared_ptr<Choice> find(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = choices_.find(name);
    TORCH_CHECK_VALUE(entry != choices_.end(),
                      "CustomRecipe: expected the name of a function that was registered in this ",
                      "process, got \"", shown(name), "\". Make the recipe again here.");
    return entry->second;
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Choice>> choices_;
};

Choices& choices() {
  static auto& choices = *new Choices;
  return choices;
}

/// The rules of a recipe: its fields in the order of Python's constructor, and how it quantizes.
/// This is the only list of fields.
template <typename Recipe>
struct Rules;

template <>
struct Rules<Float8CurrentScaling> {
  using Recipe = Float8CurrentScaling;
  static constexpr std::string_view kName = "Float8CurrentScaling";

  static Signature signature() {
    return {
        Recipe(),
        {{"use_power_2_scales", &Recipe::use_power_2_scales, "whether scales are powers of two"},
         format_option<Recipe>(),
         {"amax_epsilon_input", &Recipe::amax_epsilon_input, at_least(0),
          "the least amax of inputs"},
         {"amax_epsilon_weight", &Recipe::amax_epsilon_weight, at_least(0),
          "the least amax of weights"},
         {"amax_epsilon_grad_output", &Recipe::amax_epsilon_grad_output, at_least(0),
          "the least amax of gradients"},
         override_option<Recipe>()}};
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    const bool is_gradient = slot.role == Role::grad_output;
    Quantizer options =
        quantizer(is_wide(recipe.fp8_format, is_gradient) ? "fp8_e5m2" : "fp8_e4m3");
    options.amax_epsilon = is_gradient                 ? recipe.amax_epsilon_grad_output
                           : slot.role == Role::weight ? recipe.amax_epsilon_weight
                                                       : recipe.amax_epsilon_input;
    options.power_of_two = recipe.use_power_2_scales;
    return &quantizer(std::move(options));
  }
};

template <>
struct Rules<DelayedScaling> {
  using Recipe = DelayedScaling;
  static constexpr std::string_view kName = "DelayedScaling";

  static Signature signature() {
    return {Recipe(),
            {{"margin", &Recipe::margin, between(-64, 64),
              "scales are 2^margin times smaller than they could be"},
             format_option<Recipe>(),
             {"amax_history_len", &Recipe::amax_history_len, between(1, 65536), "steps that count"},
             {"amax_compute_algo", &Recipe::amax_compute_algo, one_of({"max", "most_recent"}),
              "which amax of the history counts"},
             {"reduce_amax", &Recipe::reduce_amax, "whether processes share their amaxes"},
             {"amax_reduction_group", &Recipe::amax_reduction_group,
              "name of the process group that shares them; empty: none does"},
             {"scale_update", &Recipe::scale_update,
              "name of a function that makes scales; empty: as amax_compute_algo says"},
             {"calibrating", &Recipe::calibrating,
              "whether amaxes are kept and products take plain numbers"}}};
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    return &quantizer(is_wide(recipe.fp8_format, slot.role == Role::grad_output)
                          ? "fp8_e5m2:delayed"
                          : "fp8_e4m3:delayed");
  }
};

template <>
struct Rules<Float8BlockScaling> {
  using Recipe = Float8BlockScaling;
  static constexpr std::string_view kName = "Float8BlockScaling";

  static Signature signature() {
    return {
        Recipe(),
        {{"use_f32_scales", &Recipe::use_f32_scales, "whether scales are no powers of two"},
         format_option<Recipe>(),
         {"x_block_scaling_dim", &Recipe::x_block_scaling_dim, between(1, 2),
          "blocks of inputs: 1, lines of 128, or 2, squares"},
         {"w_block_scaling_dim", &Recipe::w_block_scaling_dim, between(1, 2), "blocks of weights"},
         {"grad_block_scaling_dim", &Recipe::grad_block_scaling_dim, between(1, 2),
          "blocks of gradients"},
         override_option<Recipe>(),
         {"amax_epsilon_input", &Recipe::amax_epsilon_input, at_least(0),
          "the least amax of inputs"},
         {"amax_epsilon_weight", &Recipe::amax_epsilon_weight, at_least(0),
          "the least amax of weights"},
         {"amax_epsilon_grad_output", &Recipe::amax_epsilon_grad_output, at_least(0),
          "the least amax of gradients"}}};
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    const int squares = (recipe.x_block_scaling_dim == 2) + (recipe.w_block_scaling_dim == 2) +
                        (recipe.grad_block_scaling_dim == 2);
    TORCH_CHECK_VALUE(squares <= 1, kName, ": expected squares for one operand at most, got ",
                      squares, " block scaling dims of 2. No product takes two.");
    struct Of {
      double epsilon;
      int64_t dim;
    };
    const bool is_gradient = slot.role == Role::grad_output;
    const Of of = is_gradient ? Of{recipe.amax_epsilon_grad_output, recipe.grad_block_scaling_dim}
                  : slot.role == Role::weight
                      ? Of{recipe.amax_epsilon_weight, recipe.w_block_scaling_dim}
                      : Of{recipe.amax_epsilon_input, recipe.x_block_scaling_dim};
    const std::string element = is_wide(recipe.fp8_format, is_gradient) ? "e5m2" : "e4m3";
    Quantizer options = quantizer((of.dim == 2 ? "fp8_128x128_" : "fp8_1x128_") + element);
    options.amax_epsilon = of.epsilon;
    options.power_of_two = !recipe.use_f32_scales;
    return &quantizer(std::move(options));
  }
};

template <>
struct Rules<NVFP4BlockScaling> {
  using Recipe = NVFP4BlockScaling;
  static constexpr std::string_view kName = "NVFP4BlockScaling";

  static Signature signature() {
    const Check operands = one_of({"none", "weights", "activations", "all"});
    return {Recipe(),
            {{"disable_rht", &Recipe::disable_rht,
              "whether operands of the gradients of weights are left unrotated"},
             {"disable_stochastic_rounding", &Recipe::disable_stochastic_rounding,
              "whether gradients are rounded to nearest"},
             {"disable_2d_quantization", &Recipe::disable_2d_quantization,
              "whether blocks of weights are lines, not 16 by 16"},
             {"nvfp4_4over6", &Recipe::nvfp4_4over6, operands,
              "operands of whose blocks the largest number becomes 6 or 4, whichever errs less"},
             {"nvfp4_4over6_e4m3_use_256", &Recipe::nvfp4_4over6_e4m3_use_256, operands,
              "those of them the scales of whose blocks reach up to 256, not 448"},
             {"nvfp4_4over6_err_mode", &Recipe::nvfp4_4over6_err_mode, one_of({"MAE", "MSE"}),
              "what errs less: the sum of absolute errors, or of squares"},
             override_option<Recipe>()}};
  }

  static bool is_among(Recipe::Operands operands, Role role) {
    if (role == Role::grad_output) return false;
    return operands == Recipe::Operands::all ||
           operands ==
               (role == Role::weight ? Recipe::Operands::weights : Recipe::Operands::activations);
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    const bool chooses = is_among(recipe.nvfp4_4over6, slot.role),
               up_to_256 = chooses && is_among(recipe.nvfp4_4over6_e4m3_use_256, slot.role);
    Quantizer options = quantizer(up_to_256 ? "nvfp4_256" : "nvfp4");
    if (chooses)
      options.four_over_six = recipe.nvfp4_4over6_err_mode == Recipe::ErrorMetric::mae
                                  ? kernels::FourOverSix::mae
                                  : kernels::FourOverSix::mse;
    const bool is_weight = slot.role == Role::weight;
    options.square_blocks = is_weight && !recipe.disable_2d_quantization;
    options.hadamard = !is_weight && !recipe.disable_rht;
    options.stochastic_rounding =
        slot.role == Role::grad_output && !recipe.disable_stochastic_rounding;
    return &quantizer(std::move(options));
  }
};

template <>
struct Rules<MXFP8BlockScaling> {
  using Recipe = MXFP8BlockScaling;
  static constexpr std::string_view kName = "MXFP8BlockScaling";

  static Signature signature() {
    return {Recipe(),
            {format_option<Recipe>(),
             {"enable_2d_quantization", &Recipe::enable_2d_quantization,
              "whether blocks of weights are 32 by 32"},
             override_option<Recipe>()}};
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    Quantizer options = quantizer(
        is_wide(recipe.fp8_format, slot.role == Role::grad_output) ? "mxfp8_e5m2" : "mxfp8_e4m3");
    options.square_blocks = recipe.enable_2d_quantization && slot.role == Role::weight;
    return &quantizer(std::move(options));
  }
};

template <>
struct Rules<CustomRecipe> {
  using Recipe = CustomRecipe;
  static constexpr std::string_view kName = "CustomRecipe";

  static Signature signature() {
    return {Recipe(),
            {{"quantizers", &Recipe::quantizers, "name of the function that says what quantizes"},
             override_option<Recipe>()}};
  }

  static const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
    return choices().of(recipe.quantizers, slot);
  }
};

template <typename R>
const Signature& signature_of() {
  static const Signature& signature = *new Signature(Rules<R>::signature());
  return signature;
}

/// Calls `body` with the type of the recipe with this name.
template <typename Body, size_t... I>
void with_named(std::string_view name, Body&& body, std::index_sequence<I...>) {
  const auto attempt = [&]<typename R>(std::type_identity<R> type) {
    if (name != Rules<R>::kName) return false;
    body(type);
    return true;
  };
  std::string names;
  const auto add = [&](std::string_view each) {
    names += (names.empty() ? "\"" : " or \"") + std::string(each) + "\"";
  };
  const bool is_known =
      (attempt(std::type_identity<std::variant_alternative_t<I, Recipe>>()) || ...);
  if (!is_known) (add(Rules<std::variant_alternative_t<I, Recipe>>::kName), ...);
  TORCH_CHECK_VALUE(is_known, "recipe: expected ", names, ", got \"", shown(name),
                    "\". These are the recipes that this version knows.");
}

template <typename Body>
void with_named(std::string_view name, Body&& body) {
  with_named(name, body, std::make_index_sequence<std::variant_size_v<Recipe>>());
}

}  // namespace

const Quantizer* quantizer_of(const Recipe& recipe, const QuantizeSlot& slot) {
  return std::visit([&]<typename R>(const R& each) { return Rules<R>::quantizer_of(each, slot); },
                    recipe);
}

void register_quantizer_choice(std::string name, QuantizerChoice choice) {
  choices().add(std::move(name), std::move(choice));
}

BackwardOverride backward_override(const Recipe& recipe) {
  return std::visit(
      []<typename R>(const R& each) {
        if constexpr (requires { each.backward_override; }) {
          return each.backward_override;
        } else {
          return BackwardOverride::none;
        }
      },
      recipe);
}

bool is_calibrating(const Recipe& recipe) {
  const auto* delayed = std::get_if<DelayedScaling>(&recipe);
  return delayed != nullptr && delayed->calibrating;
}

int64_t history_length(const Recipe& recipe) {
  const auto* delayed = std::get_if<DelayedScaling>(&recipe);
  return delayed == nullptr ? 0 : delayed->amax_history_len;
}

const ScaleUpdate& update_of(const Recipe& recipe, bool is_backward) {
  const auto& delayed = std::get<DelayedScaling>(recipe);
  using Algorithm = DelayedScaling::AmaxAlgorithm;
  ScaleUpdate update;
  update.scaling.format = is_wide(delayed.fp8_format, is_backward) ? kernels::Fp8Format::e5m2
                                                                   : kernels::Fp8Format::e4m3;
  update.scaling.margin = static_cast<int>(delayed.margin);
  update.scaling.algorithm = delayed.amax_compute_algo == Algorithm::max
                                 ? kernels::AmaxAlgorithm::max
                                 : kernels::AmaxAlgorithm::most_recent;
  update.function = delayed.scale_update;
  if (delayed.reduce_amax) update.group = delayed.amax_reduction_group;
  return scale_update(std::move(update));
}

const Signature& recipe_signature(std::string_view name) {
  const Signature* signature = nullptr;
  with_named(name, [&]<typename R>(std::type_identity<R>) { signature = &signature_of<R>(); });
  return *signature;
}

nlohmann::json to_json(const Recipe& recipe) {
  return std::visit(
      []<typename R>(const R& each) {
        nlohmann::json fields =
            json_of(signature_of<R>().values(Rules<R>::kName, typeid(R), &each));
        fields["name"] = Rules<R>::kName;
        return fields;
      },
      recipe);
}

std::optional<Recipe> recipe_from_json(const nlohmann::json& recipe) {
  if (recipe.is_null()) return std::nullopt;
  std::string name;
  Fields(recipe, "recipe").get("name", name);
  OptionValues fields = options_from_json(name, recipe);
  std::erase_if(fields, [](const auto& field) { return field.first == "name"; });
  std::optional<Recipe> parsed;
  with_named(name, [&]<typename R>(std::type_identity<R>) {
    parsed = *std::static_pointer_cast<const R>(signature_of<R>().parse(name, fields));
  });
  return parsed;
}

}  // namespace tandem
