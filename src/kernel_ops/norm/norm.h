// RMSNorm, LayerNorm and L2 normalization as kernel ops. y has the dtype of weight; statistics are
// float32 (float64 if weight is float64).
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// sum = x + extra, rounded as a sum by itself; x if there is no extra. Over the last dimensions of
/// sum, as many as weight has,
///   y = (sum - mean) * inv_norm * gamma + bias, inv_norm = 1 / sqrt(variance(sum) + eps)
/// if there is a bias (LayerNorm), else (RMSNorm)
///   y = sum * inv_norm * gamma, inv_norm = 1 / sqrt(mean(sum^2) + eps);
/// gamma = weight or 1 + weight. If `rounds_before_weight`, sum * inv_norm is rounded to the dtype
/// of sum.
///
/// Shapes:  x, extra [..., *hidden], weight, bias [*hidden] -> sum, y like x; mean (LayerNorm
///          only), inv_norm [rows].
/// Dtypes:  sum as x + extra promotes; sum is written only if there is an extra.
/// Error:   at most 8 float32 ULP from float64 (test NormOp), then one rounding to y's dtype.
/// Throws:  c10::ValueError if weight or bias is not [*hidden], if extra is not like x, or if a
///          LayerNorm is to round before its weight.
struct NormForward {
  static constexpr const char* kName = "norm_forward";
  enum Result : size_t { sum, y, mean, inv_norm };
  static constexpr std::array kResults{"sum", "y", "mean", "inv_norm"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> extra = {};
    const Tensor& weight;
    std::optional<Tensor> bias = {};
    double eps;
    bool zero_centered_gamma;
    bool rounds_before_weight = false;
    std::array<bool, 2> output_mask{false, true};
    CodesOf<y> codes = {};
    TANDEM_ARGUMENTS(x, extra, weight, bias, eps, zero_centered_gamma, rounds_before_weight,
                     output_mask, codes)
  };
  static Specs<4> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<4> reference(const Args& args);
};

/// The gradient of NormForward without its sum: of LayerNorm if there is a mean, else of RMSNorm,
/// which has no grad_bias. grad_x includes grad_residual, the gradient of the residual stream, and
/// is rounded once. y is as forward wrote it; `bias` is read only for y. sums = sums over rows of
/// grad_x. Rounding before the weight has the gradient 1: grad_x is as if forward had not rounded,
/// and grad_weight = sum over rows of grad_y times the rounded factor of the weight.
///
/// Shapes:  sums [last dimension of x].
/// Dtypes:  sums of `sums_dtype`.
struct NormBackward {
  static constexpr const char* kName = "norm_backward";
  enum Result : size_t { grad_x, grad_weight, y, sums, grad_bias };
  static constexpr std::array kResults{"grad_x", "grad_weight", "y", "sums", "grad_bias"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& weight;
    std::optional<Tensor> bias = {};
    std::optional<Tensor> mean = {};
    const Tensor& inv_norm;
    std::optional<Tensor> grad_residual = {};
    bool zero_centered_gamma;
    bool rounds_before_weight = false;
    at::ScalarType sums_dtype = at::kFloat;
    std::array<bool, 5> output_mask;
    CodesOf<grad_x> codes = {};
    CodesOf<y> y_codes = {};
    TANDEM_ARGUMENTS(grad_y, x, weight, bias, mean, inv_norm, grad_residual, zero_centered_gamma,
                     rounds_before_weight, sums_dtype, output_mask, codes, y_codes)
  };
  static Specs<5> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<5> reference(const Args& args);
};

/// y = x * inv_norm, inv_norm = 1 / sqrt(sum(x^2) + eps) over the last dimension.
///
/// Shapes:  x [..., hidden] -> y like x, inv_norm [rows].
/// Dtypes:  y as x; inv_norm float32, float64 if x is float64.
/// Error:   as NormForward (test NormOp).
struct L2NormForward {
  static constexpr const char* kName = "l2_norm_forward";
  static constexpr std::array kResults{"y", "inv_norm"};
  struct Args {
    const Tensor& x;
    double eps;
    TANDEM_ARGUMENTS(x, eps)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

/// The gradient of L2NormForward. y is as forward wrote it.
struct L2NormBackward {
  static constexpr const char* kName = "l2_norm_backward";
  static constexpr std::array kResults{"grad_x", "y"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& x;
    const Tensor& inv_norm;
    std::array<bool, 2> output_mask;
    TANDEM_ARGUMENTS(grad_y, x, inv_norm, output_mask)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
