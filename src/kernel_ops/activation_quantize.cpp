#include "kernel_ops/activation_quantize.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "kernel_ops/memory.h"
#include "kernel_ops/operands.h"
#include "kernel_ops/quantize.h"
#include "kernel_ops/register.h"
#include "kernel_ops/shapes.h"

namespace tandem::kernel_ops {

namespace {

constexpr std::array<bool, 2> kOnlyY{false, true};

/// The last three.
template <size_t N>
GroupMask group_mask(const std::array<bool, N>& output_mask) {
  return {output_mask[N - 3], output_mask[N - 2], output_mask[N - 1]};
}

/// All rows of a tensor as a matrix, and some of them.
Tensor as_matrix(const Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }
Tensor rows_of(const Tensor& matrix, size_t first, size_t count) {
  return matrix.narrow(0, static_cast<int64_t>(first), static_cast<int64_t>(count));
}

/// Rows as a kernel op writes them: `make(first, count, rows)` fills a tensor [count, cols] like
/// `result`, which may be undefined, of `spec`.
template <typename Make>
kernels::cpu::MadeRows made_rows(const Tensor& result, const ResultSpec& spec, int64_t rows,
                                 const Make& make) {
  const int64_t cols = spec.sizes.back().expect_int();
  const auto width = static_cast<size_t>(cols);
  return {{result.defined() ? result.data_ptr() : nullptr, element_of(spec.dtype),
           static_cast<size_t>(rows), width, width},
          [&make, cols, dtype = spec.dtype](size_t first, size_t count, void* to) {
            make(first, count, at::from_blob(to, {static_cast<int64_t>(count), cols}, dtype));
          }};
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
  Group group;
  std::copy(results.begin() + 1, results.end(), group.begin());
  const Tensor from = as_matrix(z);
  const auto make = [&](size_t first, size_t count, Tensor y) {
    Results<2> rows{Tensor(), std::move(y)};
    Forward::cpu(rows_of(from, first, count), std::nullopt, activation, kOnlyY, rows);
  };
  if (quantize_made(made_rows(results[0], spec, from.size(0), make), given, quantizer, group))
    return;
  const Tensor y = results[0].defined()
                       ? results[0]
                       : empty_cpu(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
  Results<2> whole{Tensor(), y};
  Forward::cpu(z, std::nullopt, activation, kOnlyY, whole);
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

template <typename Backward>
Specs<2 + group_size> BackwardThenQuantize<Backward>::shapes(const Tensor& grad_y, const Tensor& z,
                                                             const std::optional<Tensor>& given,
                                                             std::string_view activation,
                                                             const Quantizer& quantizer,
                                                             std::array<bool, 5> output_mask) {
  auto specs = Backward::shapes(grad_y, z, activation, {output_mask[0], false, output_mask[1]});
  auto group =
      group_specs("activation_backward_quantize", z, given, quantizer, group_mask(output_mask));
  return joined(Specs<2>{std::move(specs[0]), std::move(specs[2])}, std::move(group));
}

template <typename Backward>
void BackwardThenQuantize<Backward>::cpu(const Tensor& grad_y, const Tensor& z,
                                         const std::optional<Tensor>& given,
                                         std::string_view activation, const Quantizer& quantizer,
                                         std::array<bool, 5>, Results<2 + group_size>& results) {
  const std::array<bool, 3> mask{true, false, results[1].defined()};
  const ResultSpec spec = Backward::shapes(grad_y, z, activation, mask)[0];
  Group group;
  std::copy(results.begin() + 2, results.end(), group.begin());
  const Tensor grads = as_matrix(grad_y), from = as_matrix(z),
               all_y = mask[2] ? as_matrix(results[1]) : Tensor();
  const auto make = [&](size_t first, size_t count, Tensor grad_z) {
    Results<3> rows{std::move(grad_z), Tensor(), mask[2] ? rows_of(all_y, first, count) : Tensor()};
    Backward::cpu(rows_of(grads, first, count), rows_of(from, first, count), activation, mask,
                  rows);
  };
  if (quantize_made(made_rows(results[0], spec, from.size(0), make), given, quantizer, group))
    return;
  const Tensor grad_z = results[0].defined()
                            ? results[0]
                            : empty_cpu(C10_AS_INTARRAYREF_SLOW(spec.sizes), spec.dtype);
  Results<3> whole{grad_z, Tensor(), results[1]};
  Backward::cpu(grad_y, z, activation, mask, whole);
  quantizer.scaling->quantize(grad_z, given, quantizer, group);
}

template <typename Backward>
Results<2 + group_size> BackwardThenQuantize<Backward>::reference(
    const Tensor& grad_y, const Tensor& z, const std::optional<Tensor>& given,
    std::string_view activation, const Quantizer& quantizer, std::array<bool, 5> output_mask) {
  const auto made = Backward::reference(grad_y, z, activation, {true, false, output_mask[1]});
  return joined(Results<2>{output_mask[0] ? made[0] : at::empty({0}, made[0].options()), made[2]},
                Quantize::reference(made[0], given, quantizer, group_mask(output_mask)));
}

template struct ThenQuantize<ActivationForward>;
template struct ThenQuantize<GluForward>;
template struct BackwardThenQuantize<ActivationBackward>;
template struct BackwardThenQuantize<GluBackward>;

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<ActivationQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kGiven>::these, ActivationQuantize::cpu}});
  register_kernel_op<GluQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kGiven>::these, GluQuantize::cpu}});
  register_kernel_op<ActivationBackwardQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven>::these,
                 ActivationBackwardQuantize::cpu}});
  register_kernel_op<GluBackwardQuantize>(
      library, {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kGiven>::these,
                 GluBackwardQuantize::cpu}});
}

}  // namespace tandem::kernel_ops
