// Sums with a bias and a residual, column sums and dropout as kernel ops.
#pragma once

#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// y = x + bias (+ extra, added to the sum as rounded to the dtype of x + bias).
///
/// Shapes: x [..., cols], bias [cols], extra like x -> y like x, in the promoted dtype.
struct AddBias {
  static constexpr const char* kName = "add_bias";
  static constexpr const char* kQualifiedName = "tandem::add_bias";
  static constexpr const char* kSchema =
      "add_bias(Tensor x, Tensor? bias, Tensor? extra) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& extra);
  static void cpu(const Tensor& x, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& extra, Results<1>& results);
  static Results<1> reference(const Tensor& x, const std::optional<Tensor>& bias,
                              const std::optional<Tensor>& extra);
};

/// y = x + factor * bias (+ extra, added to the sum as rounded to the dtype of x): factor * bias is
/// not rounded to the dtype of x by itself.
///
/// Shapes: as AddBias; x and bias of one dtype.
struct AddScaledBias {
  static constexpr const char* kName = "add_scaled_bias";
  static constexpr const char* kQualifiedName = "tandem::add_scaled_bias";
  static constexpr const char* kSchema =
      "add_scaled_bias(Tensor x, Tensor bias, float factor, Tensor? extra) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const Tensor& bias, double factor,
                         const std::optional<Tensor>& extra);
  static void cpu(const Tensor& x, const Tensor& bias, double factor,
                  const std::optional<Tensor>& extra, Results<1>& results);
  static Results<1> reference(const Tensor& x, const Tensor& bias, double factor,
                              const std::optional<Tensor>& extra);
};

/// sums[c] = sum over all rows of x[..., c], in float32, rounded once to `dtype`: the gradient of a
/// bias.
struct SumRows {
  static constexpr const char* kName = "sum_rows";
  static constexpr const char* kQualifiedName = "tandem::sum_rows";
  static constexpr const char* kSchema = "sum_rows(Tensor x, ScalarType dtype) -> Tensor";
  static Specs<1> shapes(const Tensor& x, at::ScalarType dtype);
  static void cpu(const Tensor& x, at::ScalarType dtype, Results<1>& results);
  static Results<1> reference(const Tensor& x, at::ScalarType dtype);
};

/// y = keep ? x / (1 - p) : 0; keep from Philox4x32-10 keyed by `seed`, counted by the linear
/// index: one seed, one mask, on every device and thread count. The gradient is the same op on
/// grad_y with the same seed.
///
/// Shapes: x any, seed int64 with one element -> y like x. 0 <= p <= 1; p = 1 gives zeros.
struct Dropout {
  static constexpr const char* kName = "dropout";
  static constexpr const char* kQualifiedName = "tandem::dropout";
  static constexpr const char* kSchema = "dropout(Tensor x, Tensor seed, float p) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const Tensor& seed, double p);
  static void cpu(const Tensor& x, const Tensor& seed, double p, Results<1>& results);
  static Results<1> reference(const Tensor& x, const Tensor& seed, double p);
};

/// y = dropout(x + bias) + extra, each of the three rounded as the ops by themselves round.
///
/// Shapes: x [..., cols], bias [cols], seed int64 with one element, extra like x -> y like x, in
///         the promoted dtype.
struct DropoutAdd {
  static constexpr const char* kName = "dropout_add";
  static constexpr const char* kQualifiedName = "tandem::dropout_add";
  static constexpr const char* kSchema =
      "dropout_add(Tensor x, Tensor? bias, Tensor seed, float p, Tensor? extra) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& seed,
                         double p, const std::optional<Tensor>& extra);
  static void cpu(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& seed, double p,
                  const std::optional<Tensor>& extra, Results<1>& results);
  static Results<1> reference(const Tensor& x, const std::optional<Tensor>& bias,
                              const Tensor& seed, double p, const std::optional<Tensor>& extra);
};

/// grad_x = dropout(grad_y), with the seed of forward; grad_bias = sum over rows of grad_x, in
/// float32, rounded once to `dtype`.
///
/// Shapes:      grad_y [..., cols], seed int64 with one element -> grad_x like grad_y, grad_bias
///              [cols].
/// output_mask: grad_x, grad_bias.
struct DropoutBackwardBias {
  static constexpr const char* kName = "dropout_backward_bias";
  static constexpr const char* kQualifiedName = "tandem::dropout_backward_bias";
  static constexpr const char* kSchema =
      "dropout_backward_bias(Tensor grad_y, Tensor seed, float p, ScalarType dtype, bool[2] "
      "output_mask) -> (Tensor grad_x, Tensor grad_bias)";
  static Specs<2> shapes(const Tensor& grad_y, const Tensor& seed, double p, at::ScalarType dtype,
                         std::array<bool, 2> output_mask);
  static void cpu(const Tensor& grad_y, const Tensor& seed, double p, at::ScalarType dtype,
                  std::array<bool, 2> output_mask, Results<2>& results);
  static Results<2> reference(const Tensor& grad_y, const Tensor& seed, double p,
                              at::ScalarType dtype, std::array<bool, 2> output_mask);
};

/// y = x, as numbers that are there no earlier than `gradient`: what backward computes again from
/// them, no compiler takes for what forward has computed from x.
///
/// Shapes: x any, gradient any -> y like x.
struct Behind {
  static constexpr const char* kName = "behind";
  static constexpr const char* kQualifiedName = "tandem::behind";
  static constexpr const char* kSchema = "behind(Tensor x, Tensor gradient) -> Tensor";
  static Specs<1> shapes(const Tensor& x, const Tensor& gradient);
  static Results<1> reference(const Tensor& x, const Tensor& gradient);
};

}  // namespace tandem::kernel_ops
