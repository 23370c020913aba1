#include "fusions/activation.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/elementwise/sum_rows_quantize.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/unit/activation.h"
#include "kernel_ops/unit/activation_quantize.h"
#include "ops/activation.h"

namespace tandem::fusions {

namespace {

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
  write_codes(fusion.run, kLast);
  return fusion;
}

template <typename Backward, typename BackwardQuantize>
void unit_backward(Call& call) {
  enum Read { grad_y, z, given, y_given };
  enum Write { grad_z, y, grad_bias, codes, codes_of_y = codes + 3 };
  const std::string_view function = call.options<ops::ActivationOptions>(0).function;
  const Quantizer *const quantizer = call.quantizer_of(codes), *const y_quantizer =
                                                                   call.quantizer_of(codes_of_y);
  if (quantizer == nullptr && y_quantizer == nullptr) {
    auto [of_z, of_bias, again] =
        call.run<Backward>(call.in(grad_y), call.in(z), function,
                           std::array{call.wants(grad_z), call.wants(grad_bias), call.wants(y)});
    if (call.wants(grad_z)) call.out(grad_z, std::move(of_z));
    if (call.wants(grad_bias)) call.out(grad_bias, std::move(of_bias));
    if (call.wants(y)) call.out(y, std::move(again));
    return;
  }
  const auto of_z = call.mask_of_group(codes), of_y = call.mask_of_group(codes_of_y);
  const auto sizes = [&](size_t read) {
    return [&call, read] { return kernel_ops::sizes_of(call.in(read)); };
  };
  call.hand_out_groups(std::array{sizes(z), sizes(grad_y)},
                       call.run<BackwardQuantize>(
                           call.in(grad_y), call.in(z), call.maybe(given), call.maybe(y_given),
                           function, quantizer, y_quantizer,
                           std::array{call.wants(grad_z), call.wants(y), call.wants(grad_bias),
                                      of_z[0], of_z[1], of_z[2], of_y[0], of_y[1], of_y[2]}));
}

Refusal refuse_unit_backward(const Match& match) {
  if (match.has(1))
    if (auto refusal = refuse_mixed_dtypes(match)) return refusal;
  if (auto refusal = refuse_without_codes(match, 2)) return refusal;
  return refuse_without_codes(match, 3);
}

Fusion backward(std::string name, std::string_view family, Run run) {
  enum Member : uint32_t { unit, bias, of_gradient, of_y };
  const PatternStep quantize(StepKind::quantize);
  Fusion fusion{
      .name = std::move(name),
      .pass = Pass::backward,
      .pattern = {PatternStep::any_of(family), PatternStep("bias.grad_bias").optional("_bias"),
                  quantize.through("grad_x", "x").behind(unit).optional("_quantize"),
                  quantize.through("y", "x").behind(unit).optional("_quantize_y")},
      .run = {.reads = {{unit, "grad_y"}, {unit, "x"}},
              .writes = {{unit, "grad_x"}, {unit, "y"}, {bias, "grad_bias"}},
              .run = run},
      .refuse = refuse_unit_backward,
      .picture =
          "grad_y, z -> act.backward -> grad_z, y (each if demanded); grad_z (-> sum over "
          "rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)"};
  for (const uint32_t member : {of_gradient, of_y}) {
    read_given(fusion.run, member);
    write_codes(fusion.run, member);
  }
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

const Fusion kActivationBackward =
    backward("activation_backward", "activation.backward",
             unit_backward<kernel_ops::ActivationBackward, kernel_ops::ActivationBackwardQuantize>);
const Fusion kGluBackward =
    backward("glu_backward", "glu.backward",
             unit_backward<kernel_ops::GluBackward, kernel_ops::GluBackwardQuantize>);

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
