// Sums with a bias and a residual, column sums and dropout as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// y = x + factor * bias + extra in float32 or wider, rounded once.
///
/// Shapes: x [..., cols], bias [cols], extra like x -> y like x, in `dtype`, else in the dtype to
///         which x, bias and extra promote.
struct AddBias {
  static constexpr const char* kName = "add_bias";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> bias = {};
    double factor = 1;
    std::optional<Tensor> extra = {};
    std::optional<at::ScalarType> dtype = {};
    TANDEM_ARGUMENTS(x, bias, factor, extra, dtype)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// sums[c] = sum over all rows of x[..., c], in float32, rounded once to `dtype`: the gradient of a
/// bias. If codes of x are requested, x is read once, unless one scale is computed from all of x.
///
/// Shapes: x [..., cols] -> sums [cols].
struct SumRows {
  static constexpr const char* kName = "sum_rows";
  static constexpr std::array kResults{"sums"};
  struct Args {
    const Tensor& x;
    at::ScalarType dtype;
    CodesOf<kFirstOperand> codes = {};
    TANDEM_ARGUMENTS(x, dtype, codes)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// y = factor * x, rounded once; sums[c] = sum over all rows of y[..., c], in float32, rounded once
/// to `dtype`.
///
/// Shapes: x [..., cols] -> y like x, sums [cols].
struct ScaleRows {
  static constexpr const char* kName = "scale_rows";
  enum Result : size_t { y, sums };
  static constexpr std::array kResults{"y", "sums"};
  struct Args {
    const Tensor& x;
    double factor;
    at::ScalarType dtype;
    std::array<bool, 2> output_mask{true, true};
    CodesOf<y> codes = {};
    TANDEM_ARGUMENTS(x, factor, dtype, output_mask, codes)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

/// y = dropout(x + bias) + extra in float32 or wider, rounded once. dropout(x) = x / (1 - p) for
/// kept elements and 0 for others. Philox4x32-10, keyed by `seed` and counted by the linear index,
/// decides which elements are kept: one seed gives one mask on every device and thread count. The
/// gradient of dropout is dropout of grad_y with the seed of forward.
///
/// Shapes: x [..., cols], bias [cols], seed int64 with one element, extra like x -> y like x, in
///         the promoted dtype. 0 <= p <= 1; p = 1 keeps nothing.
struct Dropout {
  static constexpr const char* kName = "dropout";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> bias = {};
    const Tensor& seed;
    double p;
    std::optional<Tensor> extra = {};
    TANDEM_ARGUMENTS(x, bias, seed, p, extra)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};

/// grad_x = dropout(grad_y), with the seed of forward; grad_bias = sum over rows of grad_x, in
/// float32, rounded once to `dtype`.
///
/// Shapes: grad_y [..., cols], seed int64 with one element -> grad_x like grad_y, grad_bias [cols].
struct DropoutBackward {
  static constexpr const char* kName = "dropout_backward";
  enum Result : size_t { grad_x, grad_bias };
  static constexpr std::array kResults{"grad_x", "grad_bias"};
  struct Args {
    const Tensor& grad_y;
    const Tensor& seed;
    double p;
    at::ScalarType dtype;
    std::array<bool, 2> output_mask{true, true};
    CodesOf<grad_x> codes = {};
    TANDEM_ARGUMENTS(grad_y, seed, p, dtype, output_mask, codes)
  };
  static Specs<2> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<2> reference(const Args& args);
};

/// y = x, as a value that depends on `gradient`. Backward recomputes from y, so that no compiler
/// merges the recomputation with forward's computation from x.
///
/// Shapes: x any, gradient any -> y like x.
struct Behind {
  static constexpr const char* kName = "behind";
  static constexpr std::array kResults{"y"};
  struct Args {
    const Tensor& x;
    const Tensor& gradient;
    TANDEM_ARGUMENTS(x, gradient)
  };
  static Specs<1> shapes(const Args& args);
  static Results<1> reference(const Args& args);
};

}  // namespace tandem::kernel_ops
