#include "fusions/activation.h"

#include "core/call.h"
#include "kernel_ops/activation.h"
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
  const auto grad_bias = match.type({1, "grad_bias"}).dtype, z = match.type({0, "x"}).dtype;
  if (grad_bias == z) return std::nullopt;
  return "the bias is " + std::string(c10::toString(grad_bias)) + " and the activation's input " +
         c10::toString(z);
}

Fusion fusion(std::string name, std::string_view family, Run run) {
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

}  // namespace

const Fusion kActivationBackwardBias = fusion("activation_backward_bias", "activation.backward",
                                              backward_bias<kernel_ops::ActivationBackward>);
const Fusion kGluBackwardBias =
    fusion("glu_backward_bias", "glu.backward", backward_bias<kernel_ops::GluBackward>);

}  // namespace tandem::fusions
