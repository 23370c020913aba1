// Products of groups of rows through the dispatcher, and as differentiable operations.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernel_ops/grouped/grouped.h"

namespace tandem::kernel_ops {

namespace composite {

Tensor grouped_product(const Tensor& x, const Tensor& splits, at::TensorList matrices,
                       at::TensorList biases, const std::optional<Tensor>& scales,
                       bool transposed) {
  const auto offsets = group_offsets(splits, static_cast<int64_t>(matrices.size()), x.size(0));
  std::vector<Tensor> parts;
  for (size_t g = 0; g < matrices.size(); ++g) {
    const int64_t first = offsets[g], count = offsets[g + 1] - first;
    const Tensor rows = x.narrow(0, first, count);
    const Tensor matrix = transposed ? matrices[g].t() : matrices[g];
    if (biases.empty()) {
      parts.push_back(at::mm(rows, matrix));
    } else if (scales) {
      const Tensor own = scales->narrow(0, first, count).unsqueeze(1);
      parts.push_back(at::addmm(own * biases[g], rows, matrix));
    } else {
      parts.push_back(at::addmm(biases[g], rows, matrix));
    }
  }
  parts.push_back(
      at::zeros({x.size(0) - offsets.back(), matrices[0].size(transposed ? 0 : 1)}, x.options()));
  return at::cat(parts);
}

}  // namespace composite

namespace {

template <typename Part>
std::vector<Tensor> by_group(const Tensor& splits, int64_t groups, int64_t rows, Part&& part) {
  const auto offsets = group_offsets(splits, groups, rows);
  std::vector<Tensor> parts;
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    parts.push_back(part(g, offsets[g], offsets[g + 1] - offsets[g]));
  return parts;
}

Tensor of_group(const Tensor& all, size_t group) {
  return all.select(0, static_cast<int64_t>(group));
}

/// Whether the composite form must be differentiated. Throws if there are quantizers, which it
/// lacks.
template <typename Args>
bool is_differentiated(const Args& args, std::initializer_list<const Quantizer*> quantizers = {}) {
  if (!detail::is_differentiated(args)) return false;
  for (const Quantizer* each : quantizers)
    TORCH_CHECK_NOT_IMPLEMENTED(
        each == nullptr, "grouped_linear: expected tensors that need no gradient for quantized ",
        "products, got one that requires it. Call them inside a pipeline, or detach it.");
  return true;
}

}  // namespace

namespace {

void check_groups(const char* op, int64_t groups) {
  constexpr int64_t kMost = int64_t{1} << 24;
  TORCH_CHECK_VALUE(groups >= 0 && groups <= kMost, op, ": expected 0 to ", kMost, " groups, got ",
                    groups, ". Pass as many as splits has numbers.");
}

}  // namespace

Specs<1> GroupedProduct::shapes(const Args& args) {
  TORCH_CHECK_VALUE(!args.matrices.empty(),
                    "grouped_product: expected a matrix for each group, got none. Pass one at "
                    "least.");
  return {ResultSpec{{args.x.sym_size(0), args.matrices[0].sym_size(args.transposed ? 0 : 1)},
                     args.x.scalar_type()}};
}

void GroupedProduct::cpu(const Args& args, std::span<Tensor> results) {
  const auto groups = static_cast<int64_t>(args.matrices.size());
  product_of_groups(args.x, group_offsets(args.splits, groups, args.x.size(0)),
                    {args.matrices.vec(),
                     args.matrix_scales.vec(),
                     args.matrix_amaxes.vec(),
                     {args.matrix_quantizer, args.matrix_given}},
                    {args.biases.vec(), args.scales}, args.transposed, {args.quantizer, args.given},
                    results[0]);
}

Results<1> GroupedProduct::reference(const Args& args) {
  if (!is_differentiated(args, {args.quantizer, args.matrix_quantizer}))
    return made_by_cpu<GroupedProduct>(args);
  return {composite::grouped_product(args.x, args.splits, args.matrices, args.biases, args.scales,
                                     args.transposed)};
}

Specs<1> GroupedGradWeight::shapes(const Args& args) {
  check_groups("grouped_grad_weight", args.groups);
  return {
      ResultSpec{{args.groups, args.grad_y.sym_size(1), args.x.sym_size(1)}, args.x.scalar_type()}};
}

void GroupedGradWeight::cpu(const Args& args, std::span<Tensor> results) {
  const GradQuantizers quantizers{{args.grad_quantizer, args.grad_given},
                                  {args.quantizer, args.given}};
  const auto offsets = group_offsets(args.splits, args.groups, args.x.size(0));
  for_each_group(offsets, [&](size_t g) {
    grad_weight_of_group(rows_between(args.grad_y, offsets[g], offsets[g + 1]),
                         rows_between(args.x, offsets[g], offsets[g + 1]), quantizers, g,
                         of_group(results[0], g), /*accumulate=*/false);
  });
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    if (offsets[g] == offsets[g + 1]) of_group(results[0], g).zero_();
}

Results<1> GroupedGradWeight::reference(const Args& args) {
  if (!is_differentiated(args, {args.grad_quantizer, args.quantizer}))
    return made_by_cpu<GroupedGradWeight>(args);
  const auto product = [&](size_t, int64_t first, int64_t rows) {
    return at::mm(args.grad_y.narrow(0, first, rows).t(), args.x.narrow(0, first, rows));
  };
  return {at::stack(by_group(args.splits, args.groups, args.x.size(0), product))};
}

Specs<1> GroupedGradBias::shapes(const Args& args) {
  check_groups("grouped_grad_bias", args.groups);
  return {ResultSpec{{args.groups, args.grad_y.sym_size(1)}, args.grad_y.scalar_type()}};
}

void GroupedGradBias::cpu(const Args& args, std::span<Tensor> results) {
  const auto offsets = group_offsets(args.splits, args.groups, args.grad_y.size(0));
  for (size_t g = 0; g + 1 < offsets.size(); ++g) {
    std::optional<Tensor> own;
    if (args.scales) own = rows_between(*args.scales, offsets[g], offsets[g + 1]);
    grad_bias_of_group(rows_between(args.grad_y, offsets[g], offsets[g + 1]), own,
                       of_group(results[0], g));
  }
}

Results<1> GroupedGradBias::reference(const Args& args) {
  if (!is_differentiated(args)) return made_by_cpu<GroupedGradBias>(args);
  const at::ScalarType dtype = args.grad_y.scalar_type();
  const Tensor terms = args.scales ? at::mul(args.grad_y, args.scales->unsqueeze(1)) : args.grad_y;
  const auto sum = [&](size_t, int64_t first, int64_t rows) {
    return terms.narrow(0, first, rows).sum(0, /*keepdim=*/false, wide(dtype)).to(dtype);
  };
  return {at::stack(by_group(args.splits, args.groups, args.grad_y.size(0), sum))};
}

Specs<1> GroupedAmaxes::shapes(const Args& args) {
  check_groups("grouped_amaxes", args.groups);
  return {ResultSpec{{args.groups}, at::kFloat}};
}

void GroupedAmaxes::cpu(const Args& args, std::span<Tensor> results) {
  const Tensor& x = args.x;
  std::vector<int64_t> offsets(static_cast<size_t>(args.groups) + 1);
  if (args.splits) {
    offsets = group_offsets(*args.splits, args.groups, x.size(0));
  } else {
    TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(0) == args.groups,
                      "grouped_amaxes: expected matrices [", args.groups, ", ...], got ", x.sizes(),
                      ". Pass one for each group.");
    std::iota(offsets.begin(), offsets.end(), 0);
  }
  results[0].zero_();
  for_each_group(offsets, [&](size_t g) {
    of_group(results[0], g).copy_(amax_of_rows(rows_between(x, offsets[g], offsets[g + 1])));
  });
}

/// Magnitudes have no gradient here.
Results<1> GroupedAmaxes::reference(const Args& args) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return made_by_cpu<GroupedAmaxes>(args);
}

Specs<1> GroupedGradScales::shapes(const Args& args) {
  return {ResultSpec{{args.grad_y.sym_size(0)}, args.grad_y.scalar_type()}};
}

void GroupedGradScales::cpu(const Args& args, std::span<Tensor> results) {
  const auto offsets =
      group_offsets(args.splits, static_cast<int64_t>(args.biases.size()), args.grad_y.size(0));
  for (size_t g = 0; g + 1 < offsets.size(); ++g)
    if (offsets[g] != offsets[g + 1])
      grad_scales_of_group(rows_between(args.grad_y, offsets[g], offsets[g + 1]), args.biases[g],
                           rows_between(results[0], offsets[g], offsets[g + 1]));
  rows_between(results[0], offsets.back(), results[0].size(0)).zero_();
}

Results<1> GroupedGradScales::reference(const Args& args) {
  if (!is_differentiated(args)) return made_by_cpu<GroupedGradScales>(args);
  const Tensor& grad_y = args.grad_y;
  int64_t rest = grad_y.size(0);
  auto parts = by_group(args.splits, static_cast<int64_t>(args.biases.size()), rest,
                        [&](size_t g, int64_t first, int64_t rows) {
                          rest -= rows;
                          return at::mv(grad_y.narrow(0, first, rows), args.biases[g]);
                        });
  parts.push_back(at::zeros({rest}, grad_y.options()));
  return {at::cat(parts)};
}

Tensor grouped_product(const Tensor& x, const Tensor& splits, const GroupMatrices& matrices,
                       const GroupBiases& biases, bool transposed,
                       const GroupQuantizer& quantizer) {
  return dispatch<GroupedProduct>({.x = x,
                                   .splits = splits,
                                   .matrices = matrices.matrices,
                                   .biases = biases.biases,
                                   .scales = biases.scales,
                                   .transposed = transposed,
                                   .quantizer = quantizer.quantizer,
                                   .matrix_scales = matrices.scales,
                                   .matrix_amaxes = matrices.amaxes,
                                   .matrix_quantizer = matrices.quantizer.quantizer,
                                   .given = quantizer.given,
                                   .matrix_given = matrices.quantizer.given})[0];
}
Tensor grouped_grad_weight(const Tensor& grad_y, const Tensor& x, const Tensor& splits,
                           int64_t groups, const GradQuantizers& quantizers) {
  return dispatch<GroupedGradWeight>({.grad_y = grad_y,
                                      .x = x,
                                      .splits = splits,
                                      .groups = groups,
                                      .grad_quantizer = quantizers.grad_y.quantizer,
                                      .quantizer = quantizers.x.quantizer,
                                      .grad_given = quantizers.grad_y.given,
                                      .given = quantizers.x.given})[0];
}
Tensor grouped_grad_bias(const Tensor& grad_y, const Tensor& splits,
                         const std::optional<Tensor>& scales, int64_t groups) {
  return dispatch<GroupedGradBias>({grad_y, splits, scales, groups})[0];
}
Tensor grouped_amaxes(const Tensor& rows, const Tensor& splits, int64_t groups) {
  return dispatch<GroupedAmaxes>({rows, splits, groups})[0];
}
Tensor matrix_amaxes(const Tensor& matrices) {
  return dispatch<GroupedAmaxes>({matrices, std::nullopt, matrices.size(0)})[0];
}
Tensor grouped_grad_scales(const Tensor& grad_y, const Tensor& splits, at::TensorList biases) {
  return dispatch<GroupedGradScales>({grad_y, splits, biases})[0];
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_of_all_dtypes<GroupedProduct>(library);
  register_of_all_dtypes<GroupedGradWeight>(library);
  register_of_all_dtypes<GroupedGradBias>(library);
  register_of_all_dtypes<GroupedAmaxes>(library);
  register_of_all_dtypes<GroupedGradScales>(library);
}

}  // namespace tandem::kernel_ops
