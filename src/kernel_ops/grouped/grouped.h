// Products of groups of rows, each with a matrix of its own: the linear layers of experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "kernel_ops/framework/kernel_op.h"
#include "kernel_ops/product/codes_product.h"
#include "quantization/formats/quantizer.h"

namespace tandem::kernel_ops {

/// The first row of each group and, last, the end of the last one. Waits for the device on which
/// `splits` lies.
///
/// splits: integers [groups], rows of each group. Rows behind the last group belong to none.
/// Throws: c10::ValueError where a number is negative or the sum exceeds `rows`, c10::TypeError
///         where they are no integers.
std::vector<int64_t> group_offsets(const at::Tensor& splits, int64_t groups, int64_t rows);

/// Rows of a plain matrix, without a dispatch.
at::Tensor rows_between(const at::Tensor& matrix, int64_t first, int64_t last);

/// Calls `work` for each group that has rows: several at a time, each on one thread, where that
/// gives all threads about as much to do, else one after the other, for products on all threads.
/// What it throws is thrown here.
void for_each_group(const std::vector<int64_t>& offsets,
                    const std::function<void(size_t group)>& work);

/// How the tensors of groups are quantized, each by itself.
struct GroupQuantizer {
  /// Null: not at all.
  const Quantizer* quantizer = nullptr;
  /// What it takes, if it takes anything: scales [groups], or one seed, at whose offset g the
  /// numbers of group g are drawn.
  std::optional<at::Tensor> given = std::nullopt;
  /// [groups], float32: where the amaxes of groups that have rows are written. Undefined: nobody
  /// asks.
  at::Tensor amaxes = {};
};

/// The matrices of groups: numbers, which each product quantizes where there is a quantizer and no
/// scale, or codes. Where what they are multiplied by has no quantizer, they are multiplied as the
/// numbers that their row codes stand for.
struct GroupMatrices {
  std::vector<at::Tensor> matrices;
  /// Of codes: one for each, amaxes where the format has them.
  std::vector<at::Tensor> scales = {}, amaxes = {};
  GroupQuantizer quantizer = {};
};

/// The biases of groups, times a number per row where there are `scales` [rows].
struct GroupBiases {
  std::vector<at::Tensor> biases = {};
  std::optional<at::Tensor> scales = std::nullopt;
};

/// y_g = x_g M_g^T + bias_g (* scale of the row), or x_g M_g where not `transposed`, for one group.
/// Rows of x are quantized by `quantizer`, if there is one, as a tensor of their own. Returns who
/// computed it.
///
/// Shapes: x [rows, k], matrix [n, k] (or [k, n]), bias [n] -> y [rows, n], contiguous, written.
/// Error:  that of a sum in float32 or wider, one rounding to the dtype of y, and one for the bias.
ImplementationNames product_of_group(const at::Tensor& x, const GroupMatrices& matrices,
                                     const GroupBiases& biases, size_t group, bool transposed,
                                     const GroupQuantizer& quantizer, const at::Tensor& y);

/// The same for all groups, one after the other; zeros for rows of none.
ImplementationNames product_of_groups(const at::Tensor& x, const std::vector<int64_t>& offsets,
                                      const GroupMatrices& matrices, const GroupBiases& biases,
                                      bool transposed, const GroupQuantizer& quantizer,
                                      const at::Tensor& y);

/// How the operands of the gradient of a weight are quantized. Where only x is, it is multiplied as
/// the numbers that its row codes, those of forward, stand for.
struct GradQuantizers {
  GroupQuantizer grad_y, x;
};

/// For a group: target = grad_y^T x, or target += where `accumulate`; zeros, or nothing, without
/// rows. A target of another dtype gets the sum of the operands in the wider one.
///
/// Shapes: grad_y [rows, n], x [rows, k] -> target [n, k].
ImplementationNames grad_weight_of_group(const at::Tensor& grad_y, const at::Tensor& x,
                                         const GradQuantizers& quantizers, size_t group,
                                         const at::Tensor& target, bool accumulate);

/// The same of operands that are in codes already, or of numbers.
ImplementationNames grad_weight_of_codes(const CodedMatrix& grad_y, const CodedMatrix& x,
                                         const at::Tensor& target, bool accumulate);

/// The row codes of a group's numbers, as its product makes them.
CodedMatrix codes_of_group(const at::Tensor& numbers, const GroupQuantizer& how, size_t group);

/// The largest magnitude, NaN aside, in float32: []. Zero where there are no rows.
at::Tensor amax_of_rows(const at::Tensor& rows);

/// target = sum over the rows of grad_y (times their scales), in float32 or wider, rounded once.
///
/// Shapes: grad_y [rows, n], scales [rows] -> target [n], contiguous.
ImplementationNames grad_bias_of_group(const at::Tensor& grad_y,
                                       const std::optional<at::Tensor>& scales,
                                       const at::Tensor& target);

/// target = grad_y bias, a number per row: the gradient of what multiplies the bias.
///
/// Shapes: grad_y [rows, n], bias [n] -> target [rows], contiguous.
ImplementationNames grad_scales_of_group(const at::Tensor& grad_y, const at::Tensor& bias,
                                         const at::Tensor& target);

/// The same of all groups are kernel ops. cpu() is a loop over the groups, by products of any
/// device, and also the reference, unless that is differentiated.
struct OfGroups {
  static constexpr std::array kResults{"all"};
  static constexpr bool kOnManyDevices = true;  // `splits` may lie on the host
};

/// y of product_of_groups.
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

/// The largest magnitude of each group of rows, NaN aside, in float32; 0 where there are none.
/// Without `splits` of matrices [groups, ...].
/// -> [groups].
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

/// -> [rows], zeros for rows of no group.
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

/// In differentiable ATen operations, which every device and dtype has.
namespace composite {
at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& splits, at::TensorList matrices,
                           at::TensorList biases, const std::optional<at::Tensor>& scales,
                           bool transposed);
}

}  // namespace tandem::kernel_ops
