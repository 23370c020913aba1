#include "kernel_ops/attention/qk_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rsqrt.h>

#include "kernel_ops/framework/checks.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/register.h"
#include "kernel_ops/framework/shapes.h"
#include "kernels/qk_norm.h"

namespace tandem::kernel_ops {

namespace {

/// The heads of x, whose head_dim is the length of a weight.
template <typename Args>
Heads heads_of_weights(const Args& args) {
  return {args.num_heads, args.num_kv_heads,
          args.query_weight.sym_size(0).guard_int(__FILE__, __LINE__)};
}

template <typename Args>
void check_qk_norm(std::string_view op, const Args& args) {
  const auto &query = args.query_weight, &key = args.key_weight;
  check_floating(op, query, "query_weight");
  check_floating(op, key, "key_weight");
  TORCH_CHECK_VALUE(query.dim() == 1 && query.sym_sizes() == key.sym_sizes(), op,
                    ": expected query_weight and key_weight of shape [head_dim], got ",
                    query.sym_sizes(), " and ", key.sym_sizes(),
                    ". Pass a factor for each feature of a head.");
  check_heads(op, args.x, heads_of_weights(args));
}

/// The queries and keys as rows [..., heads, head_dim], in `dtype`.
Tensor normed_part(const Tensor& x, const Heads& heads, at::ScalarType dtype) {
  return x.reshape_symint(with_last(x, {heads.all(), heads.head_dim}))
      .narrow(-2, 0, heads.num_heads + heads.num_kv_heads)
      .to(dtype);
}
/// The tensor `like` with its queries and keys replaced by `part`.
Tensor with_values(const Tensor& part, const Tensor& like, const Heads& heads) {
  const int64_t count = heads.num_heads + heads.num_kv_heads;
  return at::cat({part.flatten(-2).to(like.scalar_type()),
                  like.narrow(-1, count * heads.head_dim, heads.num_kv_heads * heads.head_dim)},
                 -1);
}

/// The gamma of each head of queries and keys, [heads, head_dim].
template <typename Args>
Tensor gammas_of(const Args& args, at::ScalarType dtype) {
  const Heads heads = heads_of_weights(args);
  const Tensor all = at::cat({args.query_weight.to(dtype).expand({heads.num_heads, -1}),
                              args.key_weight.to(dtype).expand({heads.num_kv_heads, -1})});
  return args.zero_centered_gamma ? all + 1 : all;
}

Tensor inv_rms_of(const Tensor& part, double eps) {
  return at::rsqrt((part * part).mean(-1, /*keepdim=*/true) + eps);
}

/// x_hat as it is multiplied by gamma: rounded to the dtype of x if `rounds_before_weight`.
template <typename Args>
Tensor rounded(const Tensor& x_hat, const Args& args) {
  return args.rounds_before_weight ? x_hat.to(args.x.scalar_type()).to(x_hat.scalar_type()) : x_hat;
}

template <typename Args>
kernels::cpu::QkNorm kernel_arguments(const Args& args, const RowsIn& x, const VectorIn& query,
                                      const VectorIn& key) {
  return {.x = x,
          .query_weight = query,
          .key_weight = key,
          .num_heads = static_cast<size_t>(args.num_heads),
          .num_kv_heads = static_cast<size_t>(args.num_kv_heads),
          .options = {.eps = args.eps,
                      .zero_centered_gamma = args.zero_centered_gamma,
                      .rounds_before_weight = args.rounds_before_weight}};
}

/// Sums over rows and over `count` heads that begin at `first`, with the shape and dtype of
/// `weight`.
Tensor sums_of_heads(const Tensor& part, int64_t first, int64_t count, const Tensor& weight) {
  const Tensor rows = part.narrow(-2, first, count).flatten(0, -2);
  return rows.sum(0).to(weight.scalar_type());
}

}  // namespace

Specs<1> QkNormForward::shapes(const Args& args) {
  check_qk_norm("qk_norm", args);
  return {like(args.x)};
}

void QkNormForward::cpu(const Args& args, std::span<Tensor> results) {
  const RowsIn x(args.x);
  const VectorIn query(args.query_weight), key(args.key_weight);
  kernels::cpu::qk_norm_forward(kernel_arguments(args, x, query, key), rows_out(results[0]));
}

Results<1> QkNormForward::reference(const Args& args) {
  const at::ScalarType dtype = statistics(args.x.scalar_type());
  const Heads heads = heads_of_weights(args);
  const Tensor part = normed_part(args.x, heads, dtype);
  const Tensor x_hat = rounded(part * inv_rms_of(part, args.eps), args);
  return {with_values(x_hat * gammas_of(args, dtype), args.x, heads)};
}

Specs<3> QkNormBackward::shapes(const Args& args) {
  check_qk_norm("qk_norm_backward", args);
  check_same_shape("qk_norm_backward", args.grad_y, "grad_y", args.x, "x");
  const auto spec = [&](const Tensor& of, Result result) {
    return like(of, of.scalar_type(), args.output_mask[result]);
  };
  return {spec(args.x, grad_x), spec(args.query_weight, grad_query_weight),
          spec(args.key_weight, grad_key_weight)};
}

void QkNormBackward::cpu(const Args& args, std::span<Tensor> results) {
  const RowsIn grad_y(args.grad_y), x(args.x);
  const VectorIn query(args.query_weight), key(args.key_weight);
  kernels::cpu::qk_norm_backward(kernel_arguments(args, x, query, key), grad_y,
                                 rows_out(results[grad_x]), vector_out(results[grad_query_weight]),
                                 vector_out(results[grad_key_weight]));
}

Results<3> QkNormBackward::reference(const Args& args) {
  const Tensor& x = args.x;
  const at::ScalarType dtype = statistics(x.scalar_type());
  const Heads heads = heads_of_weights(args);
  const Tensor part = normed_part(x, heads, dtype), grad = normed_part(args.grad_y, heads, dtype),
               inv_rms = inv_rms_of(part, args.eps), x_hat = part * inv_rms,
               g = grad * gammas_of(args, dtype), of_gamma = grad * rounded(x_hat, args);
  Results<3> results{masked_out(x), masked_out(args.query_weight), masked_out(args.key_weight)};
  if (args.output_mask[grad_x])
    results[grad_x] = with_values(inv_rms * (g - x_hat * (g * x_hat).mean(-1, /*keepdim=*/true)),
                                  args.grad_y.to(x.scalar_type()), heads);
  if (args.output_mask[grad_query_weight])
    results[grad_query_weight] = sums_of_heads(of_gamma, 0, heads.num_heads, args.query_weight);
  if (args.output_mask[grad_key_weight])
    results[grad_key_weight] =
        sums_of_heads(of_gamma, heads.num_heads, heads.num_kv_heads, args.key_weight);
  return results;
}

TORCH_LIBRARY_FRAGMENT(tandem, library) {
  register_kernel_op<QkNormForward>(
      library,
      {{"cpu", at::kCPU, Takes<kArithmetic, kArithmetic, kArithmetic>::these, QkNormForward::cpu}});
  register_kernel_op<QkNormBackward>(
      library, {{"cpu", at::kCPU,
                 [](const QkNormBackward::Args& args) {
                   return args.grad_y.scalar_type() == args.x.scalar_type() &&
                          Takes<kArithmetic, kArithmetic, kArithmetic, kArithmetic>::these(args);
                 },
                 QkNormBackward::cpu}});
}

}  // namespace tandem::kernel_ops
