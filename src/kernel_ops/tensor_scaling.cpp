#include "kernel_ops/tensor_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel_ops/block_scaling.h"
#include "kernel_ops/operands.h"
#include "kernels/quantize.h"

namespace tandem {

namespace {

using at::Tensor;

constexpr float kFloatMax = std::numeric_limits<float>::max();

c10::SymDimVector one_number(const MatrixSize&, Direction) { return {}; }

void dequantize(const Codes& codes, kernels::Fp8Format element, const Tensor& y) {
  kernels::cpu::dequantize(codes.codes.const_data_ptr<uint8_t>(), element,
                           *codes.dequant_scale.to(at::kFloat).const_data_ptr<float>(),
                           kernel_ops::rows_out(y));
}

Tensor scales_of_elements(const Codes& codes) { return codes.dequant_scale; }

kernels::CurrentScaling options_of(const Quantizer& quantizer) {
  return {quantizer.format->element, static_cast<float>(quantizer.amax_epsilon),
          quantizer.power_of_two};
}

/// What kernels write: all of it, into numbers of its own where the group has no place for it.
struct Target {
  explicit Target(Group& group)
      : out{group[row_codes].data_ptr<uint8_t>(),
            group[row_scale].defined() ? group[row_scale].data_ptr<float>() : &dequant_scale,
            group[group_amax].defined() ? group[group_amax].data_ptr<float>() : &amax} {}
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  float dequant_scale = 0, amax = 0;
  kernels::Fp8Output out;
};

void quantize_current(const Tensor& x, const std::optional<Tensor>&, const Quantizer& quantizer,
                      Group& group) {
  if (group[row_codes].defined()) {
    kernels::cpu::quantize_current(kernel_ops::RowsIn(x), options_of(quantizer), Target(group).out);
  } else if (group[group_amax].defined()) {
    *group[group_amax].data_ptr<float>() = kernels::cpu::amax(kernel_ops::RowsIn(x));
  }
}

void quantize_delayed(const Tensor& x, const std::optional<Tensor>& scale,
                      const Quantizer& quantizer, Group& group) {
  if (group[row_codes].defined()) {
    const Target target(group);
    kernels::cpu::quantize_delayed(kernel_ops::RowsIn(x), quantizer.format->element,
                                   *scale->const_data_ptr<float>(), target.out);
  } else if (group[group_amax].defined()) {
    *group[group_amax].data_ptr<float>() = kernels::cpu::amax(kernel_ops::RowsIn(x));
  }
}

Tensor amax_of(const Tensor& source) {
  const Tensor magnitude = at::abs(source);
  const Tensor finite = at::where(at::isnan(magnitude), 0.0f, magnitude).flatten();
  return at::cat({finite, at::zeros({1}, finite.options())}).amax();
}

Group delayed_reference(const Tensor& x, const std::optional<Tensor>& scale,
                        const Quantizer& quantizer, GroupMask) {
  const Tensor source = x.to(at::kFloat), number = scale->to(at::kFloat).squeeze();
  return {kernel_ops::encode(source * number, quantizer.format->element),
          inverse_of(number),
          {},
          {},
          {},
          {},
          amax_of(source)};
}

Group current_reference(const Tensor& x, const std::optional<Tensor>&, const Quantizer& quantizer,
                        GroupMask) {
  const auto format = quantizer.format->element;
  const Tensor source = x.to(at::kFloat), amax = amax_of(source);
  const Tensor scale = scale_from_amax(amax, quantizer, kFloatMax);
  return {kernel_ops::encode(source * scale, format), inverse_of(scale), {}, {}, {}, {}, amax};
}

void norm_quantize(const NormToQuantize& norm, const Quantizer& quantizer, Group& group) {
  const Target target(group);
  const auto scaling = options_of(quantizer);
  if (!norm.is_centered) {
    kernels::cpu::rms_norm_quantize(norm.x, norm.weight, norm.options, norm.y_element, scaling,
                                    norm.y, norm.inv_norm, target.out);
  } else {
    kernels::cpu::layer_norm_quantize(norm.x, norm.weight, norm.bias, norm.options, norm.y_element,
                                      scaling, norm.y, norm.mean, norm.inv_norm, target.out);
  }
}

}  // namespace

const CodeLayout kTensorScale{
    .serves_both_directions = true,
    .applies_at_end = true,
    .dtype = at::kFloat,
    .sizes = one_number,
    .dequantize = dequantize,
    .scales_of_elements = scales_of_elements,
};

const ScalingDef kCurrentScaling{
    .name = "current",
    .has_epsilon = true,
    .has_power_of_two = true,
    .quantize = quantize_current,
    .reference = current_reference,
    .norm_quantize = norm_quantize,
};

const ScalingDef kDelayedScaling{
    .name = "delayed",
    .takes_scale = true,
    .quantize = quantize_delayed,
    .reference = delayed_reference,
};

bool quantize_made(const Tensor& y, const kernels::cpu::MakeRows& make,
                   const std::optional<Tensor>& scale, const Quantizer& quantizer, Group& group) {
  const bool is_current = quantizer.scaling == &kCurrentScaling;
  if ((!is_current && quantizer.scaling != &kDelayedScaling) || !group[row_codes].defined())
    return false;
  const Target target(group);
  if (is_current) {
    kernels::cpu::quantize_current_made(kernel_ops::RowsIn(y), make, options_of(quantizer),
                                        target.out);
  } else {
    kernels::cpu::quantize_delayed_made(kernel_ops::RowsIn(y), make, quantizer.format->element,
                                        *scale->const_data_ptr<float>(), target.out);
  }
  return true;
}

}  // namespace tandem
