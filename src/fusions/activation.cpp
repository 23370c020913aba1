#include "fusions/activation.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/activation.h"
#include "kernel_ops/activation_quantize.h"
#include "kernel_ops/shapes.h"
#include "kernel_ops/sum_rows_quantize.h"
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

Refusal refuse_bias_quantize(const Match& match) {
  if (auto refusal = refuse_mixed_dtypes(match)) return refusal;
  return refuse_without_codes(match);
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

/// kBias: behind a bias, whose sum is written where anything reads it.
template <typename K, bool kBias>
void quantize(Call& call) {
  enum Read { x, given, bias };
  enum Write { y, z };
  constexpr size_t kCodes = kBias ? 2 : 1;
  const std::optional<at::Tensor> sum = kBias ? call.maybe(bias) : std::nullopt;
  call.write_codes<K>([&] { return K::sizes_of_y(call.in(x)); }, call.in(x), sum, call.maybe(given),
                      call.options<ops::ActivationOptions>(kCodes - 1).function,
                      call.options<Quantizer>(kCodes),
                      std::array{call.wants(y), kBias && call.wants(z), call.wants(kCodes),
                                 call.wants(kCodes + 1), call.wants(kCodes + 2)});
}

template <typename K, bool kBias>
Fusion quantized(std::string name, std::string_view family, std::string_view picture) {
  constexpr uint32_t kUnit = kBias ? 1 : 0, kLast = kUnit + 1;
  Fusion fusion{.name = std::move(name),
                .run = {.reads = {{0, "x"}, {kLast, "given"}},
                        .writes = {{kUnit, "y"}},
                        .run = quantize<K, kBias>},
                .refuse = refuse_without_codes,
                .picture = picture};
  if (kBias) {
    fusion.pattern.emplace_back("bias");
    fusion.run.reads.push_back({0, "bias"});
    fusion.run.writes.push_back({0, "y"});
  }
  fusion.pattern.push_back(PatternStep::any_of(family));
  fusion.pattern.emplace_back(StepKind::quantize);
  for (const char* codes : {"row_codes", "column_codes", "amax"})
    fusion.run.writes.push_back({kLast, codes});
  return fusion;
}

/// kBias: of the gradient of a bias before it too.
template <typename K, bool kBias>
void backward_quantize(Call& call) {
  enum Read { grad_y, z, given };
  enum Write { grad_z, y, grad_bias };
  constexpr size_t kCodes = kBias ? 3 : 2;
  call.write_codes<K>(
      [&] { return kernel_ops::sizes_of(call.in(z)); }, call.in(grad_y), call.in(z),
      call.maybe(given), call.options<ops::ActivationOptions>(0).function,
      call.options<Quantizer>(kBias ? 2 : 1),
      std::array{call.wants(grad_z), call.wants(y), kBias && call.wants(grad_bias),
                 call.wants(kCodes), call.wants(kCodes + 1), call.wants(kCodes + 2)});
}

template <typename K, bool kBias>
Fusion backward_quantized(std::string name, std::string_view family) {
  constexpr uint32_t kLast = kBias ? 2 : 1;
  Fusion fusion{
      .name = std::move(name),
      .pass = Pass::backward,
      .pattern = {PatternStep::any_of(family)},
      .run = {.reads = {{0, "grad_y"}, {0, "x"}, {kLast, "given"}},
              .writes = {{0, "grad_x"}, {0, "y"}},
              .run = backward_quantize<K, kBias>},
      .refuse = refuse_without_codes,
      .picture = "grad_y, z -> act.backward -> grad_z, y (if demanded) -> codes, scales, amax"};
  if (kBias) {
    fusion.pattern.emplace_back("bias.grad_bias");
    fusion.run.writes.push_back({1, "grad_bias"});
    fusion.refuse = refuse_bias_quantize;
    fusion.picture =
        "grad_y, z -> act.backward -> grad_z, y (if demanded) -> sum over rows -> grad_bias; "
        "grad_z -> codes, scales, amax";
  }
  fusion.pattern.push_back(PatternStep(StepKind::quantize).through("grad_x", "x").behind(0));
  for (const char* codes : {"row_codes", "column_codes", "amax"})
    fusion.run.writes.push_back({kLast, codes});
  return fusion;
}

void sum_and_quantize(Call& call) {
  enum Read { x, given };
  enum Write { sums, row, column, amax };
  call.write_codes<kernel_ops::SumRowsQuantize>(
      [&] { return kernel_ops::sizes_of(call.in(x)); }, call.in(x), call.maybe(given),
      call.out_type(sums).dtype, call.options<Quantizer>(1),
      std::array{call.wants(row), call.wants(column), call.wants(amax)});
}

}  // namespace

const Fusion kActivationQuantize = quantized<kernel_ops::ActivationQuantize, false>(
    "activation_quantize", "activation", "z -> act -> y (if demanded) -> codes, scales, amax");
const Fusion kGluQuantize = quantized<kernel_ops::GluQuantize, false>(
    "glu_quantize", "glu", "z = [a, b] -> act(a) b -> y (if demanded) -> codes, scales, amax");
const Fusion kBiasActivationQuantize = quantized<kernel_ops::ActivationQuantize, true>(
    "bias_activation_quantize", "activation",
    "x + bias -> z (if demanded) -> act -> y (if demanded) -> codes, scales, amax");
const Fusion kBiasGluQuantize = quantized<kernel_ops::GluQuantize, true>(
    "bias_glu_quantize", "glu",
    "x + bias -> z = [a, b] (if demanded) -> act(a) b -> y (if demanded) -> codes, scales, amax");

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
    backward_quantized<kernel_ops::ActivationBackwardQuantize, false>(
        "activation_backward_quantize", "activation.backward");
const Fusion kGluBackwardQuantize = backward_quantized<kernel_ops::GluBackwardQuantize, false>(
    "glu_backward_quantize", "glu.backward");
const Fusion kActivationBackwardBiasQuantize =
    backward_quantized<kernel_ops::ActivationBackwardQuantize, true>(
        "activation_backward_bias_quantize", "activation.backward");
const Fusion kGluBackwardBiasQuantize = backward_quantized<kernel_ops::GluBackwardQuantize, true>(
    "glu_backward_bias_quantize", "glu.backward");

const Fusion kBiasBackwardQuantize{
    .name = "bias_backward_quantize",
    .pass = Pass::backward,
    .pattern = {"bias.grad_bias", PatternStep(StepKind::quantize).through("grad_y", "x")},
    .run = {.reads = {{0, "grad_y"}, {1, "given"}},
            .writes = {{0, "grad_bias"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
            .run = sum_and_quantize},
    .refuse = refuse_without_codes,
    .picture = "grad_y -> sum over rows -> grad_bias; grad_y -> codes, scales, amax",
};

}  // namespace tandem::fusions
