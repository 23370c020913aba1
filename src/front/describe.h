// Translates lists of ops to descriptions of pipelines.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/op_def.h"
#include "ops/deferred.h"
#include "ops/groups.h"
#include "tandem/export.h"
#include "tandem/ops.h"

namespace tandem {

/// The option that makes an op add a weight's gradient to a main_grad.
inline constexpr const char* kAccumulateIntoMainGrad = "accumulate_into_main_grad";
/// The option that makes an op leave the gradients of weights to backward_dw().
inline constexpr const char* kDelayWgrad = "delay_wgrad";
/// The options that make an op write its result, or the gradient of its operand, into a tensor of
/// the caller.
inline constexpr const char* kWritesOutput = "writes_output";
inline constexpr const char* kWritesGradInput = "writes_grad_input";

/// The description of a list of ops, and what the pipeline's module needs beside it.
struct DescribedOps {
  /// The "ops" array of a description.
  std::string text;
  /// A parameter of the description: parameter `place` of op `op`.
  struct Parameter {
    size_t op, place;
  };
  std::vector<Parameter> parameters;
  /// In the order of their buffers (write_ops).
  std::vector<at::Tensor> main_grads;
  /// The weights of one op whose gradients backward_dw() computes, as indices into `parameters`:
  /// several where one product reads joined weights, or where the op has groups. Backward leaves
  /// the operands of these gradients in buffers.
  struct DelayedWeights {
    std::vector<size_t> parameters = {};
    /// The main_grad of each weight; undefined: the gradient is added to the weight's `grad`.
    std::vector<at::Tensor> main_grads = {};
    bool of_groups = false;
    /// The number of these buffers.
    size_t left() const { return of_groups ? ops::kDeferred : ops::kDeferredProduct; }
  };
  std::vector<DelayedWeights> delayed;
  /// For each op the number of tensors that a recipe quantizes for it.
  std::vector<SlotCount> slots;
};

/// Returns how many of the op's first parameters are weights of a product: one, the weights that
/// are joined to one, or the length of a list.
size_t weights_of(const BasicOp& basic);

/// Whether the options set `name` to true.
bool is_set(const OptionValues& options, std::string_view name);

/// Throws c10::ValueError for a channel's name that is not UTF-8, which JSON cannot hold.
TANDEM_API DescribedOps describe(const std::vector<Op>& ops);

}  // namespace tandem
