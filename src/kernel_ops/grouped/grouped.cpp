#include "kernel_ops/grouped/grouped.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/framework/run.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/product/product.h"
#include "kernel_ops/quantize/quantize.h"
#include "kernels/parallel.h"

namespace tandem::kernel_ops {

using at::Tensor;

namespace {

/// The scale or seed of one group, if the quantizer needs one.
std::optional<Tensor> given_to_group(const GroupQuantizer& how, size_t group) {
  const auto g = static_cast<int64_t>(group);
  switch (given_to(*how.quantizer)) {
    case Given::nothing:
      return std::nullopt;
    case Given::scale:
      return how.given.value().select(0, g);
    case Given::seed:
      break;
  }
  const Tensor& seed = how.given.value();
  return at::cat({seed.view({1}), at::full({1}, g, seed.options())});
}

/// A group's operand in codes of one direction.
Codes quantized(ImplementationNames& took, const Tensor& numbers, const GroupQuantizer& how,
                size_t number, Direction direction) {
  TORCH_CHECK_VALUE(
      how.quantizer != nullptr,
      "grouped_linear: expected a quantizer for the other operand too, got none. Pass "
      "one for each operand.");
  const Quantizer& quantizer = *how.quantizer;
  const bool is_column = direction == Direction::column,
             is_row = !is_column || serves_both_directions(quantizer);
  Group group = run<Quantize>(took, {},
                              {.x = numbers.contiguous(),
                               .given = given_to_group(how, number),
                               .quantizer = quantizer,
                               .output_mask = {is_row, !is_row, how.amaxes.defined()}});
  if (how.amaxes.defined())
    how.amaxes.select(0, static_cast<int64_t>(number)).copy_(group[group_amax]);
  return codes_in(std::move(group), quantizer, !is_column, is_column);
}

/// The dequantized values of a group's row codes.
Tensor rounded(ImplementationNames& took, const Tensor& numbers, const GroupQuantizer& how,
               size_t group, at::ScalarType dtype) {
  const Codes codes = quantized(took, numbers, how, group, Direction::row);
  const c10::SymDimVector sizes = sizes_of(numbers);
  return run<Dequantize>(
      took, {}, dequantizing(codes.in(Direction::row), dtype, c10::SymIntArrayRef(sizes)))[0];
}

/// target = beta * target + column * row: an outer product.
void add_outer(ImplementationNames& took, const Tensor& column, const Tensor& row,
               const Tensor& target, double beta = 1) {
  const Tensor left = column.unsqueeze(1), right = row.unsqueeze(0);
  took |= multiply(Product(left, right, target.scalar_type(), {.beta = beta}), target);
}

/// y = sums + bias, rounded once. `sums` may be y.
void add_bias(ImplementationNames& took, const GroupBiases& biases, size_t group,
              const Tensor& sums, const Tensor& y) {
  const Tensor& bias = biases.biases[group];
  Tensor sum = sums;
  if (biases.scales) {
    add_outer(took, biases.scales->to(sums.scalar_type()), bias.to(sums.scalar_type()), sums);
  } else {
    sum = run<AddBias>(took, {y}, {.x = sums, .bias = bias, .dtype = y.scalar_type()})[0];
  }
  if (!sum.is_same(y)) y.copy_(sum);
}

}  // namespace

Tensor rows_between(const Tensor& matrix, int64_t first, int64_t last) {
  c10::DimVector sizes(matrix.sizes().begin(), matrix.sizes().end());
  sizes[0] = last - first;
  return at::native::as_strided_tensorimpl(matrix, sizes, matrix.strides(),
                                           matrix.storage_offset() + first * matrix.stride(0));
}

namespace {

/// The groups of each thread; empty if the threads' loads would differ too much.
std::vector<std::vector<size_t>> shared_out(const std::vector<int64_t>& offsets) {
  // The cost of reading and packing a group's matrix, in rows of a product. Measured on Sapphire
  // Rapids.
  constexpr int64_t kRowsOfMatrix = 32;
  const auto threads = static_cast<size_t>(at::in_parallel_region() ? 1 : at::get_num_threads());
  const auto cost = [&](size_t g) { return offsets[g + 1] - offsets[g] + kRowsOfMatrix; };
  std::vector<size_t> groups;
  int64_t total = 0;
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    if (offsets[g] != offsets[g + 1]) {
      groups.push_back(g);
      total += cost(g);
    }
  if (threads == 1 || groups.size() < threads) return {};
  std::ranges::sort(groups, std::ranges::greater(), cost);
  std::vector<std::vector<size_t>> shares(threads);
  std::vector<int64_t> loads(threads);
  for (const size_t g : groups) {
    const auto least = std::ranges::min_element(loads);
    *least += cost(g);
    shares[static_cast<size_t>(least - loads.begin())].push_back(g);
  }
  const int64_t most = *std::ranges::max_element(loads);
  return most * static_cast<int64_t>(threads) * 5 > total * 6 ? std::vector<std::vector<size_t>>()
                                                              : shares;
}

}  // namespace

void for_each_group(const std::vector<int64_t>& offsets,
                    const std::function<void(size_t group)>& work) {
  const auto shares = shared_out(offsets);
  if (shares.empty()) {
    for (size_t g = 0; g + 1 < offsets.size(); ++g)
      if (offsets[g] != offsets[g + 1]) work(g);
    return;
  }
  const at::ThreadLocalState state;
  std::vector<std::exception_ptr> errors(shares.size());
  auto run_share = [&](int64_t first, int64_t last) {
    const at::ThreadLocalStateGuard as_caller(state);
    const OneMklThread one;
    for (auto share = static_cast<size_t>(first); share < static_cast<size_t>(last); ++share) {
      try {
        for (const size_t g : shares[share]) work(g);
      } catch (...) {  // no exception may leave a parallel region
        errors[share] = std::current_exception();
      }
    }
  };
  kernels::parallel_for(0, static_cast<int64_t>(shares.size()), 1, run_share);
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

ImplementationNames product_of_group(const Tensor& x, const GroupMatrices& matrices,
                                     const GroupBiases& biases, size_t group, bool transposed,
                                     const GroupQuantizer& quantizer, const Tensor& y) {
  ImplementationNames took = 0;
  const bool adds = !biases.biases.empty();
  const Tensor& matrix = matrices.matrices[group];
  const Direction along = transposed ? Direction::row : Direction::column;
  if (quantizer.quantizer == nullptr) {
    const Tensor numbers = matrices.quantizer.quantizer == nullptr
                               ? matrix
                               : rounded(took, matrix, matrices.quantizer, group, x.scalar_type());
    const Tensor right = transposed ? numbers.t() : numbers;
    const bool is_added_to = adds && is_narrow(y.scalar_type());
    if (is_added_to && biases.scales)
      add_outer(took, *biases.scales, biases.biases[group], y, /*beta=*/0);
    if (is_added_to && !biases.scales) y.copy_(biases.biases[group]);
    took |= multiply(Product(x, right, y.scalar_type(), {.beta = is_added_to ? 1.0 : 0.0}), y);
    if (adds && !is_added_to) add_bias(took, biases, group, y, y);
  } else {
    const bool is_coded = !matrices.scales.empty();
    const Codes own =
        is_coded ? Codes() : quantized(took, matrix, matrices.quantizer, group, along);
    const CodedMatrix weight =
        is_coded ? CodedMatrix(matrix, matrices.quantizer.quantizer, along, &matrices.scales[group],
                               matrices.amaxes.empty() ? nullptr : &matrices.amaxes[group])
                 : own.in(along);
    const Codes rows = quantized(took, x, quantizer, group, Direction::row);
    const Tensor sums =
        adds && is_narrow(y.scalar_type()) ? empty_beside(y, y.sizes(), at::kFloat) : y;
    took |= multiply_codes(rows.in(Direction::row), false, weight, transposed, Rows::of_the_result,
                           sums);
    if (adds) add_bias(took, biases, group, sums, y);
  }
  return took;
}

ImplementationNames product_of_groups(const Tensor& x, const std::vector<int64_t>& offsets,
                                      const GroupMatrices& matrices, const GroupBiases& biases,
                                      bool transposed, const GroupQuantizer& quantizer,
                                      const Tensor& y) {
  std::atomic<ImplementationNames> took = 0;
  for_each_group(offsets, [&](size_t g) {
    const int64_t first = offsets[g], last = offsets[g + 1];
    GroupBiases of_rows{biases.biases};
    if (biases.scales) of_rows.scales = rows_between(*biases.scales, first, last);
    took |= product_of_group(rows_between(x, first, last), matrices, of_rows, g, transposed,
                             quantizer, rows_between(y, first, last));
  });
  if (offsets.back() != y.size(0)) rows_between(y, offsets.back(), y.size(0)).zero_();
  return took;
}

ImplementationNames grad_weight_of_group(const Tensor& grad_y, const Tensor& x,
                                         const GradQuantizers& quantizers, size_t group,
                                         const Tensor& target, bool accumulate) {
  ImplementationNames took = 0;
  if (x.size(0) == 0) {
    if (!accumulate) target.zero_();
    return took;
  }
  const bool is_quantized = quantizers.grad_y.quantizer != nullptr;
  if (!is_quantized && quantizers.x.quantizer != nullptr) {
    const Tensor numbers = rounded(took, x, quantizers.x, group, x.scalar_type());
    return took | grad_weight_of_group(grad_y, numbers, {}, group, target, accumulate);
  }
  const bool is_writable =
      target.is_contiguous() && is_plain(target) && target.device() == x.device();
  if (is_quantized || !is_writable) {
    const bool is_spare = is_writable && !accumulate;
    const at::ScalarType wide =
        is_quantized ? at::kFloat : c10::promoteTypes(x.scalar_type(), target.scalar_type());
    const Tensor sums = is_spare ? target : empty_beside(x, target.sizes(), wide);
    if (is_quantized) {
      const Codes left = quantized(took, grad_y, quantizers.grad_y, group, Direction::column),
                  right = quantized(took, x, quantizers.x, group, Direction::column);
      took |= multiply_codes(left.in(Direction::column), true, right.in(Direction::column), false,
                             Rows::contracted, sums);
    } else {
      took |= grad_weight_of_group(grad_y, x, quantizers, group, sums, /*accumulate=*/false);
    }
    if (!is_spare) accumulate ? target.add_(sums) : target.copy_(sums);
    return took;
  }
  // Operands are exact in the wider dtype, so the sum is rounded once.
  const at::ScalarType wide = c10::promoteTypes(x.scalar_type(), target.scalar_type());
  const Tensor left = grad_y.to(wide).t(), right = x.to(wide);
  if (wide == target.scalar_type()) {
    took |= multiply(
        Product(left, right, wide, {.rows = Rows::contracted, .beta = accumulate ? 1.0 : 0.0}),
        target);
    return took;
  }
  const Tensor sums = empty_beside(x, target.sizes(), wide);
  took |= multiply(Product(left, right, wide, {.rows = Rows::contracted}), sums);
  accumulate ? target.add_(sums) : target.copy_(sums);
  return took;
}

ImplementationNames grad_weight_of_codes(const CodedMatrix& grad_y, const CodedMatrix& x,
                                         const Tensor& target, bool accumulate) {
  if (x.quantizer == nullptr)
    return grad_weight_of_group(turned(grad_y.matrix, false), turned(x.matrix, false), {}, 0,
                                target, accumulate);
  const bool is_spare = !accumulate && target.is_contiguous() && is_plain(target) &&
                        target.device() == x.matrix.device();
  const Tensor sums = is_spare ? target : empty_beside(x.matrix, target.sizes(), at::kFloat);
  const ImplementationNames took = multiply_codes(grad_y, true, x, false, Rows::contracted, sums);
  if (!is_spare) accumulate ? target.add_(sums) : target.copy_(sums);
  return took;
}

Codes codes_of_group(const Tensor& numbers, const GroupQuantizer& how, size_t group) {
  ImplementationNames took = 0;
  return quantized(took, numbers, how, group, Direction::row);
}

Tensor amax_of_rows(const Tensor& rows) {
  static const Quantizer& any = quantizer("fp8_e4m3");  // the amax does not depend on the quantizer
  ImplementationNames took = 0;
  return run<Quantize>(
      took, {},
      {.x = rows.contiguous(), .quantizer = any, .output_mask = {false, false, true}})[group_amax];
}

ImplementationNames grad_bias_of_group(const Tensor& grad_y, const std::optional<Tensor>& scales,
                                       const Tensor& target) {
  ImplementationNames took = 0;
  if (grad_y.size(0) == 0) {
    target.zero_();
  } else if (scales) {
    const Tensor left = scales->unsqueeze(0);
    took |= multiply(Product(left, grad_y, target.scalar_type(), {.rows = Rows::contracted}),
                     target.unsqueeze(0));
  } else {
    const Tensor sums =
        run<SumRows>(took, {target}, {.x = grad_y, .dtype = target.scalar_type()})[0];
    if (!sums.is_same(target)) target.copy_(sums);
  }
  return took;
}

ImplementationNames grad_scales_of_group(const Tensor& grad_y, const Tensor& bias,
                                         const Tensor& target) {
  const Tensor right = bias.unsqueeze(1);
  return multiply(Product(grad_y, right, target.scalar_type()), target.unsqueeze(1));
}

std::vector<int64_t> group_offsets(const Tensor& splits, int64_t groups, int64_t rows) {
  TORCH_CHECK_TYPE(c10::isIntegralType(splits.scalar_type(), /*includeBool=*/false),
                   "grouped_linear: expected splits that are integers, got ", splits.scalar_type(),
                   ". Pass the number of rows of each group as an int64 tensor.");
  TORCH_CHECK_VALUE(splits.numel() == groups, "grouped_linear: expected splits of shape [", groups,
                    "], one number per group, got ", splits.sizes(),
                    ". Pass the number of rows of each group.");
  const bool is_readable = is_on_host(splits) && is_plain(splits) && splits.dim() == 1 &&
                           splits.scalar_type() == at::kLong;
  const Tensor counts = is_readable ? splits : splits.to(at::kCPU, at::kLong).reshape({-1});
  std::vector<int64_t> offsets{0};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t count =
        is_readable ? counts.const_data_ptr<int64_t>()[g * counts.stride(0)]
                    : counts.select(0, g).item<int64_t>();  // a transform's tensor has no memory
    TORCH_CHECK_VALUE(count >= 0 && count <= rows - offsets.back(),
                      "grouped_linear: expected splits >= 0 whose sum is at most the ", rows,
                      " rows of x, got ", count, " for group ", g, " behind ", offsets.back(),
                      " rows. Count the rows of each group.");
    offsets.push_back(offsets.back() + count);
  }
  return offsets;
}

}  // namespace tandem::kernel_ops
