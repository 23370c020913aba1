#include "fusions/activation.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/activation.h"
#include "kernel_ops/activation_quantize.h"
#include "kernel_ops/shapes.h"
#include "ops/activation.h"

namespace tandem::fusions {

namespace {

template <typename K>
void backward_bias(Call& call) {
  enum Read { grad_y, z };
  call.write<K>(call.in(grad_y), call.in(z), call.options<ops::ActivationOptions>(0).function,
                call.output_mask<3>());
}

Refusal refuse_mixed_dtypes(const Match& match) {
  return refuse_mixed(match, {1, "grad_bias"}, "the bias", {0, "x"}, "the activation's input");
}

template <typename K>
void bias_activation(Call& call) {
  enum Read { x, bias };
  call.write<K>(call.in(x), call.maybe(bias), call.options<ops::ActivationOptions>(1).function,
                call.output_mask<2>());
}

Fusion biased(std::string name, std::string_view family, Run run, std::string_view picture) {
  return {.name = std::move(name),
          .pattern = {"bias", PatternStep::any_of(family)},
          .run = {.reads = {{0, "x"}, {0, "bias"}}, .writes = {{0, "y"}, {1, "y"}}, .run = run},
          .picture = picture};
}

Fusion backward(std::string name, std::string_view family, Run run) {
  return {.name = std::move(name),
          .pass = Pass::backward,
          .pattern = {PatternStep::any_of(family), "bias.grad_bias"},
          .run = {.reads = {{0, "grad_y"}, {0, "x"}},
                  .writes = {{0, "grad_x"}, {1, "grad_bias"}, {0, "y"}},
                  .run = run},
          .refuse = refuse_mixed_dtypes,
          .picture =
              "grad_y, z -> act.backward -> grad_z, y (if demanded) -> sum over rows -> grad_bias"};
}

template <typename K>
void quantize(Call& call) {
  enum Read { z, given };
  const auto sizes_of_y = [&] {
    c10::SymDimVector sizes = kernel_ops::sizes_of(call.in(z));
    if (std::is_same_v<K, kernel_ops::GluQuantize>) sizes.back() = sizes.back() / 2;
    return sizes;
  };
  call.write_codes<K>(sizes_of_y, call.in(z), call.maybe(given),
                      call.options<ops::ActivationOptions>(0).function, call.options<Quantizer>(1),
                      call.output_mask<4>());
}

Fusion quantized(std::string name, std::string_view family, Run run, std::string_view picture) {
  return {.name = std::move(name),
          .pattern = {PatternStep::any_of(family), StepKind::quantize},
          .run = {.reads = {{0, "x"}, {1, "given"}},
                  .writes = {{0, "y"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
                  .run = run},
          .refuse = refuse_without_codes,
          .picture = picture};
}

template <typename K>
void backward_quantize(Call& call) {
  enum Read { grad_y, z, given };
  call.write_codes<K>([&] { return kernel_ops::sizes_of(call.in(z)); }, call.in(grad_y), call.in(z),
                      call.maybe(given), call.options<ops::ActivationOptions>(0).function,
                      call.options<Quantizer>(1), call.output_mask<5>());
}

Fusion backward_quantized(std::string name, std::string_view family, Run run) {
  return {.name = std::move(name),
          .pass = Pass::backward,
          .pattern = {PatternStep::any_of(family),
                      PatternStep(StepKind::quantize).through("grad_x", "x")},
          .run = {.reads = {{0, "grad_y"}, {0, "x"}, {1, "given"}},
                  .writes =
                      {{0, "grad_x"}, {0, "y"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
                  .run = run},
          .refuse = refuse_without_codes,
          .picture = "grad_y, z -> act.backward -> grad_z, y (if demanded) -> codes, scales, amax"};
}

}  // namespace

const Fusion kActivationQuantize =
    quantized("activation_quantize", "activation", quantize<kernel_ops::ActivationQuantize>,
              "z -> act -> y (if demanded) -> codes, scales, amax");
const Fusion kGluQuantize =
    quantized("glu_quantize", "glu", quantize<kernel_ops::GluQuantize>,
              "z = [a, b] -> act(a) b -> y (if demanded) -> codes, scales, amax");

const Fusion kBiasActivation =
    biased("bias_activation", "activation", bias_activation<kernel_ops::ActivationForward>,
           "x + bias -> z (if demanded) -> act -> y");
const Fusion kBiasGlu = biased("bias_glu", "glu", bias_activation<kernel_ops::GluForward>,
                               "x + bias -> z = [a, b] (if demanded) -> act(a) b -> y");

const Fusion kActivationBackwardBias = backward("activation_backward_bias", "activation.backward",
                                                backward_bias<kernel_ops::ActivationBackward>);
const Fusion kGluBackwardBias =
    backward("glu_backward_bias", "glu.backward", backward_bias<kernel_ops::GluBackward>);

const Fusion kActivationBackwardQuantize =
    backward_quantized("activation_backward_quantize", "activation.backward",
                       backward_quantize<kernel_ops::ActivationBackwardQuantize>);
const Fusion kGluBackwardQuantize = backward_quantized(
    "glu_backward_quantize", "glu.backward", backward_quantize<kernel_ops::GluBackwardQuantize>);

}  // namespace tandem::fusions
