#include "kernel_ops/norm/norm.h"

#include "core/call.h"
#include "core/fusion.h"
#include "fusions/refusals.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

using Forward = kernel_ops::NormForward;

/// kBias: a LayerNorm, which has a bias and a mean.
template <bool kBias>
void norm_quantize(Call& call) {
  enum Read { x, weight, bias };
  constexpr size_t kGiven = kBias ? 3 : 2, kCodes = kGiven;
  const auto& norm = call.options<ops::NormOptions>(0);
  const Forward::Args args{.x = call.in(x),
                           .weight = call.in(weight),
                           .bias = kBias ? call.maybe(bias) : std::nullopt,
                           .eps = norm.eps,
                           .zero_centered_gamma = norm.zero_centered_gamma,
                           .rounds_before_weight = norm.rounds_before_weight,
                           .output_mask = {false, call.wants(0)},
                           .codes = codes_of_member(call, 1, kGiven, kCodes)};
  if (kBias) return call.write<Forward>(args, {Forward::y, Forward::mean, Forward::inv_norm});
  call.write<Forward>(args, {Forward::y, Forward::inv_norm});
}

/// The terms of a sum before a norm, in the sizes of the sum, and the memory of the sum. The sum is
/// written where it is demanded, or where it belongs into the caller's tensor.
struct Sum {
  at::Tensor x, extra, memory;
  bool is_wanted;
};
Sum sum_of(const Call& call, size_t x, size_t extra, size_t sum) {
  at::Tensor before = call.in(x);
  if (const auto sizes = before.sym_sizes(); call.in(extra).sym_sizes() != sizes)
    before = ops::broadcast_to(before, ops::sizes_of_sum(call, extra, sizes));
  at::Tensor added = added_by(call, extra, before.sym_sizes()),
             memory = memory_for_sum(call, added);
  return {std::move(before), std::move(added), std::move(memory),
          call.wants(sum) || !call.step().mutates.empty()};
}

template <bool kBias>
void add_norm(Call& call) {
  enum Read { x, extra, weight, bias };
  enum Write { sum, y };
  constexpr size_t kGiven = kBias ? 4 : 3, kCodes = kGiven;
  const auto& norm = call.options<ops::NormOptions>(1);
  const bool quantizes = call.step().reads.size() > kGiven;
  const Sum terms = sum_of(call, x, extra, sum);
  const Forward::Args args{
      .x = terms.x,
      .extra = terms.extra,
      .weight = call.in(weight),
      .bias = kBias ? call.maybe(bias) : std::nullopt,
      .eps = norm.eps,
      .zero_centered_gamma = norm.zero_centered_gamma,
      .rounds_before_weight = norm.rounds_before_weight,
      .output_mask = {terms.is_wanted, call.wants(y)},
      .codes = quantizes ? codes_of_member(call, 2, kGiven, kCodes) : kernel_ops::RequestedCodes()};
  auto results = call.run<Forward>(args, {terms.memory});
  if (terms.is_wanted)
    results[Forward::sum] = written_sum(call, std::move(results[Forward::sum]), call.in(extra));
  if (kBias)
    return call.hand_out<Forward>(args, std::move(results),
                                  {Forward::sum, Forward::y, Forward::mean, Forward::inv_norm});
  call.hand_out<Forward>(args, std::move(results), {Forward::sum, Forward::y, Forward::inv_norm});
}

/// kAdd: with the gradient of the residual stream.
template <bool kLayerNorm, bool kAdd>
void norm_backward(Call& call) {
  enum Read { grad_y, x, weight, inv_norm, given, y_given, mean, bias };
  enum Write { grad_x, grad_weight, y, sums, grad_bias };
  using Backward = kernel_ops::NormBackward;
  constexpr size_t kResidual = kLayerNorm ? bias + 1 : y_given + 1;
  constexpr size_t kCodes = kLayerNorm ? grad_bias + 1 : sums + 1, kMember = kAdd ? 3 : 2;
  const auto& norm = call.options<ops::NormOptions>(0);
  const Backward::Args args{
      .grad_y = call.in(grad_y),
      .x = call.in(x),
      .weight = call.in(weight),
      .bias = kLayerNorm ? call.maybe(bias) : std::nullopt,
      .mean = kLayerNorm ? call.maybe(mean) : std::nullopt,
      .inv_norm = call.in(inv_norm),
      .grad_residual = kAdd ? call.maybe(kResidual) : std::nullopt,
      .zero_centered_gamma = norm.zero_centered_gamma,
      .rounds_before_weight = norm.rounds_before_weight,
      .sums_dtype = call.wants(sums) ? call.out_type(sums).dtype : call.in(x).scalar_type(),
      .output_mask = {call.wants(grad_x), call.wants(grad_weight), call.wants(y), call.wants(sums),
                      kLayerNorm && call.wants(grad_bias)},
      .codes = codes_of_member(call, kMember, given, kCodes),
      .y_codes = codes_of_member(call, kMember + 1, y_given, kCodes + 3)};
  if (kLayerNorm) return call.write<Backward>(args);
  call.write<Backward>(args, {grad_x, grad_weight, y, sums});
}

Refusal refuse_same_gradient_twice(const Match& match) {
  if (exists(match[{1, kOtherRead}])) return std::nullopt;
  return "the sum has no other term";
}

Refusal refuse_add_norm(const Match& match) {
  if (auto refusal = refuse_in_place(match, 0)) return refusal;
  if (const at::ScalarType x = match.type({0, "x"}).dtype; !c10::isFloatingType(x))
    return std::string("x is ") + c10::toString(x) + ", which no norm takes";
  if (auto refusal = refuse_foreign_extra(match, 0, {1, "weight"})) return refusal;
  return match.steps.size() > 2 ? refuse_without_codes(match) : std::nullopt;
}

/// kAdd: a norm after a sum. `quantized`: with the quantizer after the norm.
template <bool kBias, bool kAdd>
Fusion forward(std::string name, bool quantized, std::string_view picture) {
  constexpr uint32_t kNorm = kAdd ? 1 : 0, kLast = kNorm + 1;
  Fusion fusion{.name = std::move(name),
                .run = {.reads = {{0, "x"}},
                        .writes = {},
                        .run = kAdd ? add_norm<kBias> : norm_quantize<kBias>},
                .refuse = kAdd ? refuse_add_norm
                               : static_cast<Refusal (*)(const Match&)>(refuse_without_codes),
                .picture = picture};
  FusedRun& run = fusion.run;
  if (kAdd) {
    fusion.pattern.emplace_back("add_extra_input|add_extra_input.in_place");
    run.reads.push_back({0, "extra"});
    run.writes.push_back({0, "y"});
    run.mutates = {0};
  }
  fusion.pattern.emplace_back(kBias ? "layer_norm" : "rms_norm");
  run.reads.push_back({kNorm, "weight"});
  if (kBias) run.reads.push_back({kNorm, "bias"});
  run.writes.push_back({kNorm, "y"});
  if (kBias) run.writes.push_back({kNorm, "mean"});
  run.writes.push_back({kNorm, kBias ? "inv_std" : "inv_rms"});
  if (!quantized) return fusion;
  fusion.pattern.emplace_back(StepKind::quantize);
  read_given(run, kLast);
  write_codes(run, kLast);
  return fusion;
}

template <bool kAdd>
Refusal refuse_backward(const Match& match) {
  constexpr uint32_t kGradient = kAdd ? 3 : 2;
  if (kAdd) {
    if (auto refusal = refuse_same_gradient_twice(match)) return refusal;
    if (match.has(kGradient))
      if (auto refusal = refuse_mixed(match, {1, kOtherRead}, "the other gradient", {0, "grad_x"},
                                      "that of the norm"))
        return refusal;
  }
  if (auto refusal = refuse_without_codes(match, kGradient)) return refusal;
  return refuse_without_codes(match, kGradient + 1);
}

template <bool kLayerNorm, bool kAdd>
Fusion backward(std::string name, std::string_view picture) {
  constexpr uint32_t kSum = kAdd ? 1 : 0, kBias = kSum + 1, kGradient = kSum + 2, kY = kSum + 3;
  constexpr std::string_view kMade = kAdd ? "y" : "grad_x";
  Fusion fusion{
      .name = std::move(name),
      .pass = Pass::backward,
      .pattern = {kLayerNorm ? "layer_norm.backward" : "rms_norm.backward"},
      .run = {.reads =
                  {{0, "grad_y"}, {0, "x"}, {0, "weight"}, {0, kLayerNorm ? "inv_std" : "inv_rms"}},
              .writes = {{kSum, kMade}, {0, "grad_weight"}, {0, "y"}, {kBias, "grad_bias"}},
              .run = norm_backward<kLayerNorm, kAdd>},
      .refuse = refuse_backward<kAdd>,
      .picture = picture};
  if (kAdd) fusion.pattern.emplace_back(StepKind::add);
  fusion.pattern.push_back(PatternStep("bias.grad_bias").behind(kSum).optional("_bias", kGradient));
  const PatternStep quantize(StepKind::quantize);
  fusion.pattern.push_back(quantize.through(kMade, "x").behind(kSum).optional("_quantize"));
  fusion.pattern.push_back(quantize.through("y", "x").behind(0).optional("_quantize_y"));
  read_given(fusion.run, kGradient);
  read_given(fusion.run, kY);
  if (kLayerNorm) {
    fusion.run.reads.insert(fusion.run.reads.end(), {{0, "mean"}, {0, "bias"}});
    fusion.run.writes.push_back({0, "grad_bias"});
  }
  if (kAdd) fusion.run.reads.push_back({1, kOtherRead});
  write_codes(fusion.run, kGradient);
  write_codes(fusion.run, kY);
  return fusion;
}

}  // namespace

extern const Fusion kRmsNormQuantize = forward<false, false>(
    "rms_norm_quantize", true, "x -> rms_norm -> y (if demanded) -> codes, scales, amax");
extern const Fusion kLayerNormQuantize = forward<true, false>(
    "layer_norm_quantize", true, "x -> layer_norm -> y (if demanded) -> codes, scales, amax");
extern const Fusion kAddRmsNorm =
    forward<false, true>("add_rms_norm", false, "x + extra -> sum (if demanded) -> rms_norm -> y");
extern const Fusion kAddLayerNorm = forward<true, true>(
    "add_layer_norm", false, "x + extra -> sum (if demanded) -> layer_norm -> y");
extern const Fusion kAddRmsNormQuantize = forward<false, true>(
    "add_rms_norm_quantize", true,
    "x + extra -> sum (if demanded) -> rms_norm -> y (if demanded) -> codes, scales, amax");
extern const Fusion kAddLayerNormQuantize = forward<true, true>(
    "add_layer_norm_quantize", true,
    "x + extra -> sum (if demanded) -> layer_norm -> y (if demanded) -> codes, scales, amax");

extern const Fusion kRmsNormBackward = backward<false, false>(
    "rms_norm_backward",
    "grad_y, x -> rms_norm.backward -> grad_x, y (each if demanded); grad_x (-> sum over rows -> "
    "grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
extern const Fusion kRmsNormBackwardAdd = backward<false, true>(
    "rms_norm_backward_add",
    "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x, y (each if demanded); grad_x (-> "
    "sum over rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
extern const Fusion kLayerNormBackward = backward<true, false>(
    "layer_norm_backward",
    "grad_y, x -> layer_norm.backward -> grad_x, y (each if demanded); grad_x (-> sum over rows -> "
    "grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
extern const Fusion kLayerNormBackwardAdd = backward<true, true>(
    "layer_norm_backward_add",
    "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x, y (each if demanded); grad_x "
    "(-> sum over rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");

}  // namespace tandem::fusions
