#include "kernel_ops/loss/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

constexpr std::string_view kOp = "linear_cross_entropy";

void check_vector(const std::optional<Tensor>& vector, const char* name, const c10::SymInt& size,
                  const char* of) {
  TORCH_CHECK_VALUE(!vector || (vector->dim() == 1 && vector->sym_size(0) == size), kOp,
                    ": expected ", name, " of shape [", size, "], a number for each of the ", of,
                    ", got ", vector->sym_sizes(), ". Pass one of this size, or none.");
}

bool is_float64(const LinearCrossEntropy::Args& args) {
  return args.weight.scalar_type() == at::kDouble;
}

/// Gradients of the sum of losses, or of factors times losses.
bool wants_gradients(const std::array<bool, 6>& mask) {
  using K = LinearCrossEntropy;
  return mask[K::grad_x] || mask[K::grad_weight] || mask[K::grad_bias];
}

}  // namespace

Specs<6> LinearCrossEntropy::shapes(const Args& args) {
  const Tensor &x = args.x, &weight = args.weight;
  const auto& mask = args.output_mask;
  check_floating(kOp, x, "x");
  check_floating(kOp, weight, "weight");
  TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1), kOp,
                    ": expected weight of shape [classes, last dimension of x], got ",
                    weight.sym_sizes(), " for x ", x.sym_sizes(),
                    ". Pass the weight of the layer that makes logits of x.");
  const auto rows = args.targets.sym_sizes();
  TORCH_CHECK_TYPE(
      args.targets.scalar_type() == at::kLong, kOp, ": expected targets of dtype int64, got ",
      dtype_name(args.targets.scalar_type()), ". Pass the number of a class for each row.");
  TORCH_CHECK_VALUE(args.targets.sym_numel() == rows_of(x), kOp, ": expected ", rows_of(x),
                    " targets, one for each row of x ", x.sym_sizes(), ", got ", rows,
                    ". Pass the number of a class for each row.");
  TORCH_CHECK_VALUE(!args.factors || args.factors->sym_sizes() == rows, kOp,
                    ": expected factors of shape ", rows, ", got ", args.factors->sym_sizes(),
                    ". Pass one for each row, or none.");
  check_vector(args.bias, "bias", weight.sym_size(0), "rows of weight");
  check_vector(args.class_weight, "class_weight", weight.sym_size(0), "classes");
  const bool is_by_row = args.reduction == "none";
  TORCH_CHECK_VALUE(is_by_row || args.reduction == "mean" || args.reduction == "sum", kOp,
                    ": expected reduction \"mean\", \"sum\" or \"none\", got \"", args.reduction,
                    "\". Pass one of these.");
  TORCH_CHECK_VALUE(args.bias || !mask[grad_bias], kOp,
                    ": expected no gradient of a bias that there is not, got output_mask[4]. "
                    "Pass the bias.");
  const at::ScalarType statistic = is_float64(args) ? at::kDouble : at::kFloat;
  const c10::SymDimVector by_row(rows.begin(), rows.end());
  return {ResultSpec{is_by_row ? by_row : c10::SymDimVector(), statistic, mask[y]},
          ResultSpec{{}, statistic, mask[denominator]},
          like(x, x.scalar_type(), mask[grad_x]),
          like(weight, weight.scalar_type(), mask[grad_weight]),
          ResultSpec{{weight.sym_size(0)},
                     args.bias ? args.bias->scalar_type() : weight.scalar_type(),
                     mask[grad_bias]},
          ResultSpec{by_row, at::kLong, mask[best]}};
}

Results<6> LinearCrossEntropy::reference(const Args& args) {
  const auto& mask = args.output_mask;
  const at::ScalarType dtype = is_float64(args) ? at::kDouble : at::kFloat;
  const Tensor rows = args.x.reshape_symint({rows_of(args.x), args.x.sym_size(-1)}),
               targets = args.targets.reshape_symint({rows.sym_size(0)});
  const auto classes = args.weight.sym_size(0);
  const Tensor ignored = targets == args.ignore_index;
  const Tensor at_targets = targets.masked_fill(ignored, 0).unsqueeze(1);
  Tensor z = at::linear(rows, args.weight, args.bias).to(dtype), slope;
  if (args.soft_cap != 0) {
    const Tensor share = at::tanh(z / args.soft_cap);
    z = share * args.soft_cap;
    slope = at::rsub(share * share, 1);
  }
  const Tensor all = at::logsumexp(z, 1), weights = args.class_weight
                                                        ? args.class_weight->to(dtype)
                                                        : at::ones_symint({classes}, z.options());
  const double e = args.label_smoothing;
  const Tensor on_target = weights.index_select(0, at_targets.squeeze(1)) * (1 - e),
               on_each = weights * (e / classes.guard_int(__FILE__, __LINE__)),
               kept = ignored.logical_not().to(dtype);
  Tensor losses = on_target * (all - z.gather(1, at_targets).squeeze(1)) + args.z_loss * all * all;
  if (e != 0) losses = losses + on_each.sum() * all - (z * on_each).sum(1);
  losses = losses.masked_fill(ignored, 0);
  const Tensor total = (weights.index_select(0, at_targets.squeeze(1)) * kept).sum();
  const auto reduced = [&] {
    if (args.reduction == "none") return losses.reshape_symint(args.targets.sym_sizes());
    return args.reduction == "sum" ? losses.sum() : losses.sum() / total;
  };
  Results<6> results{mask[y] ? reduced() : masked_out(args.x, dtype),
                     mask[denominator] ? total : masked_out(args.x, dtype),
                     masked_out(args.x),
                     masked_out(args.weight),
                     masked_out(args.bias ? *args.bias : args.weight),
                     masked_out(args.targets)};
  if (mask[best]) results[best] = at::argmax(z, 1).reshape_symint(args.targets.sym_sizes());
  if (!wants_gradients(mask)) return results;
  Tensor of_z =
      at::softmax(z, 1) * (on_target + on_each.sum() + (2 * args.z_loss) * all).unsqueeze(1) -
      on_each;
  of_z = of_z - at::zeros_like(z).scatter(1, at_targets, on_target.unsqueeze(1));
  if (slope.defined()) of_z = of_z * slope;
  if (args.factors)
    of_z = of_z * args.factors->reshape_symint({rows.sym_size(0)}).to(dtype).unsqueeze(1);
  of_z = of_z.masked_fill(ignored.unsqueeze(1), 0);
  const Tensor factor = of_z.to(args.weight.scalar_type());
  if (mask[grad_x])
    results[grad_x] =
        at::matmul(factor, args.weight).to(args.x.scalar_type()).reshape_symint(args.x.sym_sizes());
  if (mask[grad_weight])
    results[grad_weight] = at::matmul(factor.t(), rows.to(args.weight.scalar_type()));
  if (mask[grad_bias]) results[grad_bias] = of_z.sum(0).to(args.bias->scalar_type());
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<LinearCrossEntropy>(
      library,
      {{"cpu", at::kCPU,
        [](const LinearCrossEntropy::Args& args) {
          return Takes<kArithmetic, kArithmetic, kSeed, kArithmetic, kNumbers, kNumbers>::these(
                     args) &&
                 args.x.scalar_type() == args.weight.scalar_type();
        },
        LinearCrossEntropy::cpu}});
}

}  // namespace tandem::kernel_ops
