// One op by itself, with separate directions, for ops and fusions that are written in Python and
// call an op of the library.
#pragma once

#include <c10/core/SymInt.h>

#include <string>
#include <vector>

#include "autograd/run.h"
#include "kernel_ops/weights/weights.h"
#include "planner/key.h"
#include "tandem/export.h"

namespace tandem {

/// The results of an op's forward.
struct OpResults {
  Outputs outputs;
  /// What the op's backward reads, in the order of OpDef::context; undefined for a value that the
  /// op lacks, such as the seed of a dropout in evaluation.
  std::vector<at::Tensor> context;
};

/// Runs forward of the only op of a description (write_description), without an autograd node and
/// with the recipe that the description names.
///
/// Shapes: as of a pipeline with this op.
/// Throws: c10::ValueError if tensors do not fit the op, and for a recipe that keeps amaxes, which
///         belong to a pipeline.
TANDEM_API OpResults op_forward(const std::string& description, at::TensorList inputs,
                                at::TensorList params);

/// What backward needs from forward.
struct OpContext {
  /// The values of OpDef::context; undefined if forward saved none.
  std::vector<at::Tensor> saved;
  /// The sizes of x.
  std::vector<c10::SymInt> sizes;
  /// The dtype in which the op has computed.
  at::ScalarType dtype = at::kFloat;
  /// Which gradients are requested: of x, of extra inputs, of params.
  std::vector<bool> requested;
};

/// The requested gradients, undefined if there are none. `gradients`: of the outputs, undefined if
/// not known. `params`: those that no step reads may be undefined.
///
/// Throws: c10::ValueError if backward reads a tensor that was not saved.
TANDEM_API std::vector<at::Tensor> op_backward(const std::string& description,
                                               const OpContext& context, at::TensorList gradients,
                                               at::TensorList params);

/// A weight for whose codes a dispatched call may be passed a workspace.
struct WorkspaceSpec {
  /// The parameters that the weight consists of, by index.
  std::vector<size_t> params = {};
  std::string quantizer;
  GroupMask parts = {};
};

/// The weights with a workspace in a call with inputs of these traits, in the order of the
/// workspaces. The description must have "cache_weights".
TANDEM_API std::vector<WorkspaceSpec> workspace_specs(
    const std::string& description, const std::vector<PlanKey::TensorTraits>& inputs,
    at::TensorList params);

/// The tensors of a new workspace for a weight that consists of these tensors. `why`: why it is
/// new.
TANDEM_API std::vector<at::Tensor> make_workspace(at::TensorList weight,
                                                  const std::string& quantizer, GroupMask parts,
                                                  kernel_ops::CodesWere why);

/// The text of the quantizer that a recipe, given as JSON, has for a role of this kind of op;
/// empty: none. Throws c10::ValueError for an unknown recipe.
TANDEM_API std::string quantizer_text(const std::string& recipe, Role role, std::string_view kind);

}  // namespace tandem
