// Attention by torch's flash attention, which reads the heads in place from x.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "kernel_ops/attention/attention.h"
#include "kernel_ops/framework/shapes.h"

namespace tandem::kernel_ops {

namespace {

/// A tensor viewed as [batch, heads, sequence, head_dim], contiguous within a head.
Tensor heads_in(const Tensor& tensor, int64_t head_dim) {
  const int64_t length = tensor.size(-2), all = tensor.size(-1);
  const Tensor rows = tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  return rows.reshape({tensor.numel() / (length * all), length, all / head_dim, head_dim})
      .transpose(1, 2);
}

/// Views of queries, keys and values.
template <typename Args>
std::array<Tensor, 3> parts_in(const Tensor& x, const Args& args) {
  const Tensor all = heads_in(x, args.head_dim);
  return {all.narrow(1, 0, args.num_heads), all.narrow(1, args.num_heads, args.num_kv_heads),
          all.narrow(1, args.num_heads + args.num_kv_heads, args.num_kv_heads)};
}

/// The mask as numbers to add, with four dimensions, in the dtype of x or of the scores.
template <typename Args>
std::optional<Tensor> added_mask(const Args& args) {
  if (!args.mask) return std::nullopt;
  Tensor mask =
      args.mask->scalar_type() == at::kBool
          ? at::zeros(args.mask->sizes(), args.x.options())
                .masked_fill(args.mask->logical_not(), -std::numeric_limits<double>::infinity())
          : args.mask->to(args.mask->scalar_type() == args.x.scalar_type()
                              ? args.x.scalar_type()
                              : statistics(args.x.scalar_type()));
  while (mask.dim() < 4) mask = mask.unsqueeze(0);
  if (args.x.dim() <= 3) return mask;
  // Several batch dimensions become one.
  c10::DimVector sizes(args.x.sizes().begin(), args.x.sizes().end());
  const int64_t length = args.x.size(-2);
  sizes.pop_back();
  sizes.back() = mask.size(-3);
  sizes.append({length, length});
  return mask.expand(sizes).reshape({-1, mask.size(-3), length, length});
}

template <typename Args>
std::optional<double> given_scale(const Args& args) {
  return args.scale != 0 ? std::optional(args.scale) : std::nullopt;
}

}  // namespace

void AttentionForward::flash(const Args& args, std::span<Tensor> results) {
  if (args.x.numel() == 0) return;
  const auto [query, key, value] = parts_in(args.x, args);
  const auto [attended, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, /*dropout_p=*/0.0, args.is_causal, added_mask(args), given_scale(args));
  heads_in(results[y], args.head_dim).copy_(attended);
  heads_in(results[logsumexp], 1).squeeze(-1).copy_(sums);
}

void AttentionBackward::flash(const Args& args, std::span<Tensor> results) {
  if (args.x.numel() == 0 || !results[grad_x].defined()) return;
  const auto [query, key, value] = parts_in(args.x, args);
  const auto gradients = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      heads_in(args.grad_y, args.head_dim), query, key, value, heads_in(args.y, args.head_dim),
      heads_in(args.logsumexp, 1).squeeze(-1), /*dropout_p=*/0.0, args.is_causal, added_mask(args),
      given_scale(args));
  const auto [of_query, of_key, of_value] = parts_in(results[grad_x], args);
  of_query.copy_(std::get<0>(gradients));
  of_key.copy_(std::get<1>(gradients));
  of_value.copy_(std::get<2>(gradients));
}

}  // namespace tandem::kernel_ops
