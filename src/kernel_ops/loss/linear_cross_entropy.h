// The cross entropy of logits, or of a product with a weight of many classes, without memory for
// all logits.
#pragma once

#include "kernel_ops/elementwise/collective.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// z = x weight^T + bias, or z = x, the logits, without a weight and a bias. If soft_cap is not 0,
/// z becomes soft_cap tanh(z / soft_cap). For a row with target t, with p = softmax(z), w =
/// class_weight or ones, e = label_smoothing and C classes,
///   loss = (1 - e) w_t (-log p_t) + e / C sum_c w_c (-log p_c) + z_loss logsumexp(z)^2,
/// and 0 if t is ignore_index. y holds the loss of each row ("none"), their sum ("sum"), or the sum
/// over `denominator`, the sum of w_t of the rows that are not ignored ("mean"; NaN if there are
/// none). grad_x, grad_weight and grad_bias are the derivatives of the sum over rows of factors *
/// loss, whatever the reduction. best is the class of the largest z.
///
/// `group_size` ranks of `group` may share the classes, in the order of their ranks. Then weight,
/// bias and class_weight hold this rank's classes, while targets and best are indices among all
/// classes. All ranks must pass equal x and targets and get equal y. grad_x is the part of this
/// rank's classes: the gradient is the sum over ranks.
///
/// Shapes:  x [..., hidden], without a weight [..., classes]; weight [classes, hidden]; targets of
///          any shape, one for each row of x; factors and best like targets; bias, class_weight
///          [classes]; y like targets or []; denominator [].
/// Dtypes:  targets int64; y, denominator float32, float64 if weight, or x without a weight, is
///          float64. grad_x, grad_weight and grad_bias as x, weight and bias, but float32 for
///          float16 if there are no factors: the gradient of a sum over all rows may overflow
///          float16, the gradient of their mean does not.
/// Error:   that of the products, one rounding each of the logits and of their gradients to the
///          dtype of weight, and 2^-20 of float32 arithmetic (test_linear_cross_entropy.py).
///          `in_pieces` rounds sums over rows once more per piece.
/// Memory:  by `cpu`, logits of a few hundred rows at a time, none without a weight; ignored rows
///          cost nothing if best is not wanted. By `in_pieces`, for other dtypes and devices,
///          several times the logits of some rows: 2^25 of them, or an eighth of the elements of
///          weight if these are more. The sums grad_weight and grad_bias are in float32 (float64)
///          until they are complete.
/// Throws:  c10::ValueError for other shapes or an unknown reduction, c10::TypeError for targets
///          that are not int64, c10::IndexError for the first target that is no class.
/// Source:  z-loss: Chowdhery et al. 2022, arXiv:2204.02311; soft cap: Gemma Team 2024,
///          arXiv:2408.00118.
struct LinearCrossEntropy {
  static constexpr const char* kName = "linear_cross_entropy";
  enum Result : size_t { y, denominator, grad_x, grad_weight, grad_bias, best };
  static constexpr std::array kResults{"y",           "denominator", "grad_x",
                                       "grad_weight", "grad_bias",   "best"};
  struct Args {
    const Tensor& x;
    std::optional<Tensor> weight = {};
    const Tensor& targets;
    std::optional<Tensor> bias = {};
    std::optional<Tensor> class_weight = {};
    std::optional<Tensor> factors = {};
    std::string_view reduction;
    int64_t ignore_index;
    double label_smoothing, soft_cap, z_loss;
    std::string_view group = {};
    int64_t group_size = 1, rank = 0;
    std::array<bool, 6> output_mask;
    TANDEM_ARGUMENTS(x, weight, targets, bias, class_weight, factors, reduction, ignore_index,
                     label_smoothing, soft_cap, z_loss, group, group_size, rank, output_mask)
  };
  static Specs<6> shapes(const Args& args);
  static void cpu(const Args& args, std::span<Tensor> results);
  static Results<6> reference(const Args& args);
  /// The reference, for as many rows at a time as have `logits_at_once` logits; 0: for as many as
  /// "Memory" says.
  static void in_pieces(const Args& args, std::span<Tensor> results, int64_t logits_at_once = 0);
  /// The dtype of the gradient of an operand.
  static at::ScalarType gradient_dtype(const Args& args, const Tensor& operand);
  /// The dtype of logits, and the number of classes that this process has.
  static at::ScalarType logits_dtype(const Args& args);
  static c10::SymInt classes(const Args& args);
};

/// Which of all classes each rank has.
struct SharedClasses {
  /// Runs a collective if ranks share the classes, to find out how many each rank has.
  explicit SharedClasses(const LinearCrossEntropy::Args& args);
  /// x of each rank, [size, ...]; its shape must be equal on all ranks.
  Tensor gathered(const Tensor& x) const;
  /// The sum of a number over all ranks, in the order of ranks.
  double sum(double own) const;
  bool are_shared() const { return group.size > 1; }
  /// Throws c10::IndexError if a row is not ignored and its target is no class.
  void check(int64_t target, int64_t row, int64_t ignore_index) const;

  /// The op's name, for errors.
  const char* op;
  ProcessGroup group;
  /// The first class of each rank.
  std::vector<int64_t> first;
  int64_t rank, all;
  /// The sum of the weights of all classes; 0 if ranks do not share them.
  double all_weights;
  c10::Device device;
};

}  // namespace tandem::kernel_ops
