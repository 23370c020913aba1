// Attention over heads that lie side by side in the last dimension.
#pragma once

#include "kernel_ops/attention/heads.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// For each query q with its keys k and values v, scores = scale q k^T; if soft_cap is not 0, they
/// become soft_cap tanh(scores / soft_cap). They are -infinity where a boolean mask is false and,
/// if is_causal, at keys after the query; a mask of numbers is added. Then
///   logsumexp = log(sum over keys of exp(scores))
///   y = sum over keys of exp(scores - logsumexp) v
/// and y = 0 if all scores are -infinity. A scale of 0 means 1 / sqrt(head_dim).
///
/// Shapes:  x [..., sequence, features] as Heads says; mask broadcasts to [..., num_heads,
///          sequence, sequence]; y [..., sequence, num_heads head_dim], logsumexp [..., sequence,
///          num_heads].
/// Dtypes:  y as x; mask of booleans or of any floating dtype; logsumexp, scores and their sums in
///          float32, float64 if x is float64.
/// Memory:  flash attention holds blocks of scores; the reference holds all scores.
/// Throws:  c10::ValueError for other shapes, c10::TypeError for other dtypes.
/// Source:  Vaswani et al. 2017, arXiv:1706.03762; heads that share keys: Ainslie et al. 2023,
///          arXiv:2305.13245; soft cap: Gemma Team 2024, arXiv:2408.00118.
struct AttentionForward {
  static constexpr const char* kName = "attention_forward";
  enum Result : size_t { y, logsumexp };
  static constexpr std::array kResults{"y", "logsumexp"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> mask = {};
    int64_t num_heads, num_kv_heads, head_dim;
    bool is_causal;
    double scale, soft_cap;
    TANDEM_ARGUMENTS(x, mask, num_heads, num_kv_heads, head_dim, is_causal, scale, soft_cap)
  };
  static Specs<2> shapes(const Args& args);
  static void flash(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

/// The gradients of x and of a mask of numbers. `y` and `logsumexp` are the results of forward.
struct AttentionBackward {
  static constexpr const char* kName = "attention_backward";
  enum Result : size_t { grad_x, grad_mask };
  static constexpr std::array kResults{"grad_x", "grad_mask"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& y;
    const Tensor& logsumexp;
    std::optional<Tensor> mask = {};
    int64_t num_heads, num_kv_heads, head_dim;
    bool is_causal;
    double scale, soft_cap;
    std::array<bool, 2> output_mask;
    TANDEM_ARGUMENTS(grad_y, x, y, logsumexp, mask, num_heads, num_kv_heads, head_dim, is_causal,
                     scale, soft_cap, output_mask)
  };
  static Specs<2> shapes(const Args& args);
  static void flash(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
