// The cross entropy of a product with a weight of many classes, without memory for all logits.
#pragma once

#include "kernel_ops/elementwise/collective.h"
#include "kernel_ops/framework/kernel_op.h"

namespace tandem::kernel_ops {

/// z = x weight^T + bias, capped as soft_cap tanh(z / soft_cap) where soft_cap is not 0; of a row
/// with target t, p = softmax(z), w = class_weight or ones, e = label_smoothing, C classes,
///   loss = (1 - e) w_t (-log p_t) + e / C sum_c w_c (-log p_c) + z_loss logsumexp(z)^2,
/// 0 where t is ignore_index. y holds the losses by row ("none"), their sum ("sum"), or that over
/// `denominator`, the sum of w_t of the rows that are not ignored ("mean"; NaN where there are
/// none). grad_x, grad_weight and grad_bias are the derivatives of the sum over rows of factors *
/// loss, whatever the reduction. best is the class of the largest z.
///
/// Where `group_size` ranks of `group` share the classes, in the order of their ranks, weight, bias
/// and class_weight are this rank's, targets and best count all classes, all ranks get the same y,
/// and grad_x is the part of this rank's classes: the gradient is the sum over ranks. All ranks
/// pass the same x and targets.
///
/// Shapes:  x [..., hidden]; weight [classes, hidden]; targets of any shape, a number for each row
///          of x; factors and best like targets; bias, class_weight [classes]; y like targets or
///          [], denominator [].
/// Dtypes:  targets int64; y, denominator float32, float64 where weight is; grad_x, grad_weight and
///          grad_bias as x, weight and bias with factors, else in float32 where these are float16:
///          the gradient of a sum over all rows may be larger than float16 goes, that of their mean
///          is not.
/// Error:   of the products, one rounding of the logits and of their gradients to the dtype of
///          weight each, and 2^-20 of float32 arithmetic (test_linear_cross_entropy.py).
/// Memory:  on the CPU logits of a few hundred rows at a time. Rows that are ignored cost nothing
///          where best is not wanted.
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
    const Tensor& weight;
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
  /// The dtype of the gradient of an operand.
  static at::ScalarType gradient_dtype(const Args& args, const Tensor& operand);
};

/// Which of all classes a rank has.
struct SharedClasses {
  /// With what each has of every rank: a collective where ranks share the classes.
  explicit SharedClasses(const LinearCrossEntropy::Args& args);
  /// [size, ...] of x on each rank, whose shape is the same on all.
  Tensor gathered(const Tensor& x) const;
  /// Of a number on each rank, in the order of ranks.
  double sum(double own) const;
  bool are_shared() const { return group.size > 1; }
  /// Throws c10::IndexError where the target of a row that is not ignored is no class.
  void check(int64_t target, int64_t row, int64_t ignore_index) const;

  ProcessGroup group;
  /// The first class of each rank.
  std::vector<int64_t> first;
  int64_t rank, all;
  /// The sum of the weights of all classes; 0 where no ranks share them.
  double all_weights;
  c10::Device device;
};

}  // namespace tandem::kernel_ops
