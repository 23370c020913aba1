#include "ops/activation.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>

#include "core/call.h"
#include "kernel_ops/unit/activation.h"
#include "tandem/activations.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

using Forward = kernel_ops::ActivationForward;
using Backward = kernel_ops::ActivationBackward;

/// An op, and the function that it applies.
struct Applied {
  std::string_view op, function;
  bool is_gated;
};
constexpr Applied kApplied[] = {
#define TANDEM_APPLIED(name, ...) {#name, #name, false},
    TANDEM_ACTIVATIONS(TANDEM_APPLIED)
#undef TANDEM_APPLIED
#define TANDEM_APPLIED(name, ...) {#name, #name, true},
        TANDEM_NUMBERED_UNITS(TANDEM_APPLIED)
#undef TANDEM_APPLIED
#define TANDEM_APPLIED(name, function) {#name, #function, true},
            TANDEM_GATED_UNITS(TANDEM_APPLIED)
#undef TANDEM_APPLIED
                {"scaled_swiglu", "silu", true},
    {"scaled_situglu", "situglu", true},
    {"scaled_clamped_qgeglu", "clamped_swiglu", true},
    {"scaled_srelu", "srelu", false},
};

std::string shortest(double number) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

/// Returns the name of the op's function with the values of the numeric options.
Options parse(const OpDef& def, const OptionValues& given) {
  const Options options = def.signature.parse(def.name, given);
  const Applied& applied = *std::ranges::find(kApplied, def.name, &Applied::op);
  std::string function(applied.function);
  for (const OptionDef& option : def.signature.options()) {
    const OptionValue value = option.get(options.get());
    if (const auto* number = std::get_if<double>(&value)) {
      TORCH_CHECK_VALUE(!option.name.starts_with("beta") || *number > 0, def.name,
                        ": expected option ", option.name, " to be a finite number > 0, got ",
                        *number, ". ", option.name, ": ", option.doc, ".");
      function += ":" + std::string(option.name) + "=" + shortest(*number);
    } else if (std::get<int64_t>(value) != 0) {
      function += ":interleave=" + std::to_string(std::get<int64_t>(value));
    }
  }
  return std::make_shared<ActivationOptions>(
      ActivationOptions{std::move(function), applied.is_gated});
}

void forward(Call& call) {
  enum Read { x };
  const auto& [function, is_gated] = call.options<ActivationOptions>();
  call.write<Forward>({.x = call.in(x), .activation = function, .is_gated = is_gated},
                      {Forward::y});
}

void backward(Call& call) {
  enum Read { grad_y, x };
  const auto& [function, is_gated] = call.options<ActivationOptions>();
  call.write<Backward>({.grad_y = call.in(grad_y),
                        .z = call.in(x),
                        .activation = function,
                        .is_gated = is_gated,
                        .output_mask = {call.wants(0), call.wants(1)}});
}

void scaled_forward(Call& call) {
  enum Read { x, scales };
  const auto& [function, is_gated] = call.options<ActivationOptions>();
  call.write<kernel_ops::ScaledActivationForward>(
      {.x = call.in(x), .scales = call.in(scales), .activation = function, .is_gated = is_gated});
}

void scaled_backward(Call& call) {
  enum Read { grad_y, x, scales };
  const auto& [function, is_gated] = call.options<ActivationOptions>();
  call.write<kernel_ops::ScaledActivationBackward>({.grad_y = call.in(grad_y),
                                                    .x = call.in(x),
                                                    .scales = call.in(scales),
                                                    .activation = function,
                                                    .is_gated = is_gated,
                                                    .output_mask = call.output_mask<3>()});
}

OpDef activation(std::string_view name, std::string_view formula) {
  return {.name = name,
          .formula = formula,
          .family = "activation",
          .forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}, .run = forward}},
          .backward = {{.name = "backward",
                        .reads = {"grad_y", "x"},
                        .writes = {"grad_x", "y"},
                        .run = backward}},
          .reemits = {"y"},
          .context = {"x"},
          .parse = parse};
}

OpDef gated(std::string_view name, std::string_view formula, Signature signature) {
  OpDef definition = activation(name, formula);
  definition.family = "glu";
  definition.signature = std::move(signature);
  return definition;
}

/// Defines an op that multiplies the function's result by the extra input scales.
OpDef scaled(std::string_view name, std::string_view formula, Signature signature) {
  return {.name = name,
          .formula = formula,
          .family = "scaled_activation",
          .signature = std::move(signature),
          .inputs = {"x", "scales"},
          .forward = {{.name = "forward",
                       .reads = {"x", "scales"},
                       .writes = {"y"},
                       .run = scaled_forward}},
          .backward = {{.name = "backward",
                        .reads = {"grad_y", "x", "scales"},
                        .writes = {"grad_x", "grad_scales", "y"},
                        .run = scaled_backward}},
          .reemits = {"y"},
          .context = {"x", "scales"},
          .parse = parse};
}

/// A bound above any useful number of columns.
constexpr double kMostColumns = 1 << 24;
constexpr const char* kInterleaveDoc =
    "a and b take turns in blocks of so many columns; 0: they are halves";

template <typename T>
Option<T> interleave() {
  return {"glu_interleave_size", &T::glu_interleave_size, between(0, kMostColumns), kInterleaveDoc};
}

Signature glu_signature() { return {GluOptions{}, {interleave<GluOptions>()}}; }
Signature situ_signature() {
  return {
      SituGluOptions{},
      {{"beta1", &SituGluOptions::beta1, "above 0; the gate stays below it"},
       {"beta2", &SituGluOptions::beta2, "above 0; the size of the other factor stays below it"},
       interleave<SituGluOptions>()}};
}
Signature clamped_signature() {
  return {ClampedSwigluOptions{},
          {{"limit", &ClampedSwigluOptions::limit, "what a, and the size of b, are cut off at"},
           {"alpha", &ClampedSwigluOptions::alpha, "what a is multiplied by in the sigmoid"},
           {"glu_linear_offset", &ClampedSwigluOptions::glu_linear_offset, "what is added to b"},
           interleave<ClampedSwigluOptions>()}};
}
Signature signature_of_unit(std::string_view name) {
  return name == "situglu" ? situ_signature() : clamped_signature();
}

}  // namespace

std::span<const OpDef> activations() {
#define TANDEM_PLAIN(name, formula) activation(#name, "y = " formula),
#define TANDEM_GATED(name, function) \
  gated(#name, "y = " #function "(a) b, [a, b] = x", glu_signature()),
#define TANDEM_NUMBERED(name, formula, ...) \
  gated(#name, "y = " formula ", [a, b] = x", signature_of_unit(#name)),
  static const std::array kActivations{
      TANDEM_ACTIVATIONS(TANDEM_PLAIN) TANDEM_GATED_UNITS(TANDEM_GATED)
          TANDEM_NUMBERED_UNITS(TANDEM_NUMBERED)
              scaled("scaled_swiglu", "y = swiglu(x) scales", glu_signature()),
      scaled("scaled_situglu", "y = situglu(x) scales", situ_signature()),
      scaled("scaled_clamped_qgeglu", "y = clamped_swiglu(x) scales", clamped_signature()),
      scaled("scaled_srelu", "y = srelu(x) scales", {})};
#undef TANDEM_PLAIN
#undef TANDEM_GATED
#undef TANDEM_NUMBERED
  return kActivations;
}

namespace {
const bool registered = [] {
  for (const OpDef& definition : activations()) register_op(definition);
  return true;
}();
}  // namespace

}  // namespace tandem::ops
