#include "kernel_ops/loss/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <tuple>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

/// The name of the op that passes these arguments.
const char* name_of(const LinearCrossEntropy::Args& args) {
  return args.weight ? LinearCrossEntropy::kName : "cross_entropy";
}

void check_vector(const char* op, const std::optional<Tensor>& vector, const char* name,
                  const c10::SymInt& size, const char* of) {
  TORCH_CHECK_VALUE(!vector || (vector->dim() == 1 && vector->sym_size(0) == size), op,
                    ": expected ", name, " of shape [", size, "], a number for each of the ", of,
                    ", got ", vector->sym_sizes(), ". Pass one of this size, or none.");
}

bool is_float64(const LinearCrossEntropy::Args& args) {
  return LinearCrossEntropy::logits_dtype(args) == at::kDouble;
}

/// The numbers as one row, [1, count], for an all-gather.
Tensor numbers(std::initializer_list<double> values) {
  const Tensor own = empty_cpu({1, static_cast<int64_t>(values.size())}, at::kDouble);
  std::ranges::copy(values, own.data_ptr<double>());
  return own;
}

/// Whether a gradient is wanted.
bool wants_gradients(const std::array<bool, 6>& mask) {
  using K = LinearCrossEntropy;
  return mask[K::grad_x] || mask[K::grad_weight] || mask[K::grad_bias];
}

}  // namespace

SharedClasses::SharedClasses(const LinearCrossEntropy::Args& args)
    : op(name_of(args)),
      group{std::string(args.group), args.group_size},
      first{0},
      rank(args.rank),
      all(LinearCrossEntropy::classes(args).guard_int(__FILE__, __LINE__)),
      all_weights(0),
      device(args.x.device()) {
  if (!are_shared()) return;
  const double own_weights = args.class_weight
                                 ? args.class_weight->to(at::kDouble).sum().item<double>()
                                 : static_cast<double>(all);
  const Tensor of_ranks = gathered(numbers({static_cast<double>(all), own_weights}).to(device));
  const Tensor on_host = of_ranks.cpu();
  const auto* next = on_host.const_data_ptr<double>();
  all = 0;
  for (int64_t each = 0; each < group.size; ++each, next += 2) {
    if (each != 0) first.push_back(all);
    all += static_cast<int64_t>(next[0]);
    all_weights += next[1];
  }
}

Tensor SharedClasses::gathered(const Tensor& x) const {
  const Tensor all_rows = wait(start_all_gather(x, group));
  c10::DimVector sizes{group.size};
  sizes.append(x.sizes().begin(), x.sizes().end());
  return all_rows.view(sizes);
}

double SharedClasses::sum(double own) const {
  return gathered(numbers({own}).to(device)).sum().item<double>();
}

void SharedClasses::check(int64_t target, int64_t row, int64_t ignore_index) const {
  if (target >= 0 && target < all) return;
  const std::string expected =
      all == 0 ? c10::str("that are ignored, as there is no class, ", ignore_index)
               : c10::str("from 0 to ", all - 1, ", or ", ignore_index, " where a row is ignored");
  TORCH_CHECK_INDEX(false, op, ": expected targets ", expected, ", got ", target, " in row ", row,
                    ". Pass the number of a class for each row.");
}

at::ScalarType LinearCrossEntropy::gradient_dtype(const Args& args, const Tensor& operand) {
  const at::ScalarType dtype = operand.scalar_type();
  return dtype == at::kHalf && !args.factors ? at::kFloat : dtype;
}

at::ScalarType LinearCrossEntropy::logits_dtype(const Args& args) {
  return (args.weight ? *args.weight : args.x).scalar_type();
}

c10::SymInt LinearCrossEntropy::classes(const Args& args) {
  return args.weight ? args.weight->sym_size(0) : args.x.sym_size(-1);
}

Specs<6> LinearCrossEntropy::shapes(const Args& args) {
  const Tensor& x = args.x;
  const auto& mask = args.output_mask;
  const char* const op = name_of(args);
  if (args.weight) check_floating(op, *args.weight, "weight");
  check_floating(op, x, "x");
  TORCH_CHECK_VALUE(
      x.dim() >= 1, op, ": expected x of at least one dimension, got a number. Pass ",
      args.weight ? "a vector, or rows of them." : "logits, a number for each class.");
  TORCH_CHECK_VALUE(
      !args.weight || (args.weight->dim() == 2 && args.weight->sym_size(1) == x.sym_size(-1)), op,
      ": expected weight of shape [classes, last dimension of x], got ", args.weight->sym_sizes(),
      " for x ", x.sym_sizes(), ". Pass the weight of the layer that makes logits of x.");
  const auto rows = args.targets.sym_sizes();
  TORCH_CHECK_TYPE(
      args.targets.scalar_type() == at::kLong, op, ": expected targets of dtype int64, got ",
      dtype_name(args.targets.scalar_type()), ". Pass the number of a class for each row.");
  TORCH_CHECK_VALUE(args.targets.sym_numel() == rows_of(x), op, ": expected ", rows_of(x),
                    " targets, one for each row of x ", x.sym_sizes(), ", got ", rows,
                    ". Pass the number of a class for each row.");
  TORCH_CHECK_VALUE(!args.factors || args.factors->sym_sizes() == rows, op,
                    ": expected factors of shape ", rows, ", got ", args.factors->sym_sizes(),
                    ". Pass one for each row, or none.");
  const c10::SymInt own = classes(args);
  TORCH_CHECK_VALUE(args.weight || !args.bias, op,
                    ": expected no bias where there is no weight, got a bias of shape ",
                    args.bias->sym_sizes(), ". Add it to the logits, or pass the weight.");
  check_vector(op, args.bias, "bias", own, "rows of weight");
  check_vector(op, args.class_weight, "class_weight", own, "classes");
  TORCH_CHECK_VALUE(args.group_size == 1 || own != 0, op,
                    ": expected at least one class on each rank of the group, got none on rank ",
                    args.rank, ". Share the classes out among all ranks.");
  TORCH_CHECK_VALUE(args.rank >= 0 && args.rank < args.group_size, op,
                    ": expected a rank from 0 to ", args.group_size - 1, ", got ", args.rank,
                    ". Pass the number of this process in the group.");
  const bool is_by_row = args.reduction == "none";
  TORCH_CHECK_VALUE(is_by_row || args.reduction == "mean" || args.reduction == "sum", op,
                    ": expected reduction \"mean\", \"sum\" or \"none\", got \"", args.reduction,
                    "\". Pass one of these.");
  TORCH_CHECK_VALUE(args.bias || !mask[grad_bias], op,
                    ": expected no gradient of a bias that there is not, got output_mask[4]. "
                    "Pass the bias.");
  TORCH_CHECK_VALUE(args.weight || !mask[grad_weight], op,
                    ": expected no gradient of a weight that there is not, got output_mask[3]. "
                    "Pass the weight.");
  const at::ScalarType statistic = is_float64(args) ? at::kDouble : at::kFloat;
  const c10::SymDimVector by_row(rows.begin(), rows.end());
  return {ResultSpec{is_by_row ? by_row : c10::SymDimVector(), statistic, mask[y]},
          ResultSpec{{}, statistic, mask[denominator]},
          like(x, gradient_dtype(args, x), mask[grad_x]),
          like(args.weight.value_or(x), gradient_dtype(args, args.weight.value_or(x)),
               mask[grad_weight]),
          ResultSpec{{own}, gradient_dtype(args, args.bias.value_or(x)), mask[grad_bias]},
          ResultSpec{by_row, at::kLong, mask[best]}};
}

namespace {

/// What the reference needs of each row, over all classes: logsumexp(z), z and the weight of the
/// target, the sum of w z, each for z less a shift, and, if best is wanted, the largest z and its
/// class.
struct OfRows {
  Tensor all, target, target_weight, weighted, largest, best;
};

/// Combines the values of each rank's classes.
OfRows joined(const OfRows& own, const SharedClasses& classes) {
  const bool has_best = own.best.defined();
  std::vector<Tensor> columns{own.all, own.target, own.target_weight, own.weighted};
  if (has_best) {
    columns.push_back(own.largest);
    columns.push_back(
        (own.best + classes.first[static_cast<size_t>(classes.rank)]).to(own.all.scalar_type()));
  }
  const std::vector<Tensor> each = classes.gathered(at::stack(columns, 1)).unbind(2);
  OfRows rows{at::logsumexp(each[0], 0), each[1].sum(0), each[2].sum(0), each[3].sum(0), {}, {}};
  if (has_best)
    rows.best =
        each[5].gather(0, at::argmax(each[4], 0, /*keepdim=*/true)).squeeze(0).to(at::kLong);
  return rows;
}

/// Throws c10::IndexError for the first row that is not ignored and whose target is no class.
void check_all(const Tensor& targets, const SharedClasses& classes, int64_t ignore_index) {
  const Tensor wrong =
      (targets != ignore_index).logical_and((targets < 0).logical_or(targets >= classes.all));
  if (!wrong.any().item<bool>()) return;
  const auto row = wrong.to(at::kInt).argmax().item<int64_t>();
  classes.check(targets[row].item<int64_t>(), row, ignore_index);
}

}  // namespace

Results<6> LinearCrossEntropy::reference(const Args& args) {
  const auto& mask = args.output_mask;
  const at::ScalarType dtype = is_float64(args) ? at::kDouble : at::kFloat;
  const Tensor rows = args.x.reshape_symint({rows_of(args.x), args.x.sym_size(-1)}),
               targets = args.targets.reshape_symint({rows.sym_size(0)});
  const c10::SymInt own = classes(args);
  const bool are_shared = args.group_size > 1;
  const std::optional<SharedClasses> shared =
      are_shared ? std::optional<SharedClasses>(args) : std::nullopt;
  const Tensor ignored = targets == args.ignore_index;
  const Tensor local =
      are_shared ? targets - shared->first[static_cast<size_t>(args.rank)] : targets;
  Tensor elsewhere = ignored;
  if (are_shared) {
    elsewhere = ignored.logical_or(local < 0).logical_or(local >= own);
    check_all(targets, *shared, args.ignore_index);
  }
  const Tensor at_targets = local.masked_fill(elsewhere, 0).unsqueeze(1);
  Tensor z = (args.weight ? at::linear(rows, *args.weight, args.bias) : rows).to(dtype), slope;
  if (args.soft_cap != 0) {
    const Tensor share = at::tanh(z / args.soft_cap);
    z = share * args.soft_cap;
    slope = at::rsub(share * share, 1);
  }
  const Tensor weights =
      args.class_weight ? args.class_weight->to(dtype) : at::ones_symint({own}, z.options());
  const double e = args.label_smoothing,
               on_each = e / (are_shared ? static_cast<double>(shared->all)
                                         : static_cast<double>(own.guard_int(__FILE__, __LINE__)));
  // Logits relative to their logsumexp, rounded, so that large ones do not cancel in the losses.
  Tensor shift = at::logsumexp(z, 1);
  if (are_shared) shift = at::logsumexp(shared->gathered(shift), 0);
  shift = at::where(at::isfinite(shift), shift, 0);
  const Tensor near = z - shift.unsqueeze(1);
  OfRows of{
      .all = at::logsumexp(near, 1),
      .target = near.gather(1, at_targets).squeeze(1).masked_fill(elsewhere, 0),
      .target_weight = weights.index_select(0, at_targets.squeeze(1)).masked_fill(elsewhere, 0),
      .weighted = e != 0 ? (near * weights).sum(1) : at::zeros_like(local, z.options()),
      .largest = {},
      .best = {}};
  if (mask[best]) std::tie(of.largest, of.best) = z.max(1);
  const Tensor own_sum = of.all, own_weight = of.target_weight;
  if (are_shared) of = joined(of, *shared);
  const Tensor all_weights =
      are_shared ? at::full({}, shared->all_weights, z.options()) : weights.sum();
  const Tensor on_target = of.target_weight * (1 - e);
  const Tensor all = of.all + shift;
  Tensor losses = on_target * (of.all - of.target) + args.z_loss * all * all;
  if (e != 0) losses = losses + on_each * (all_weights * of.all - of.weighted);
  losses = losses.masked_fill(ignored, 0);
  const Tensor total = of.target_weight.sum();
  const Tensor &weight = args.weight ? *args.weight : args.x,
               &bias = args.bias ? *args.bias : args.x;
  const auto reduced = [&] {
    if (args.reduction == "none") return losses.reshape_symint(args.targets.sym_sizes());
    return args.reduction == "sum" ? losses.sum() : losses.sum() / total;
  };
  Results<6> results{mask[y] ? reduced() : masked_out(args.x, dtype),
                     mask[denominator] ? total : masked_out(args.x, dtype),
                     masked_out(args.x, gradient_dtype(args, args.x)),
                     masked_out(weight, gradient_dtype(args, weight)),
                     masked_out(bias, gradient_dtype(args, bias)),
                     masked_out(args.targets)};
  if (mask[best]) results[best] = of.best.reshape_symint(args.targets.sym_sizes());
  if (!wants_gradients(mask)) return results;
  // `shares`: the factor of the softmax over all classes. The softmax over this rank's classes is
  // exp(of.all - own_sum) times as large.
  const Tensor shares = on_target + on_each * all_weights + (2 * args.z_loss) * all;
  const Tensor scale = are_shared ? shares * (own_sum - of.all).exp() : shares;
  Tensor of_z = at::softmax(z, 1) * scale.unsqueeze(1);
  if (e != 0) of_z = of_z - on_each * weights;
  of_z =
      of_z.scatter(1, at_targets, of_z.gather(1, at_targets) - (own_weight * (1 - e)).unsqueeze(1));
  if (slope.defined()) of_z = of_z * slope;
  if (args.factors)
    of_z = of_z * args.factors->reshape_symint({rows.sym_size(0)}).to(dtype).unsqueeze(1);
  of_z = of_z.masked_fill(ignored.unsqueeze(1), 0);
  const at::ScalarType wide = gradient_dtype(args, weight);
  const Tensor factor = args.weight ? of_z.to(weight.scalar_type()).to(wide) : of_z;
  if (mask[grad_x])
    results[grad_x] = (args.weight ? at::matmul(factor, weight.to(wide)) : factor)
                          .to(gradient_dtype(args, args.x))
                          .reshape_symint(args.x.sym_sizes());
  if (mask[grad_weight])
    results[grad_weight] = at::matmul(factor.t(), rows.to(weight.scalar_type()).to(wide));
  if (mask[grad_bias]) results[grad_bias] = of_z.sum(0).to(gradient_dtype(args, *args.bias));
  return results;
}

void LinearCrossEntropy::in_pieces(const Args& args, std::span<Tensor> results,
                                   int64_t logits_at_once) {
  if (logits_at_once == 0)  // a sum of the gradient of weight costs as much as some logits
    logits_at_once = std::max(int64_t{1} << 25, args.weight ? args.weight->numel() / 8 : 0);
  const Tensor x = args.x.reshape({args.targets.numel(), args.x.size(-1)}),
               targets = args.targets.reshape(-1);
  if (args.group_size > 1 || is_on_host(targets))  // before anything is computed
    check_all(targets, SharedClasses(args), args.ignore_index);
  const Tensor factors = args.factors ? args.factors->reshape(-1) : Tensor();
  const bool is_by_row = args.reduction == "none", is_mean = args.reduction == "mean";
  std::array<bool, 6> mask = args.output_mask;
  mask[denominator] |= mask[y] && is_mean;
  // What has a number for each row is written piece by piece; the rest is summed.
  const auto has_rows = [&](size_t result) {
    return result == grad_x || result == best || (result == y && is_by_row);
  };
  std::array<Tensor, 6> sums;
  const auto add = [&](size_t result, const Tensor& of_piece) {
    const at::ScalarType dtype = is_float64(args) ? at::kDouble : at::kFloat;
    sums[result] = sums[result].defined() ? sums[result].add_(of_piece) : of_piece.to(dtype);
  };
  const int64_t rows = targets.numel(),
                own = std::max<int64_t>(classes(args).guard_int(__FILE__, __LINE__), 1),
                at_once = std::max<int64_t>(logits_at_once / own, 1);
  for (int64_t first = 0; first == 0 || first < rows; first += at_once) {
    const int64_t count = std::min(at_once, rows - first);
    const Tensor some_x = x.narrow(0, first, count), some_targets = targets.narrow(0, first, count);
    std::optional<Tensor> some_factors;
    if (args.factors) some_factors = factors.narrow(0, first, count);
    const Results<6> of_piece = reference({.x = some_x,
                                           .weight = args.weight,
                                           .targets = some_targets,
                                           .bias = args.bias,
                                           .class_weight = args.class_weight,
                                           .factors = some_factors,
                                           .reduction = is_by_row ? "none" : "sum",
                                           .ignore_index = args.ignore_index,
                                           .label_smoothing = args.label_smoothing,
                                           .soft_cap = args.soft_cap,
                                           .z_loss = args.z_loss,
                                           .group = args.group,
                                           .group_size = args.group_size,
                                           .rank = args.rank,
                                           .output_mask = mask});
    for (size_t result = 0; result < mask.size(); ++result)
      if (mask[result] && has_rows(result))
        results[result]
            .view(result == grad_x ? x.sizes() : targets.sizes())
            .narrow(0, first, count)
            .copy_(of_piece[result]);
      else if (mask[result])
        add(result, of_piece[result]);
  }
  if (mask[y] && is_mean) sums[y].div_(sums[denominator]);
  for (size_t result = 0; result < mask.size(); ++result)
    if (args.output_mask[result] && !has_rows(result)) results[result].copy_(sums[result]);
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  using K = LinearCrossEntropy;
  const auto fits_kernels = [](const K::Args& args) {
    return Takes<kArithmetic, kArithmetic, kSeed, kArithmetic, kNumbers, kNumbers>::these(args) &&
           args.x.scalar_type() == K::logits_dtype(args);
  };
  const auto is_any = [](const K::Args&) { return true; };
  const auto in_pieces = [](const K::Args& args, std::span<Tensor> results) {
    K::in_pieces(args, results);
  };
  register_kernel_op<K>(library, {{"cpu", at::kCPU, fits_kernels, K::cpu},
                                  {"pieces", at::kCPU, is_any, in_pieces},
                                  {"pieces", at::kCUDA, is_any, in_pieces}});
}

}  // namespace tandem::kernel_ops
