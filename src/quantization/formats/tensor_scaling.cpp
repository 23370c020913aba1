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

kernels::Fp8Output output(GroupOut group, float* amax = nullptr) {
  const Tensor& scale = group[row_scale];
  return {group[row_codes].data_ptr<uint8_t>(), scale.defined() ? scale.data_ptr<float>() : nullptr,
          amax};
}

kernels::cpu::Seen quantize_current(const kernels::cpu::Input& x, const std::optional<Tensor>&,
                                    const Quantizer& quantizer, GroupOut group) {
  if (!group[row_codes].defined()) return kernels::cpu::seen_in(x);
  kernels::cpu::Seen seen;
  kernels::cpu::quantize_current(x, {quantizer.format->element, quantizer},
                                 output(group, &seen.amax));
  return seen;
}

void quantize_current_seen(const kernels::ConstRows& y, const kernels::cpu::Seen& seen,
                           const std::optional<Tensor>&, const Quantizer& quantizer,
                           GroupOut group) {
  kernels::cpu::quantize_current_seen(y, seen, {quantizer.format->element, quantizer},
                                      output(group));
}

kernels::cpu::Seen quantize_delayed(const kernels::cpu::Input& x,
                                    const std::optional<Tensor>& scale, const Quantizer& quantizer,
                                    GroupOut group) {
  if (!group[row_codes].defined()) return kernels::cpu::seen_in(x);
  kernels::cpu::Seen seen;
  kernels::Fp8Output out = output(group, &seen.amax);
  if (std::holds_alternative<kernels::cpu::Band>(x)) out.dequant_scale = nullptr;
  kernels::cpu::quantize_delayed(x, quantizer.format->element, *scale->const_data_ptr<float>(),
                                 out);
  return seen;
}

void finish_delayed(const kernels::ConstRows&, const kernels::cpu::Seen&,
                    const std::optional<Tensor>& scale, const Quantizer& quantizer,
                    GroupOut group) {
  kernels::cpu::quantize_delayed({}, quantizer.format->element, *scale->const_data_ptr<float>(),
                                 output(group));  // without rows it writes the scale alone
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

constexpr CpuScaling kCurrentOnCpu{
    .quantize = quantize_current, .dequantize = dequantize, .quantize_seen = quantize_current_seen},
    kDelayedOnCpu{.quantize = quantize_delayed,
                  .dequantize = dequantize,
                  .band_rows = 1,
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
    .options = {"eps", "pow2"},
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
