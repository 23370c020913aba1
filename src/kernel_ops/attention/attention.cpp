#include "kernel_ops/attention/attention.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>

#include <cmath>
#include <limits>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

template <typename Args>
Heads heads_of(const Args& args) {
  return {args.num_heads, args.num_kv_heads, args.head_dim};
}

/// The sizes to which a mask broadcasts: [..., num_heads, sequence, sequence].
c10::SymDimVector sizes_of_scores(const Tensor& x, const Heads& heads) {
  c10::SymDimVector sizes = sizes_of(x);
  const c10::SymInt length = x.sym_size(-2);
  sizes.pop_back();
  sizes.back() = heads.num_heads;
  sizes.append({length, length});
  return sizes;
}

template <typename Args>
void check_attention(std::string_view op, const Args& args) {
  const Tensor& x = args.x;
  check_heads(op, x, heads_of(args));
  TORCH_CHECK_VALUE(args.scale >= 0 && args.soft_cap >= 0, op,
                    ": expected scale and soft_cap of at least 0, got ", args.scale, " and ",
                    args.soft_cap, ". 0 is the usual scale, and no cap.");
  if (!args.mask) return;
  const Tensor& mask = *args.mask;
  const c10::SymDimVector scores = sizes_of_scores(x, heads_of(args));
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || mask.is_floating_point(), op,
                   ": expected a mask of booleans, or of floating-point numbers that are added to "
                   "the scores, got ",
                   dtype_name(mask.scalar_type()), ". Pass mask.bool(), where true keeps a score.");
  TORCH_CHECK_VALUE(at::is_expandable_to(mask.sym_sizes(), c10::SymIntArrayRef(scores)), op,
                    ": expected a mask that broadcasts to [..., num_heads, sequence, sequence] = ",
                    c10::SymIntArrayRef(scores), ", got ", mask.sym_sizes(),
                    ". Reshape it: a mask of keys alone is [batch, 1, 1, sequence].");
}

/// The parts of x in the dtype of scores: queries [batch, num_kv_heads, per_key, sequence,
/// head_dim], keys and values [batch, num_kv_heads, 1, sequence, head_dim].
struct Parts {
  Parts(const Tensor& x, const Heads& heads) {
    const auto& [num_heads, num_kv_heads, head_dim] = heads;
    const Tensor all = x.to(statistics(x.scalar_type()))
                           .reshape_symint({rows_of(x, 2), x.sym_size(-2), heads.all(), head_dim})
                           .transpose(1, 2);
    const int64_t per_key = heads.per_key();
    query = all.narrow(1, 0, num_heads).unflatten(1, {num_kv_heads, per_key});
    key = all.narrow(1, num_heads, num_kv_heads).unsqueeze(2);
    value = all.narrow(1, num_heads + num_kv_heads, num_kv_heads).unsqueeze(2);
  }
  Tensor query, key, value;
};

/// Heads that lie side by side as [batch, num_kv_heads, per_key, sequence, head_dim], and back.
Tensor by_head(const Tensor& y, const Heads& heads, at::ScalarType dtype) {
  return y.to(dtype)
      .reshape_symint({rows_of(y, 2), y.sym_size(-2), heads.num_kv_heads, heads.per_key(),
                       y.sym_size(-1) / heads.num_heads})
      .permute({0, 2, 3, 1, 4});
}
Tensor side_by_side(const Tensor& y) { return y.permute({0, 3, 1, 2, 4}).flatten(2); }

struct Scores {
  Tensor masked;
  /// Rows in which every score is -infinity.
  Tensor is_empty() const { return (masked == kNever).all(-1, /*keepdim=*/true); }
  /// The softmax of the scores. It is computed from the scores and not from the logsumexp, which
  /// has lost the number of keys if a mask adds -1e6 to all of them.
  Tensor shares() const {
    const Tensor none = is_empty();  // zeros in such a row avoid NaN
    return at::softmax(masked.masked_fill(none, 0), -1).masked_fill(none, 0);
  }
  /// The derivative of the soft cap; undefined without a cap.
  Tensor slope;
};

template <typename Args>
double scale_of(const Args& args) {
  return args.scale != 0 ? args.scale : 1 / std::sqrt(static_cast<double>(args.head_dim));
}

/// The scores [batch, num_kv_heads, per_key, sequence, sequence].
template <typename Args>
Scores scores_of(const Args& args, const Parts& parts) {
  const Heads heads = heads_of(args);
  Tensor scores = at::matmul(parts.query * scale_of(args), parts.key.transpose(-1, -2)), slope;
  if (args.soft_cap != 0) {
    const Tensor share = at::tanh(scores / args.soft_cap);
    scores = share * args.soft_cap;
    slope = at::rsub(share * share, 1);
  }
  if (args.is_causal) {
    const c10::SymInt length = args.x.sym_size(-2);
    const Tensor seen =
        scores.new_ones_symint({length, length}, scores.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(seen.logical_not(), kNever);
  }
  if (args.mask) {
    const Tensor mask =
        args.mask->expand_symint(sizes_of_scores(args.x, heads)).reshape_symint(scores.sym_sizes());
    scores = mask.scalar_type() == at::kBool ? scores.masked_fill(mask.logical_not(), kNever)
                                             : scores + mask.to(scores.scalar_type());
  }
  return {scores, slope};
}

}  // namespace

Specs<2> AttentionForward::shapes(const Args& args) {
  check_attention("attention", args);
  const Tensor& x = args.x;
  return {ResultSpec{with_last(x, {args.num_heads * args.head_dim}), x.scalar_type()},
          ResultSpec{with_last(x, {args.num_heads}), statistics(x.scalar_type())}};
}

Results<2> AttentionForward::reference(const Args& args) {
  const Tensor& x = args.x;
  const Parts parts(x, heads_of(args));
  const Scores scores = scores_of(args, parts);
  const Tensor none = scores.is_empty();
  const Tensor sums = at::logsumexp(scores.masked.masked_fill(none, 0), -1, /*keepdim=*/true);
  return {
      side_by_side(at::matmul(scores.shares(), parts.value))
          .reshape_symint(with_last(x, {args.num_heads * args.head_dim}))
          .to(x.scalar_type()),
      side_by_side(sums.masked_fill(none, kNever)).reshape_symint(with_last(x, {args.num_heads}))};
}

Specs<2> AttentionBackward::shapes(const Args& args) {
  check_attention("attention_backward", args);
  const Tensor &x = args.x, &mask = args.mask ? *args.mask : x;
  check_same_shape("attention_backward", args.grad_y, "grad_y", args.y, "y");
  const c10::SymDimVector of_y = with_last(x, {args.num_heads * args.head_dim});
  TORCH_CHECK_VALUE(args.y.sym_sizes() == c10::SymIntArrayRef(of_y),
                    "attention_backward: ", "expected y of shape ", c10::SymIntArrayRef(of_y),
                    ", got ", args.y.sym_sizes(), ". Pass what the forward op returned.");
  TORCH_CHECK_VALUE(args.logsumexp.sym_numel() == rows_of(x) * args.num_heads,
                    "attention_backward: expected logsumexp of shape ",
                    c10::SymIntArrayRef(with_last(x, {args.num_heads})), ", got ",
                    args.logsumexp.sym_sizes(), ". Pass what the forward op returned.");
  TORCH_CHECK_VALUE(!args.output_mask[grad_mask] || (args.mask && mask.is_floating_point()),
                    "attention_backward: expected a mask of numbers where its gradient is wanted, "
                    "got ",
                    args.mask ? "booleans" : "none", ". Pass it, or ask for no gradient.");
  return {like(x, x.scalar_type(), args.output_mask[grad_x]),
          like(mask, mask.scalar_type(), args.output_mask[grad_mask])};
}

Results<2> AttentionBackward::reference(const Args& args) {
  const Tensor& x = args.x;
  const Heads heads = heads_of(args);
  const Parts parts(x, heads);
  const Scores scores = scores_of(args, parts);
  const at::ScalarType dtype = parts.query.scalar_type();
  const Tensor grad = by_head(args.grad_y, heads, dtype), y = by_head(args.y, heads, dtype),
               shares = scores.shares();
  const Tensor of_masked = shares * (at::matmul(grad, parts.value.transpose(-1, -2)) -
                                     (grad * y).sum(-1, /*keepdim=*/true));
  Results<2> results{masked_out(x), masked_out(args.mask ? *args.mask : x)};
  if (args.output_mask[grad_mask])
    results[grad_mask] = of_masked.reshape_symint(sizes_of_scores(x, heads))
                             .sum_to_size_symint(args.mask->sym_sizes())
                             .to(args.mask->scalar_type());
  if (!args.output_mask[grad_x]) return results;
  const Tensor of_scores =
      (scores.slope.defined() ? of_masked * scores.slope : of_masked) * scale_of(args);
  const auto of_key = [](const Tensor& of_rows, const Tensor& rows) {
    return side_by_side(at::matmul(of_rows.transpose(-1, -2), rows).sum(2, /*keepdim=*/true));
  };
  results[grad_x] = at::cat({side_by_side(at::matmul(of_scores, parts.key)),
                             of_key(of_scores, parts.query), of_key(shares, grad)},
                            -1)
                        .reshape_symint(x.sym_sizes())
                        .to(x.scalar_type());
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<AttentionForward>(library, {{"flash", at::kCPU,
                                                  [](const AttentionForward::Args& args) {
                                                    return kNumbers.has(args.x.scalar_type()) &&
                                                           args.soft_cap == 0;
                                                  },
                                                  AttentionForward::flash}});
  register_kernel_op<AttentionBackward>(
      library, {{"flash", at::kCPU,
                 [](const AttentionBackward::Args& args) {
                   const at::ScalarType dtype = args.x.scalar_type();
                   return kNumbers.has(dtype) && args.grad_y.scalar_type() == dtype &&
                          args.y.scalar_type() == dtype && args.soft_cap == 0 &&
                          !args.output_mask[AttentionBackward::grad_mask];
                 },
                 AttentionBackward::flash}});
}

}  // namespace tandem::kernel_ops
