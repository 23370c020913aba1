#include "ops/activation.h"

#include <array>

#include "core/call.h"
#include "kernel_ops/activation.h"
#include "ops/options.h"

namespace tandem::ops {

namespace {

/// The function that an op applies is fixed by its definition, not by the user.
template <size_t kFunction>
Options parse(const nlohmann::json& options) {
  static constexpr std::string_view kFunctions[] = {"gelu", "silu", "relu"};
  parse_no_options(options);
  return std::make_shared<ActivationOptions>(ActivationOptions{kFunctions[kFunction]});
}
enum Function : size_t { gelu, silu, relu };

std::string_view function_of(const Call& call) {
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

OpDef activation(std::string_view name, std::string_view formula, decltype(OpDef::parse) parse) {
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

OpDef gated(std::string_view name, std::string_view formula, decltype(OpDef::parse) parse) {
  OpDef definition = activation(name, formula, parse);
  definition.family = "glu";
  definition.forward[0].run = forward<kernel_ops::GluForward>;
  definition.backward[0].run = backward<kernel_ops::GluBackward>;
  return definition;
}

}  // namespace

std::span<const OpDef> activations() {
  static const std::array kActivations{
      activation("gelu", "y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))", parse<gelu>),
      activation("silu", "y = x sigmoid(x)", parse<silu>),
      activation("relu", "y = max(x, 0)", parse<relu>),
      gated("swiglu", "y = silu(a) b, [a, b] = x", parse<silu>),
      gated("geglu", "y = gelu(a) b, [a, b] = x", parse<gelu>),
  };
  return kActivations;
}

namespace {
const bool registered = [] {
  for (const OpDef& definition : activations()) register_op(definition);
  return true;
}();
}  // namespace

}  // namespace tandem::ops
