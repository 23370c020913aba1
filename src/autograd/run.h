// One call of a pipeline under autograd: forward now, one node for the whole of backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <memory>

#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// The tensors of one call, in the order of the plan. Nothing here refers to a module.
struct Arguments {
  at::TensorList inputs;  ///< the main input, then extra inputs
  at::TensorList params, workspaces;
};

/// The main output, then extra outputs.
using Outputs = c10::SmallVector<at::Tensor, 4>;

/// Runs `plan` on a path. Where the plan needs backward, outputs that require grad get one node as their history; else no node is
/// made and no flag of any tensor is touched. An output that is an argument is that tensor object without grad, and a new one that
/// shares its memory and version counter with grad; on the dispatch path outputs are always fresh.
///
/// Throws: c10::ValueError (arguments), torch's errors of saved tensors.
Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path);

/// Bytes that the node of these outputs keeps for backward, inputs and parameters aside; 0 without a node.
int64_t saved_bytes(const Outputs& outputs);
/// The same by entry of Plan::kept; an entry that shares its tensor with an earlier one repeats its bytes.
std::vector<int64_t> kept_bytes(const Outputs& outputs);

/// Gradients of `outputs` with respect to `inputs`; undefined where an output does not depend on an input.
std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs);

}  // namespace tandem
