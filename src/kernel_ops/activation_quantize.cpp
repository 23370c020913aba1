#include "kernel_ops/activation_quantize.h"

#include <ATen/ops/empty.h>

#include "kernel_ops/memory.h"
#include "kernel_ops/quantize.h"
#include "kernel_ops/register.h"
#include "kernel_ops/shapes.h"
#include "kernel_ops/tensor_scaling.h"

namespace tandem::kernel_ops {

namespace {

constexpr std::array<bool, 2> kOnlyY{false, true};

GroupMask group_mask(const std::array<bool, 4>& output_mask) {
  return {output_mask[1], output_mask[2], output_mask[3]};
}

}  // namespace

template <typename Forward>
Specs<1 + group_size> ThenQuantize<Forward>::shapes(const Tensor& z,
                                                    const std::optional<Tensor>& given,
                                                    std::string_view activation,
                                                    const Quantizer& quantizer,
                                                    std::array<bool, 4> output_mask) {
  ResultSpec y = Forward::shapes(z, std::nullopt, activation, kOnlyY)[1];
  // A view of the sizes of y, where they are not those of z.
  const Tensor like_y = z.slice_symint(-1, 0, y.sizes.back());
  auto group =
      group_specs("activation_quantize", like_y, given, quantizer, group_mask(output_mask));
  if (!output_mask[0]) y = {{0}, y.dtype, false};
  return joined(Specs<1>{std::move(y)}, std::move(group));
}

template <typename Forward>
void ThenQuantize<Forward>::cpu(const Tensor& z, const std::optional<Tensor>& given,
                                std::string_view activation, const Quantizer& quantizer,
                                std::array<bool, 4>, Results<1 + group_size>& results) {
  const ResultSpec spec = Forward::shapes(z, std::nullopt, activation, kOnlyY)[1];
  const Tensor y = results[0].defined()
                       ? results[0]
                       : empty_cpu(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
  Group group;
  std::copy(results.begin() + 1, results.end(), group.begin());
  const Tensor from = z.reshape({-1, z.size(-1)}), to = y.view({-1, y.size(-1)});
  const auto make = [&](size_t first, size_t count) {
    const auto start = static_cast<int64_t>(first), length = static_cast<int64_t>(count);
    Results<2> made{Tensor(), to.narrow(0, start, length)};
    Forward::cpu(from.narrow(0, start, length), std::nullopt, activation, kOnlyY, made);
  };
  if (quantize_made(y, make, given, quantizer, group)) return;
  Results<2> made{Tensor(), y};
  Forward::cpu(z, std::nullopt, activation, kOnlyY, made);
  quantizer.scaling->quantize(y, given, quantizer, group);
}

template <typename Forward>
Results<1 + group_size> ThenQuantize<Forward>::reference(const Tensor& z,
                                                         const std::optional<Tensor>& given,
                                                         std::string_view activation,
                                                         const Quantizer& quantizer,
                                                         std::array<bool, 4> output_mask) {
  const Tensor y = Forward::reference(z, std::nullopt, activation, kOnlyY)[1];
  return joined(Results<1>{output_mask[0] ? y : at::empty({0}, y.options())},
                Quantize::reference(y, given, quantizer, group_mask(output_mask)));
}

template struct ThenQuantize<ActivationForward>;
template struct ThenQuantize<GluForward>;

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ActivationQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kGiven>::these, ActivationQuantize::cpu}});
  register_kernel_op<GluQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kGiven>::these, GluQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
