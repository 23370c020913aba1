#include "fusions/norm.h"

#include "core/call.h"
#include "fusions/refusals.h"
#include "kernel_ops/norm.h"
#include "kernel_ops/shapes.h"
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

/// kBias: a LayerNorm, which has one, and a mean. The sum is written where anything reads it, or
/// where it belongs into the caller's tensor.
template <bool kBias>
void add_norm(Call& call) {
  enum Read { x, extra, weight, bias };
  enum Write { sum, y, first_statistic };
  const auto& norm = call.options<ops::NormOptions>(1);
  at::Tensor before = call.in(x);
  if (const auto sizes = before.sym_sizes(); call.in(extra).sym_sizes() != sizes)
    before = ops::broadcast_to(before, ops::sizes_of_sum(call, extra, sizes));
  const at::Tensor added = added_by(call, extra, before.sym_sizes());
  kernel_ops::ResultsOf<kernel_ops::AddNormForward> spare;
  spare[0] = memory_for_sum(call, added);
  const bool wants_sum = call.wants(sum) || !call.step().mutates.empty();
  auto results = call.run_into<kernel_ops::AddNormForward>(
      spare, before, added, call.in(weight), kBias ? call.maybe(bias) : std::nullopt, norm.eps,
      norm.zero_centered_gamma, std::array{wants_sum});
  if (wants_sum) write_sum(call, sum, std::move(results[0]), call.in(extra));
  if (call.wants(y)) call.out(y, std::move(results[1]));
  for (size_t statistic = kBias ? 2 : 3, write = first_statistic; statistic < 4;
       ++statistic, ++write)
    if (call.wants(write)) call.out(write, std::move(results[statistic]));
}

void rms_norm_backward_add(Call& call) {
  enum Read { grad_y, x, weight, inv_rms, grad_residual };
  call.write<kernel_ops::RmsNormBackward>(
      call.in(grad_y), call.in(x), call.in(weight), call.in(inv_rms), call.maybe(grad_residual),
      call.options<ops::NormOptions>().zero_centered_gamma, call.output_mask<3>());
}

void layer_norm_backward_add(Call& call) {
  enum Read { grad_y, x, weight, mean, inv_std, bias, grad_residual };
  call.write<kernel_ops::LayerNormBackward>(
      call.in(grad_y), call.in(x), call.in(weight), call.maybe(bias), call.in(mean),
      call.in(inv_std), call.maybe(grad_residual),
      call.options<ops::NormOptions>().zero_centered_gamma, call.output_mask<4>());
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

const Fusion kRmsNormBackwardAdd{
    .name = "rms_norm_backward_add",
    .pass = Pass::backward,
    .pattern = {"rms_norm.backward", StepKind::add},
    .run = {.reads = {{0, "grad_y"}, {0, "x"}, {0, "weight"}, {0, "inv_rms"}, {1, kOtherRead}},
            .writes = {{1, "y"}, {0, "grad_weight"}, {0, "y"}},
            .run = rms_norm_backward_add},
    .refuse = refuse_same_gradient_twice,
    .picture = "grad_y, x -> rms_norm.backward -> + grad_residual -> grad_x",
};

const Fusion kLayerNormBackwardAdd{
    .name = "layer_norm_backward_add",
    .pass = Pass::backward,
    .pattern = {"layer_norm.backward", StepKind::add},
    .run = {.reads = {{0, "grad_y"},
                      {0, "x"},
                      {0, "weight"},
                      {0, "mean"},
                      {0, "inv_std"},
                      {0, "bias"},
                      {1, kOtherRead}},
            .writes = {{1, "y"}, {0, "grad_weight"}, {0, "grad_bias"}, {0, "y"}},
            .run = layer_norm_backward_add},
    .refuse = refuse_same_gradient_twice,
    .picture = "grad_y, x -> layer_norm.backward -> + grad_residual -> grad_x",
};

}  // namespace tandem::fusions
