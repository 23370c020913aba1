// Lists of ops as pipelines take them.
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

/// The option of an op that adds a gradient to a main_grad.
inline constexpr const char* kAccumulateIntoMainGrad = "accumulate_into_main_grad";
/// That of one that leaves gradients of weights for later.
inline constexpr const char* kDelayWgrad = "delay_wgrad";
/// Those of one that writes its result, or the gradient of its operand, into a tensor of the
/// caller.
inline constexpr const char* kWritesOutput = "writes_output";
inline constexpr const char* kWritesGradInput = "writes_grad_input";

/// The options of an op as JSON. Throws c10::ValueError where one is given twice, or JSON cannot
/// hold it: a number that is not finite, a text that is not UTF-8.
std::string options_text(const std::string& op, const OptionValues& options);

/// What a list of ops is to a pipeline. Its buffers are the main_grads, what is left of delayed
/// gradients, and tensors that ops write which come with a call, in the order of the ops.
struct DescribedOps {
  /// The "ops" array of a description.
  std::string text;
  /// What its parameters are: of which op which one.
  struct Parameter {
    size_t op, place;
  };
  std::vector<Parameter> parameters;
  std::vector<at::Tensor> main_grads;
  /// Of an op, weights whose gradients come later, as places among the parameters: several where
  /// they are joined, or of groups. What they are computed from is left in buffers behind the
  /// main_grads.
  struct DelayedWeights {
    std::vector<size_t> parameters = {};
    /// Of each parameter; undefined: it goes into its `grad`.
    std::vector<at::Tensor> main_grads = {};
    bool of_groups = false;
    /// How many buffers.
    size_t left() const { return of_groups ? ops::kDeferred : ops::kDeferredProduct; }
  };
  std::vector<DelayedWeights> delayed;
  /// Of each op, how many tensors a recipe quantizes for it.
  std::vector<SlotCount> slots;
};

/// How many of an op's first parameters are weights of a product: one, those that are joined to
/// one, or a list.
size_t weights_of(const BasicOp& basic);

/// Whether an option of the op is given and true.
bool is_set(const OptionValues& options, std::string_view name);

/// Throws c10::ValueError where a channel is not named in UTF-8, which JSON cannot hold.
TANDEM_API DescribedOps describe(const std::vector<Op>& ops);

}  // namespace tandem
