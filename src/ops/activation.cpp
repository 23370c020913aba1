#include "ops/activation.h"

#include <array>

#include "core/call.h"
#include "kernel_ops/activation.h"
#include "tandem/activations.h"

namespace tandem::ops {

namespace {

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

/// What the op applies is fixed here: a user has no options.
OpDef activation(std::string_view name, std::string_view formula, std::string_view function) {
  return {.name = name,
          .formula = formula,
          .family = "activation",
          .signature = {ActivationOptions{function}, {}},
          .forward = {{.name = "forward",
                       .reads = {"x"},
                       .writes = {"y"},
                       .run = forward<kernel_ops::ActivationForward>}},
          .backward = {{.name = "backward",
                        .reads = {"grad_y", "x"},
                        .writes = {"grad_x", "y"},
                        .run = backward<kernel_ops::ActivationBackward>}},
          .reemits = {"y"},
          .context = {"x"}};
}

OpDef gated(std::string_view name, std::string_view formula, std::string_view function) {
  OpDef definition = activation(name, formula, function);
  definition.family = "glu";
  definition.forward[0].run = forward<kernel_ops::GluForward>;
  definition.backward[0].run = backward<kernel_ops::GluBackward>;
  return definition;
}

}  // namespace

std::span<const OpDef> activations() {
#define TANDEM_PLAIN(name, formula) activation(#name, "y = " formula, #name),
#define TANDEM_GATED(name, function) gated(#name, "y = " #function "(a) b, [a, b] = x", #function),
  static const std::array kActivations{TANDEM_ACTIVATIONS(TANDEM_PLAIN)
                                           TANDEM_GATED_UNITS(TANDEM_GATED)};
#undef TANDEM_PLAIN
#undef TANDEM_GATED
  return kActivations;
}

namespace {
const bool registered = [] {
  for (const OpDef& definition : activations()) register_op(definition);
  return true;
}();
}  // namespace

}  // namespace tandem::ops
