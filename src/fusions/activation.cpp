#include "kernel_ops/unit/activation.h"

#include "core/call.h"
#include "core/fusion.h"
#include "fusions/refusals.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "ops/activation.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

Refusal refuse_mixed_dtypes(const Match& match) {
  return refuse_mixed(match, {1, "grad_bias"}, "the bias", {0, "x"}, "the activation's input");
}

/// kBias: after a bias, with the sum as a result where it is demanded.
template <bool kBias>
void forward(Call& call) {
  enum Read { x, given, bias };
  using Unit = kernel_ops::ActivationForward;
  constexpr size_t kUnit = kBias ? 1 : 0, kZ = 0, kY = kUnit, kCodes = kY + 1;
  const auto& [function, is_gated] = call.options<ops::ActivationOptions>(kUnit);
  const Unit::Args args{.x = call.in(x),
                        .bias = kBias ? call.maybe(bias) : std::nullopt,
                        .activation = function,
                        .is_gated = is_gated,
                        .output_mask = {kBias && call.wants(kZ), call.wants(kY)},
                        .codes = codes_of_member(call, kUnit + 1, given, kCodes)};
  if (kBias) return call.write<Unit>(args);
  call.write<Unit>(args, {Unit::y});
}

template <bool kBias>
Fusion unit(std::string name, std::string_view family, std::string_view picture) {
  constexpr uint32_t kUnit = kBias ? 1 : 0, kLast = kUnit + 1;
  const PatternStep of_family = PatternStep::any_of(family), quantize(StepKind::quantize);
  Fusion fusion{
      .name = std::move(name),
      .pattern = {of_family, quantize},
      .run = {.reads = {{0, "x"}, {kLast, "given"}}, .writes = {{0, "y"}}, .run = forward<kBias>},
      .refuse = refuse_without_codes,
      .picture = picture};
  if (kBias) {
    fusion.pattern = {"bias", of_family, quantize.optional("_quantize")};
    fusion.run.reads.push_back({0, "bias"});
    fusion.run.writes.push_back({1, "y"});
  }
  write_codes(fusion.run, kLast);
  return fusion;
}

void unit_backward(Call& call) {
  enum Read { grad_y, z, given, y_given };
  enum Write { grad_z, y, grad_bias, codes, codes_of_y = codes + 3 };
  const auto& [function, is_gated] = call.options<ops::ActivationOptions>(0);
  call.write<kernel_ops::ActivationBackward>(
      {.grad_y = call.in(grad_y),
       .z = call.in(z),
       .activation = function,
       .is_gated = is_gated,
       .output_mask = call.output_mask<3>(),
       .codes = codes_of_member(call, 2, given, codes),
       .y_codes = codes_of_member(call, 3, y_given, codes_of_y)});
}

Refusal refuse_unit_backward(const Match& match) {
  if (match.has(1))
    if (auto refusal = refuse_mixed_dtypes(match)) return refusal;
  if (auto refusal = refuse_without_codes(match, 2)) return refusal;
  return refuse_without_codes(match, 3);
}

Fusion backward(std::string name, std::string_view family) {
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
              .run = unit_backward},
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
  enum Write { sums, codes };
  call.write<kernel_ops::SumRows>({.x = call.in(x),
                                   .dtype = call.out_type(sums).dtype,
                                   .codes = codes_of_member(call, 1, given, codes)});
}

void scale_and_quantize(Call& call) {
  enum Read { grad_y, given };
  enum Write { grad_x, grad_bias, codes };
  const at::Tensor& gradient = call.in(grad_y);
  call.write<kernel_ops::ScaleRows>(
      {.x = gradient,
       .factor = call.options<ops::ScaleOptions>(0).factor,
       .dtype = call.wants(grad_bias) ? call.out_type(grad_bias).dtype : gradient.scalar_type(),
       .output_mask = call.output_mask<2>(),
       .codes = codes_of_member(call, 2, given, codes)});
}

}  // namespace

extern const Fusion kActivationQuantize = unit<false>(
    "activation_quantize", "activation", "z -> act -> y (if demanded) -> codes, scales, amax");
extern const Fusion kGluQuantize = unit<false>(
    "glu_quantize", "glu", "z = [a, b] -> act(a) b -> y (if demanded) -> codes, scales, amax");
extern const Fusion kBiasActivation =
    unit<true>("bias_activation", "activation",
               "x + bias -> z (if demanded) -> act -> y (if demanded) (-> codes, scales, amax)");
extern const Fusion kBiasGlu = unit<true>(
    "bias_glu", "glu",
    "x + bias -> z = [a, b] (if demanded) -> act(a) b -> y (if demanded) (-> codes, scales, "
    "amax)");

extern const Fusion kActivationBackward = backward("activation_backward", "activation.backward");
extern const Fusion kGluBackward = backward("glu_backward", "glu.backward");

extern const Fusion kBiasBackwardQuantize{
    .name = "bias_backward_quantize",
    .pass = Pass::backward,
    .pattern = {"bias.grad_bias", PatternStep(StepKind::quantize).through("grad_y", "x")},
    .run = {.reads = {{0, "grad_y"}, {1, "given"}},
            .writes = {{0, "grad_bias"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
            .run = sum_and_quantize},
    .refuse = refuse_without_codes,
    .picture = "grad_y -> sum over rows -> grad_bias; grad_y -> codes, scales, amax",
};

extern const Fusion kScaleBackwardQuantize{
    .name = "scale_backward",
    .pass = Pass::backward,
    .pattern =
        {"constant_scale.backward", PatternStep("bias.grad_bias").optional("_bias"),
         PatternStep(StepKind::quantize).through("grad_x", "x").behind(0).named("_quantize")},
    .run = {.reads = {{0, "grad_y"}, {2, "given"}},
            .writes = {{0, "grad_x"},
                       {1, "grad_bias"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = scale_and_quantize},
    .refuse = refuse_without_codes,
    .picture =
        "grad_y -> factor * grad_y -> grad_x (if demanded) (-> sum over rows -> grad_bias) "
        "-> codes, scales, amax",
};

}  // namespace tandem::fusions
