// RMSNorm of each head of queries and keys.
#pragma once

#include "kernel_ops/attention/heads.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// y = head / sqrt(mean(head^2) + eps) * gamma for each head of queries and keys; values are
/// copied. gamma is query_weight for queries and key_weight for keys, plus 1 if
/// zero_centered_gamma. If `rounds_before_weight`, the factor of gamma is rounded to the dtype of
/// x.
///
/// Shapes:  x as Heads says, with the head_dim of the weights; query_weight, key_weight [head_dim]
///          -> y like x.
/// Dtypes:  any floating dtype for each; arithmetic in float32, float64 if x is float64, rounded
///          once; y as x.
/// Error:   at most 8 float32 ULP from float64 (test QkNorm), then the one rounding.
/// Throws:  c10::ValueError for other shapes, c10::TypeError for other dtypes.
/// Source:  Henry et al. 2020, arXiv:2010.04245, with the norm of Zhang and Sennrich 2019,
///          arXiv:1910.07467.
struct QkNormForward {
  static constexpr const char* kName = "qk_norm_forward";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    const Tensor& query_weight;
    const Tensor& key_weight;
    int64_t num_heads, num_kv_heads;
    double eps;
    bool zero_centered_gamma, rounds_before_weight;
    TANDEM_ARGUMENTS(x, query_weight, key_weight, num_heads, num_kv_heads, eps, zero_centered_gamma,
                     rounds_before_weight)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// The gradient of QkNormForward. With inv_rms = 1 / sqrt(mean(head^2) + eps) recomputed, x_hat =
/// head inv_rms and g = grad_y gamma,
///   grad_x = inv_rms (g - x_hat mean(g x_hat)) of heads of queries and keys, grad_y of values,
///   grad_query_weight, grad_key_weight = sums over rows and heads of grad_y x_hat, where x_hat is
///   rounded if forward rounds it.
///
/// Shapes:  grad_y, grad_x like x; gradients of weights like these.
/// Dtypes:  each gradient as its operand; sums in float32, float64 if x is float64.
struct QkNormBackward {
  static constexpr const char* kName = "qk_norm_backward";
  enum Result : size_t { grad_x, grad_query_weight, grad_key_weight };
  static constexpr std::array kResults{"grad_x", "grad_query_weight", "grad_key_weight"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& query_weight;
    const Tensor& key_weight;
    int64_t num_heads, num_kv_heads;
    double eps;
    bool zero_centered_gamma, rounds_before_weight;
    std::array<bool, 3> output_mask;
    TANDEM_ARGUMENTS(grad_y, x, query_weight, key_weight, num_heads, num_kv_heads, eps,
                     zero_centered_gamma, rounds_before_weight, output_mask)
  };
  static Specs<3> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<3> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
