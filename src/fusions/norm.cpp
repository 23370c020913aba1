#include "fusions/norm.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/norm/norm.h"
#include "kernel_ops/norm/norm_quantize.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

void rms_norm_quantize(Call& call) {
  enum Read { x, weight, given };
  enum Write { y, inv_rms, row, column, amax };
  const auto& norm = call.options<ops::NormOptions>(0);
  call.write_codes<kernel_ops::RmsNormQuantize>(
      [&] { return kernel_ops::sizes_of(call.in(x)); }, call.in(x), call.in(weight),
      call.maybe(given), norm.eps, norm.zero_centered_gamma, call.options<Quantizer>(1),
      std::array{call.wants(y), call.wants(row), call.wants(column), call.wants(amax)});
}

void layer_norm_quantize(Call& call) {
  enum Read { x, weight, bias, given };
  enum Write { y, mean, inv_std, row, column, amax };
  const auto& norm = call.options<ops::NormOptions>(0);
  call.write_codes<kernel_ops::LayerNormQuantize>(
      [&] { return kernel_ops::sizes_of(call.in(x)); }, call.in(x), call.in(weight), call.in(bias),
      call.maybe(given), norm.eps, norm.zero_centered_gamma, call.options<Quantizer>(1),
      std::array{call.wants(y), call.wants(row), call.wants(column), call.wants(amax)});
}

/// The terms of a sum before a norm, of the same sizes, and where it is written: where anything
/// reads it, or where it belongs into the caller's tensor.
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

/// kBias: a LayerNorm, which has one, and a mean.
template <bool kBias>
void add_norm(Call& call) {
  enum Read { x, extra, weight, bias };
  enum Write { sum, y, first_statistic };
  const auto& norm = call.options<ops::NormOptions>(1);
  const Sum terms = sum_of(call, x, extra, sum);
  auto results = call.run_into<kernel_ops::AddNormForward>(
      {terms.memory}, terms.x, terms.extra, call.in(weight),
      kBias ? call.maybe(bias) : std::nullopt, norm.eps, norm.zero_centered_gamma,
      std::array{terms.is_wanted});
  if (terms.is_wanted) write_sum(call, sum, std::move(results[0]), call.in(extra));
  if (call.wants(y)) call.out(y, std::move(results[1]));
  for (size_t statistic = kBias ? 2 : 3, write = first_statistic; statistic < 4;
       ++statistic, ++write)
    if (call.wants(write)) call.out(write, std::move(results[statistic]));
}

template <bool kBias>
void add_norm_quantize(Call& call) {
  enum Read { x, extra, weight, given, bias };
  enum Write { sum, y };
  constexpr size_t kCodes = kBias ? 4 : 3;
  const auto& norm = call.options<ops::NormOptions>(1);
  const Sum terms = sum_of(call, x, extra, sum);
  auto results = call.run_into<kernel_ops::AddNormQuantize>(
      {terms.memory}, terms.x, terms.extra, call.in(weight),
      kBias ? call.maybe(bias) : std::nullopt, call.maybe(given), norm.eps,
      norm.zero_centered_gamma, call.options<Quantizer>(2),
      std::array{terms.is_wanted, call.wants(y), call.wants(kCodes), call.wants(kCodes + 1),
                 call.wants(kCodes + 2)});
  if (terms.is_wanted) results[0] = written_sum(call, std::move(results[0]), call.in(extra));
  if (!kBias) std::swap(results[2], results[3]);  // the only statistic of RMSNorm
  call.hand_out_codes([&] { return kernel_ops::sizes_of(terms.x); }, std::move(results));
}

/// Without codes.
template <bool kLayerNorm>
kernel_ops::Results<5> plain_norm_backward(Call& call, const std::optional<at::Tensor>& residual) {
  enum Read { grad_y, x, weight, inv_norm, given, y_given, mean, bias };
  enum Write { grad_x, grad_weight, y, sums, grad_bias };
  const bool zero_centered_gamma = call.options<ops::NormOptions>(0).zero_centered_gamma;
  if constexpr (kLayerNorm) {
    const auto [of_x, of_weight, of_bias, again] = call.run<kernel_ops::LayerNormBackward>(
        call.in(grad_y), call.in(x), call.in(weight), call.maybe(bias), call.in(mean),
        call.in(inv_norm), residual, zero_centered_gamma,
        std::array{call.wants(grad_x), call.wants(grad_weight), call.wants(grad_bias),
                   call.wants(y)});
    return {of_x, of_weight, again, {}, of_bias};
  } else {
    const auto [of_x, of_weight, again] = call.run<kernel_ops::RmsNormBackward>(
        call.in(grad_y), call.in(x), call.in(weight), call.in(inv_norm), residual,
        zero_centered_gamma,
        std::array{call.wants(grad_x), call.wants(grad_weight), call.wants(y)});
    return {of_x, of_weight, again, {}, {}};
  }
}

/// kAdd: with the gradient of the residual stream.
template <bool kLayerNorm, bool kAdd>
void norm_backward(Call& call) {
  enum Read { grad_y, x, weight, inv_norm, given, y_given, mean, bias };
  enum Write { grad_x, grad_weight, y, sums, grad_bias };
  constexpr size_t kResidual = kLayerNorm ? bias + 1 : y_given + 1;
  constexpr size_t kCodes = kLayerNorm ? grad_bias + 1 : sums + 1, kCodesOfY = kCodes + 3;
  const Quantizer *const quantizer = call.quantizer_of(kCodes), *const y_quantizer =
                                                                    call.quantizer_of(kCodesOfY);
  const std::optional<at::Tensor> residual = kAdd ? call.maybe(kResidual) : std::nullopt;
  if (quantizer == nullptr && y_quantizer == nullptr) {
    auto results = plain_norm_backward<kLayerNorm>(call, residual);
    for (size_t i = 0; i < kCodes; ++i)
      if (call.wants(i)) call.out(i, std::move(results[i]));
    return;
  }
  const auto of_x = call.mask_of_group(kCodes), of_y = call.mask_of_group(kCodesOfY);
  const auto sizes = [&] { return kernel_ops::sizes_of(call.in(x)); };
  call.hand_out_groups(std::array{sizes, sizes},
                       call.run<kernel_ops::NormBackwardQuantize>(
                           call.in(grad_y), call.in(x), call.in(weight),
                           kLayerNorm ? call.maybe(bias) : std::nullopt,
                           kLayerNorm ? call.maybe(mean) : std::nullopt, call.in(inv_norm),
                           residual, call.maybe(given), call.maybe(y_given),
                           call.options<ops::NormOptions>(0).zero_centered_gamma,
                           call.wants(sums) ? call.out_type(sums).dtype : call.in(x).scalar_type(),
                           quantizer, y_quantizer,
                           std::array{call.wants(grad_x), call.wants(grad_weight), call.wants(y),
                                      call.wants(sums), kLayerNorm && call.wants(grad_bias),
                                      of_x[0], of_x[1], of_x[2], of_y[0], of_y[1], of_y[2]}));
}

Refusal refuse_same_gradient_twice(const Match& match) {
  if (exists(match[{1, kOtherRead}])) return std::nullopt;
  return "the sum has no other term";
}

Refusal refuse_add_norm(const Match& match) {
  if (auto refusal = refuse_in_place(match, 0)) return refusal;
  if (const at::ScalarType x = match.type({0, "x"}).dtype; !c10::isFloatingType(x))
    return std::string("x is ") + c10::toString(x) + ", which no norm takes";
  return refuse_foreign_extra(match, 0, {1, "weight"});
}

Refusal refuse_add_norm_quantize(const Match& match) {
  if (auto refusal = refuse_add_norm(match)) return refusal;
  return refuse_without_codes(match);
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

const Fusion kRmsNormQuantize{
    .name = "rms_norm_quantize",
    .pattern = {"rms_norm", StepKind::quantize},
    .run =
        {.reads = {{0, "x"}, {0, "weight"}, {1, "given"}},
         .writes = {{0, "y"}, {0, "inv_rms"}, {1, "row_codes"}, {1, "column_codes"}, {1, "amax"}},
         .run = rms_norm_quantize},
    .refuse = refuse_without_codes,
    .picture = "x -> rms_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kLayerNormQuantize{
    .name = "layer_norm_quantize",
    .pattern = {"layer_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "weight"}, {0, "bias"}, {1, "given"}},
            .writes = {{0, "y"},
                       {0, "mean"},
                       {0, "inv_std"},
                       {1, "row_codes"},
                       {1, "column_codes"},
                       {1, "amax"}},
            .run = layer_norm_quantize},
    .refuse = refuse_without_codes,
    .picture = "x -> layer_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kAddRmsNorm{
    .name = "add_rms_norm",
    .pattern = {"add_extra_input|add_extra_input.in_place", "rms_norm"},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}},
            .writes = {{0, "y"}, {1, "y"}, {1, "inv_rms"}},
            .run = add_norm<false>,
            .mutates = {0}},
    .refuse = refuse_add_norm,
    .picture = "x + extra -> sum (if demanded) -> rms_norm -> y",
};

const Fusion kAddLayerNorm{
    .name = "add_layer_norm",
    .pattern = {"add_extra_input|add_extra_input.in_place", "layer_norm"},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {1, "bias"}},
            .writes = {{0, "y"}, {1, "y"}, {1, "mean"}, {1, "inv_std"}},
            .run = add_norm<true>,
            .mutates = {0}},
    .refuse = refuse_add_norm,
    .picture = "x + extra -> sum (if demanded) -> layer_norm -> y",
};

const Fusion kAddRmsNormQuantize{
    .name = "add_rms_norm_quantize",
    .pattern = {"add_extra_input|add_extra_input.in_place", "rms_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {2, "given"}},
            .writes = {{0, "y"},
                       {1, "y"},
                       {1, "inv_rms"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = add_norm_quantize<false>,
            .mutates = {0}},
    .refuse = refuse_add_norm_quantize,
    .picture =
        "x + extra -> sum (if demanded) -> rms_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kAddLayerNormQuantize{
    .name = "add_layer_norm_quantize",
    .pattern = {"add_extra_input|add_extra_input.in_place", "layer_norm", StepKind::quantize},
    .run = {.reads = {{0, "x"}, {0, "extra"}, {1, "weight"}, {2, "given"}, {1, "bias"}},
            .writes = {{0, "y"},
                       {1, "y"},
                       {1, "mean"},
                       {1, "inv_std"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = add_norm_quantize<true>,
            .mutates = {0}},
    .refuse = refuse_add_norm_quantize,
    .picture =
        "x + extra -> sum (if demanded) -> layer_norm -> y (if demanded) -> codes, scales, amax",
};

const Fusion kRmsNormBackward = backward<false, false>(
    "rms_norm_backward",
    "grad_y, x -> rms_norm.backward -> grad_x, y (each if demanded); grad_x (-> sum over rows -> "
    "grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
const Fusion kRmsNormBackwardAdd = backward<false, true>(
    "rms_norm_backward_add",
    "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x, y (each if demanded); grad_x (-> "
    "sum over rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
const Fusion kLayerNormBackward = backward<true, false>(
    "layer_norm_backward",
    "grad_y, x -> layer_norm.backward -> grad_x, y (each if demanded); grad_x (-> sum over rows -> "
    "grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");
const Fusion kLayerNormBackwardAdd = backward<true, true>(
    "layer_norm_backward_add",
    "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x, y (each if demanded); grad_x "
    "(-> sum over rows -> grad_bias) (-> codes, scales, amax); y (-> codes, scales, amax)");

}  // namespace tandem::fusions
