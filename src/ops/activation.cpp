#include "ops/activation.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>

#include "core/call.h"
#include "kernel_ops/unit/activation.h"
#include "kernel_ops/unit/scaled_activation.h"
#include "tandem/activations.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

/// An op and the function that it applies.
struct Applied {
  std::string_view op, function;
};
constexpr Applied kApplied[] = {
#define TANDEM_APPLIED(name, ...) {#name, #name},
    TANDEM_ACTIVATIONS(TANDEM_APPLIED) TANDEM_NUMBERED_UNITS(TANDEM_APPLIED)
#undef TANDEM_APPLIED
#define TANDEM_APPLIED(name, function) {#name, #function},
        TANDEM_GATED_UNITS(TANDEM_APPLIED)
#undef TANDEM_APPLIED
            {"scaled_swiglu", "silu"},
    {"scaled_situglu", "situglu"},
    {"scaled_clamped_qgeglu", "clamped_swiglu"},
    {"scaled_srelu", "srelu"},
};

std::string shortest(double number) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  return {text.data(), end};
}

/// The function of the op, with the numbers that its options are.
Options parse(const OpDef& def, const nlohmann::json& given) {
  const Options options = def.signature.parse(def.name, given);
  std::string function(std::ranges::find(kApplied, def.name, &Applied::op)->function);
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
  return std::make_shared<ActivationOptions>(ActivationOptions{std::move(function)});
}

const std::string& function_of(const Call& call) {
  return call.options<ActivationOptions>().function;
}

template <typename Kernel>
void forward(Call& call) {
  enum Read { x };
  const std::array<bool, 2> output_mask{false, true};
  call.out(0, call.run<Kernel>(call.in(x), std::optional<at::Tensor>(), function_of(call),
                               output_mask)[1]);
}

template <typename Kernel>
void backward(Call& call) {
  enum Read { grad_y, x };
  const std::array<bool, 3> output_mask{call.wants(0), false, call.wants(1)};
  auto results = call.run<Kernel>(call.in(grad_y), call.in(x), function_of(call), output_mask);
  if (call.wants(0)) call.out(0, std::move(results[0]));
  if (call.wants(1)) call.out(1, std::move(results[2]));
}

template <bool kGated>
void scaled_forward(Call& call) {
  enum Read { x, scales };
  call.write<kernel_ops::ScaledActivationForward>(call.in(x), call.in(scales), function_of(call),
                                                  kGated);
}

template <bool kGated>
void scaled_backward(Call& call) {
  enum Read { grad_y, x, scales };
  call.write<kernel_ops::ScaledActivationBackward>(call.in(grad_y), call.in(x), call.in(scales),
                                                   function_of(call), kGated,
                                                   call.output_mask<3>());
}

OpDef activation(std::string_view name, std::string_view formula) {
  return {.name = name,
          .formula = formula,
          .family = "activation",
          .forward = {{.name = "forward",
                       .reads = {"x"},
                       .writes = {"y"},
                       .run = forward<kernel_ops::ActivationForward>}},
          .backward = {{.name = "backward",
                        .reads = {"grad_y", "x"},
                        .writes = {"grad_x", "y"},
                        .run = backward<kernel_ops::ActivationBackward>}},
          .reemits = {"y"},
          .context = {"x"},
          .parse = parse};
}

OpDef gated(std::string_view name, std::string_view formula, Signature signature) {
  OpDef definition = activation(name, formula);
  definition.family = "glu";
  definition.signature = std::move(signature);
  definition.forward[0].run = forward<kernel_ops::GluForward>;
  definition.backward[0].run = backward<kernel_ops::GluBackward>;
  return definition;
}

/// The same function times the extra input.
OpDef scaled(std::string_view name, std::string_view formula, Signature signature, bool is_gated) {
  return {.name = name,
          .formula = formula,
          .family = "scaled_activation",
          .signature = std::move(signature),
          .inputs = {"x", "scales"},
          .forward = {{.name = "forward",
                       .reads = {"x", "scales"},
                       .writes = {"y"},
                       .run = is_gated ? scaled_forward<true> : scaled_forward<false>}},
          .backward = {{.name = "backward",
                        .reads = {"grad_y", "x", "scales"},
                        .writes = {"grad_x", "grad_scales", "y"},
                        .run = is_gated ? scaled_backward<true> : scaled_backward<false>}},
          .reemits = {"y"},
          .context = {"x", "scales"},
          .parse = parse};
}

/// More columns than any tensor has a use for.
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
              scaled("scaled_swiglu", "y = swiglu(x) scales", glu_signature(), true),
      scaled("scaled_situglu", "y = situglu(x) scales", situ_signature(), true),
      scaled("scaled_clamped_qgeglu", "y = clamped_swiglu(x) scales", clamped_signature(), true),
      scaled("scaled_srelu", "y = srelu(x) scales", {}, false)};
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
