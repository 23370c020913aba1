// RMSNorm, LayerNorm and L2 normalization.
#include "kernel_ops/norm/norm.h"

#include "core/call.h"
#include "core/op_def.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

using Forward = kernel_ops::NormForward;
using Backward = kernel_ops::NormBackward;

void rms_norm_forward(Call& call) {
  enum Read { x, weight };
  const auto& options = call.options<NormOptions>();
  call.write<Forward>({.x = call.in(x),
                       .weight = call.in(weight),
                       .eps = options.eps,
                       .zero_centered_gamma = options.zero_centered_gamma,
                       .rounds_before_weight = options.rounds_before_weight},
                      {Forward::y, Forward::inv_norm});
}

void rms_norm_backward(Call& call) {
  enum Read { grad_y, x, weight, inv_rms };
  const auto& options = call.options<NormOptions>();
  call.write<Backward>({.grad_y = call.in(grad_y),
                        .x = call.in(x),
                        .weight = call.in(weight),
                        .inv_norm = call.in(inv_rms),
                        .zero_centered_gamma = options.zero_centered_gamma,
                        .rounds_before_weight = options.rounds_before_weight,
                        .output_mask = {call.wants(0), call.wants(1), call.wants(2)}});
}

void layer_norm_forward(Call& call) {
  enum Read { x, weight, bias };
  const auto& options = call.options<NormOptions>();
  call.write<Forward>({.x = call.in(x),
                       .weight = call.in(weight),
                       .bias = call.in(bias),
                       .eps = options.eps,
                       .zero_centered_gamma = options.zero_centered_gamma},
                      {Forward::y, Forward::mean, Forward::inv_norm});
}

void layer_norm_backward(Call& call) {
  enum Read { grad_y, x, weight, mean, inv_std, bias };
  enum Write { grad_x, grad_weight, grad_bias, y };
  call.write<Backward>({.grad_y = call.in(grad_y),
                        .x = call.in(x),
                        .weight = call.in(weight),
                        .bias = call.maybe(bias),
                        .mean = call.in(mean),
                        .inv_norm = call.in(inv_std),
                        .zero_centered_gamma = call.options<NormOptions>().zero_centered_gamma,
                        .output_mask = {call.wants(grad_x), call.wants(grad_weight), call.wants(y),
                                        false, call.wants(grad_bias)}},
                       {Backward::grad_x, Backward::grad_weight, Backward::grad_bias, Backward::y});
}

/// Integers are first converted to the default dtype, as torch promotes them.
void l2_norm_forward(Call& call) {
  const at::Tensor& x = call.in(0);
  const bool is_whole = at::isIntegralType(x.scalar_type(), /*includeBool=*/true);
  const at::Tensor numbers = is_whole ? x.to(c10::get_default_dtype_as_scalartype()) : x;
  call.write<kernel_ops::L2NormForward>(
      {.x = numbers, .eps = call.options<L2NormalizationOptions>().eps});
}

void l2_norm_backward(Call& call) {
  enum Read { grad_y, x, inv_norm };
  call.write<kernel_ops::L2NormBackward>({.grad_y = call.in(grad_y),
                                          .x = call.in(x),
                                          .inv_norm = call.in(inv_norm),
                                          .output_mask = call.output_mask<2>()});
}

const Option<NormOptions> kNormEps{"eps", &NormOptions::eps, at_least(0),
                                   "added inside the square root"};
const Option<NormOptions> kNormZeroCentered{
    "zero_centered_gamma", &NormOptions::zero_centered_gamma, "the factor is 1 + weight"};
const ParamDef kGamma{"weight", {"hidden"}, ParamDef::Init::ones, "zero_centered_gamma"};

}  // namespace

/// y = x * inv_rms * gamma with inv_rms = 1 / sqrt(mean(x^2) + eps), over the last dimensions of x,
/// as many as weight has. gamma = weight, or 1 + weight with zero_centered_gamma. With
/// rounds_before_weight, x * inv_rms is rounded to the dtype of x; gradients ignore this rounding.
///
/// Shapes:  x [..., *hidden], weight [*hidden] -> y like x, inv_rms [rows].
/// Dtypes:  y has the dtype of autocast, else of weight; sums are float32 or wider.
/// Error:   at most 8 float32 ULP from float64 for hidden <= 16384 (test NormOp).
/// Throws:  c10::ValueError (shapes).
/// Source:  Zhang and Sennrich 2019, arXiv:1910.07467.
const OpDef kRmsNorm{
    .name = "rms_norm",
    .formula = "y = x / sqrt(mean(x^2) + eps) * weight",
    .signature = {NormOptions{},
                  {kNormEps,
                   kNormZeroCentered,
                   {"rounds_before_weight", &NormOptions::rounds_before_weight,
                    "the quotient is rounded to the dtype of x before it is multiplied with the "
                    "factor"}}},
    .sizes = {{"hidden", "size of the last dimension of x"}},
    .params = {kGamma},
    .results = {{"y"}, {"inv_rms", ResultDef::statistic}},
    .dtype = DtypeRule::weight,
    .forward = {{.name = "forward",
                 .reads = {"x", "weight"},
                 .writes = {"y", "inv_rms"},
                 .run = rms_norm_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "weight", "inv_rms"},
                  .writes = {"grad_x", "grad_weight", "y"},
                  .run = rms_norm_backward}},
    .reemits = {"y"},
    .context = {"x", "inv_rms"},
};

/// y = (x - mean) / sqrt(variance + eps) * gamma + bias, over the last dimensions of x, as many as
/// weight has. gamma = weight, or 1 + weight with zero_centered_gamma.
///
/// Shapes:  x [..., *hidden], weight and bias [*hidden] -> y like x, mean and inv_std [rows].
/// Dtypes:  as kRmsNorm.
/// Error:   as kRmsNorm.
/// Throws:  as kRmsNorm.
/// Source:  Ba, Kiros and Hinton 2016, arXiv:1607.06450.
const OpDef kLayerNorm{
    .name = "layer_norm",
    .formula = "y = (x - mean) / sqrt(variance + eps) * weight + bias",
    .signature = {NormOptions{}, {kNormEps, kNormZeroCentered}},
    .sizes = {{"hidden", "size of the last dimension of x"}},
    .params = {kGamma, {"bias", {"hidden"}}},
    .results = {{"y"}, {"mean", ResultDef::statistic}, {"inv_std", ResultDef::statistic}},
    .dtype = DtypeRule::weight,
    .forward = {{.name = "forward",
                 .reads = {"x", "weight", "bias"},
                 .writes = {"y", "mean", "inv_std"},
                 .run = layer_norm_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "weight", "mean", "inv_std", "bias"},
                  .writes = {"grad_x", "grad_weight", "grad_bias", "y"},
                  .run = layer_norm_backward}},
    .reemits = {"y"},
    .reemit_reads = {"bias"},
    .context = {"x", "mean", "inv_std"},
};

/// y = x / sqrt(sum(x^2) + eps), over the last dimension.
///
/// Shapes:  x [..., hidden] -> y like x, inv_norm [rows].
/// Dtypes:  y has the dtype of x, also under autocast; sums are float32 or wider.
/// Error:   as kRmsNorm.
/// Throws:  c10::ValueError for a scalar.
const OpDef kL2Normalization{
    .name = "l2_normalization",
    .formula = "y = x / sqrt(sum(x^2) + eps)",
    .signature = {L2NormalizationOptions{},
                  {{"eps", &L2NormalizationOptions::eps, at_least(0),
                    "added inside the square root"}}},
    .results = {{"y"}, {"inv_norm", ResultDef::statistic}},
    .dtype = DtypeRule::promote_number,
    .forward =
        {{.name = "forward", .reads = {"x"}, .writes = {"y", "inv_norm"}, .run = l2_norm_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "inv_norm"},
                  .writes = {"grad_x", "y"},
                  .run = l2_norm_backward}},
    .reemits = {"y"},
    .context = {"x", "inv_norm"},
};

TANDEM_REGISTER_OP(kRmsNorm);
TANDEM_REGISTER_OP(kLayerNorm);
TANDEM_REGISTER_OP(kL2Normalization);

}  // namespace tandem::ops
