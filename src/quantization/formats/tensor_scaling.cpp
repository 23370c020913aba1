#include "quantization/formats/tensor_scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel_ops/framework/operands.h"
#include "kernels/quantize.h"
#include "quantization/formats/block_scaling.h"
#include "quantization/formats/cpu_scaling.h"
#include "quantization/formats/made.h"

namespace tandem {

namespace whole_tensors {
namespace {

using at::Tensor;

constexpr float kFloatMax = std::numeric_limits<float>::max();

c10::SymDimVector one_number(const MatrixSize&, Direction) { return {}; }

void dequantize(const CodedMatrix& codes, const Tensor& y) {
  kernels::cpu::dequantize(codes.matrix.const_data_ptr<uint8_t>(), codes.quantizer->format->element,
                           *codes.dequant_scale->to(at::kFloat).const_data_ptr<float>(),
                           kernel_ops::rows_out(y));
}

Tensor scales_of_elements(const CodedMatrix& codes) { return *codes.dequant_scale; }

kernels::CurrentScaling options_of(const Quantizer& quantizer) {
  return {quantizer.format->element, static_cast<float>(quantizer.amax_epsilon),
          quantizer.power_of_two};
}

/// What kernels write. They write all of it: into members of this object if the group has no
/// tensor.
struct Target {
  explicit Target(GroupOut group)
      : out{group[row_codes].data_ptr<uint8_t>(),
            group[row_scale].defined() ? group[row_scale].data_ptr<float>() : &dequant_scale,
            group[group_amax].defined() ? group[group_amax].data_ptr<float>() : &amax} {}
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  float dequant_scale = 0, amax = 0;
  kernels::Fp8Output out;
};

void quantize_current(const Tensor& x, const std::optional<Tensor>&, const Quantizer& quantizer,
                      GroupOut group) {
  if (group[row_codes].defined()) {
    kernels::cpu::quantize_current(kernel_ops::RowsIn(x), options_of(quantizer), Target(group).out);
  } else if (group[group_amax].defined()) {
    *group[group_amax].data_ptr<float>() = kernels::cpu::amax(kernel_ops::RowsIn(x));
  }
}

void quantize_delayed(const Tensor& x, const std::optional<Tensor>& scale,
                      const Quantizer& quantizer, GroupOut group) {
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

void quantize_current_made(const kernels::cpu::MadeRows& made, const std::optional<Tensor>&,
                           const Quantizer& quantizer, GroupOut group) {
  const kernel_ops::MadeInMemory kept(made);  // the scale depends on all of y
  kernels::cpu::quantize_current_made(kept.rows(), options_of(quantizer), Target(group).out);
}

void quantize_delayed_made(const kernels::cpu::MadeRows& made, const std::optional<Tensor>& scale,
                           const Quantizer& quantizer, GroupOut group) {
  kernels::cpu::quantize_delayed_made(made, quantizer.format->element,
                                      *scale->const_data_ptr<float>(), Target(group).out);
}

kernels::cpu::Seen quantize_delayed_band(const kernels::cpu::Band& band,
                                         const std::optional<Tensor>& scale,
                                         const Quantizer& quantizer, GroupOut group) {
  return kernels::cpu::quantize_delayed_band(band, quantizer.format->element,
                                             *scale->const_data_ptr<float>(),
                                             group[row_codes].data_ptr<uint8_t>());
}

void finish_delayed(const kernels::ConstRows&, const kernels::cpu::Seen&,
                    const std::optional<Tensor>& scale, const Quantizer& quantizer,
                    GroupOut group) {
  const Target target(group);
  kernels::cpu::quantize_delayed({}, quantizer.format->element, *scale->const_data_ptr<float>(),
                                 target.out);  // without rows it writes the scale alone
}

void quantize_current_seen(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                           const std::optional<Tensor>&, const Quantizer& quantizer,
                           GroupOut group) {
  kernels::cpu::quantize_current_seen(y, seen, options_of(quantizer), Target(group).out);
}

constexpr CpuScaling kCurrentOnCpu{.quantize = quantize_current,
                                   .dequantize = dequantize,
                                   .quantize_made = quantize_current_made,
                                   .quantize_seen = quantize_current_seen},
    kDelayedOnCpu{.quantize = quantize_delayed,
                  .dequantize = dequantize,
                  .quantize_made = quantize_delayed_made,
                  .quantize_band = quantize_delayed_band,
                  .quantize_seen = finish_delayed};

}  // namespace
}  // namespace whole_tensors

const CodeLayout kTensorScale{
    .serves_both_directions = true,
    .applies_at_end = true,
    .dtype = at::kFloat,
    .sizes = whole_tensors::one_number,
    .scales_of_elements = whole_tensors::scales_of_elements,
};

const ScalingDef kCurrentScaling{
    .name = "current",
    .class_name = "Float8CurrentScalingQuantizer",
    .has_epsilon = true,
    .has_power_of_two = true,
    .reference = whole_tensors::current_reference,
    .cpu = &whole_tensors::kCurrentOnCpu,
};

const ScalingDef kDelayedScaling{
    .name = "delayed",
    .class_name = "Float8Quantizer",
    .takes_scale = true,
    .reference = whole_tensors::delayed_reference,
    .cpu = &whole_tensors::kDelayedOnCpu,
};

}  // namespace tandem
