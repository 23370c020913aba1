// Products of groups of rows, each group with a matrix of its own: the linear layers of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/product/codes_product.h"
#include "quantization/formats/quantizer.h"

namespace tandem::kernel_ops {

/// The first row of each group and, as the last element, the end of the last group. Waits for the
/// device of `splits`.
///
/// splits: integers [groups], the rows of each group. Rows after the last group belong to no group.
/// Throws: c10::ValueError if a number is negative or the sum exceeds `rows`, c10::TypeError if the
///         numbers are no integers.
std::vector<int64_t> group_offsets(const at::Tensor& splits, int64_t groups, int64_t rows);

/// Rows [first, last) of a dense matrix, viewed without a dispatch.
at::Tensor rows_between(const at::Tensor& matrix, int64_t first, int64_t last);

/// Calls `work` for each group that has rows. Groups run in parallel, each on one thread, if that
/// balances the threads' loads; else one after the other, so that their products use all threads.
/// An exception of `work` is rethrown.
void for_each_group(const std::vector<int64_t>& offsets,
                    const std::function<void(size_t group)>& work);

/// How the tensors of groups are quantized, each group by itself.
struct GroupQuantizer {
  /// nullptr: the groups are not quantized.
  const Quantizer* quantizer = nullptr;
  /// What the quantizer needs, if anything: scales [groups], or one seed; group g draws its numbers
  /// at offset g.
  std::optional<at::Tensor> given = std::nullopt;
  /// Undefined, or [groups], float32: the amaxes of groups that have rows are written here.
  at::Tensor amaxes = {};
};

/// The matrices of groups: unquantized, or codes if there are `scales`. Products quantize an
/// unquantized matrix by `quantizer`, if there is one. If the other operand has no quantizer, its
/// row codes are dequantized for the product.
struct GroupMatrices {
  std::vector<at::Tensor> matrices;
  /// For codes: the scale of each matrix, and its amax if the format has one.
  std::vector<at::Tensor> scales = {}, amaxes = {};
  GroupQuantizer quantizer = {};
};

/// The biases of groups. Each row's bias is multiplied by its element of `scales` [rows], if
/// present.
struct GroupBiases {
  std::vector<at::Tensor> biases = {};
  std::optional<at::Tensor> scales = std::nullopt;
};

/// y = x M^T + bias (* scale of the row) for the rows x of group `group`, or x M if not
/// `transposed`. `quantizer`, if there is one, quantizes the rows of x as a tensor of their own.
/// Returns the implementations that computed it.
///
/// Shapes: x [rows, k], matrix [n, k] (or [k, n]), bias [n] -> y [rows, n], contiguous, written.
/// Error:  that of a sum in float32 or wider, one rounding to the dtype of y, and one for the bias.
ImplementationNames product_of_group(const at::Tensor& x, const GroupMatrices& matrices,
                                     const GroupBiases& biases, size_t group, bool transposed,
                                     const GroupQuantizer& quantizer, const at::Tensor& y);

/// product_of_group for all groups. Rows that belong to no group become zero.
ImplementationNames product_of_groups(const at::Tensor& x, const std::vector<int64_t>& offsets,
                                      const GroupMatrices& matrices, const GroupBiases& biases,
                                      bool transposed, const GroupQuantizer& quantizer,
                                      const at::Tensor& y);

/// How the operands of the weight's gradient are quantized. If only x has a quantizer, the product
/// reads the dequantized values of x's row codes, as in forward.
struct GradQuantizers {
  GroupQuantizer grad_y, x;
};

/// For one group: target = grad_y^T x, or target += grad_y^T x if `accumulate`. Without rows the
/// target becomes zero, or stays if `accumulate`. The sum is computed in the wider of the operands'
/// and the target's dtype.
///
/// Shapes: grad_y [rows, n], x [rows, k] -> target [n, k].
ImplementationNames grad_weight_of_group(const at::Tensor& grad_y, const at::Tensor& x,
                                         const GradQuantizers& quantizers, size_t group,
                                         const at::Tensor& target, bool accumulate);

/// grad_weight_of_group for operands that are already in codes, or for unquantized ones.
ImplementationNames grad_weight_of_codes(const CodedMatrix& grad_y, const CodedMatrix& x,
                                         const at::Tensor& target, bool accumulate);

/// The row codes of a group, as its product computes them.
Codes codes_of_group(const at::Tensor& numbers, const GroupQuantizer& how, size_t group);

/// The largest magnitude, ignoring NaN, in float32: []. Zero if there are no rows.
at::Tensor amax_of_rows(const at::Tensor& rows);

/// target = sum over the rows of grad_y (times their scales), in float32 or wider, rounded once.
///
/// Shapes: grad_y [rows, n], scales [rows] -> target [n], contiguous.
ImplementationNames grad_bias_of_group(const at::Tensor& grad_y,
                                       const std::optional<at::Tensor>& scales,
                                       const at::Tensor& target);

/// target = grad_y bias, one number per row: the gradient of the bias's `scales`.
///
/// Shapes: grad_y [rows, n], bias [n] -> target [rows], contiguous.
ImplementationNames grad_scales_of_group(const at::Tensor& grad_y, const at::Tensor& bias,
                                         const at::Tensor& target);

/// The functions above for all groups, as kernel ops. cpu() loops over the groups and uses products
/// of any device; it is also the reference, except for differentiation.
struct OfGroups {
  static constexpr std::array kResults{"all"};
  static constexpr bool kOnManyDevices = true;  // `splits` may lie on the host
};

/// The y of product_of_groups.
struct GroupedProduct : OfGroups {
  static constexpr const char* kName = "grouped_product";
  struct Args {
    const Tensor &x, &splits;
    at::TensorList matrices, biases;
    std::optional<Tensor> scales;
    bool transposed;
    const Quantizer* quantizer;
    at::TensorList matrix_scales, matrix_amaxes;
    const Quantizer* matrix_quantizer;
    std::optional<Tensor> given, matrix_given;
    TANDEM_ARGUMENTS(x, splits, matrices, biases, scales, transposed, quantizer, matrix_scales,
                     matrix_amaxes, matrix_quantizer, given, matrix_given)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& splits,
                           const GroupMatrices& matrices, const GroupBiases& biases,
                           bool transposed, const GroupQuantizer& quantizer);

/// grad_weight [groups, n, k].
struct GroupedGradWeight : OfGroups {
  static constexpr const char* kName = "grouped_grad_weight";
  struct Args {
    const Tensor &grad_y, &x, &splits;
    int64_t groups;
    const Quantizer *grad_quantizer, *quantizer;
    std::optional<Tensor> grad_given, given;
    TANDEM_ARGUMENTS(grad_y, x, splits, groups, grad_quantizer, quantizer, grad_given, given)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor grouped_grad_weight(const at::Tensor& grad_y, const at::Tensor& x,
                               const at::Tensor& splits, int64_t groups,
                               const GradQuantizers& quantizers);

/// grad_bias [groups, n].
struct GroupedGradBias : OfGroups {
  static constexpr const char* kName = "grouped_grad_bias";
  struct Args {
    const Tensor &grad_y, &splits;
    std::optional<Tensor> scales;
    int64_t groups;
    TANDEM_ARGUMENTS(grad_y, splits, scales, groups)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor grouped_grad_bias(const at::Tensor& grad_y, const at::Tensor& splits,
                             const std::optional<at::Tensor>& scales, int64_t groups);

/// The largest magnitude in each group of rows, ignoring NaN, in float32: [groups]; 0 for a group
/// without rows. Without `splits`, x holds one matrix per group: [groups, ...].
struct GroupedAmaxes : OfGroups {
  static constexpr const char* kName = "grouped_amaxes";
  struct Args {
    const Tensor& x;
    std::optional<Tensor> splits;
    int64_t groups;
    TANDEM_ARGUMENTS(x, splits, groups)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor grouped_amaxes(const at::Tensor& rows, const at::Tensor& splits, int64_t groups);
at::Tensor matrix_amaxes(const at::Tensor& matrices);

/// The gradient of GroupBiases::scales, [rows]; zero for rows that belong to no group.
struct GroupedGradScales : OfGroups {
  static constexpr const char* kName = "grouped_grad_scales";
  struct Args {
    const Tensor &grad_y, &splits;
    at::TensorList biases;
    TANDEM_ARGUMENTS(grad_y, splits, biases)
  };
  static Specs<1> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<1> reference(const Args& args);
};
at::Tensor grouped_grad_scales(const at::Tensor& grad_y, const at::Tensor& splits,
                               at::TensorList biases);

/// In differentiable ATen operations, for every device and dtype.
namespace composite {
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& splits, at::TensorList matrices,
                           at::TensorList biases, const std::optional<at::Tensor>& scales,
                           bool transposed);
}

}  // namespace tandem::kernel_ops
