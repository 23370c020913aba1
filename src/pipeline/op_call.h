// One op by itself, its directions apart: what an op or a fusion that is written in Python calls as
// that of the library.
#pragma once

#include <c10/core/SymInt.h>

#include <string>
#include <vector>

#include "autograd/run.h"
#include "kernel_ops/weights/weights.h"
#include "planner/key.h"
#include "tandem/export.h"

namespace tandem {

/// What forward of an op gives.
struct OpResults {
  Outputs outputs;
  /// What its backward reads, as OpDef::context names it; undefined where the op has none, such as
  /// the seed of a dropout in evaluation.
  std::vector<at::Tensor> context;
};

/// Runs forward of the only op of a description (write_description), under no node and with the
/// recipe that it names.
///
/// Shapes: as of the op's pipeline.
/// Throws: c10::ValueError where tensors do not fit the op, and for a recipe that keeps amaxes,
///         which belong to a pipeline.
TANDEM_API OpResults op_forward(const std::string& description, at::TensorList inputs,
                                at::TensorList params);

/// What forward has left.
struct OpContext {
  /// As OpDef::context names them; undefined where forward saved none.
  std::vector<at::Tensor> saved;
  /// Of x.
  std::vector<c10::SymInt> sizes;
  /// In which the op has computed.
  at::ScalarType dtype = at::kFloat;
  /// Which gradients are asked for: of x, of extra inputs, of params.
  std::vector<bool> asked;
};

/// The gradients that are asked for, undefined where there are none. `gradients`: of the outputs,
/// undefined where nobody has one. `params`: those that no step reads may be undefined.
///
/// Throws: c10::ValueError where a tensor that backward reads was not saved.
TANDEM_API std::vector<at::Tensor> op_backward(const std::string& description,
                                               const OpContext& context, at::TensorList gradients,
                                               at::TensorList params);

/// A weight whose codes a call through the dispatcher can be given a workspace for.
struct WorkspaceSpec {
  /// Where it is among the parameters; several that it is joined of.
  std::vector<size_t> params = {};
  std::string quantizer;
  GroupMask parts = {};
};

/// Those of a call with inputs like these, where the description has "cache_weights", in the order
/// of the workspaces.
TANDEM_API std::vector<WorkspaceSpec> workspace_specs(
    const std::string& description, const std::vector<PlanKey::TensorTraits>& inputs,
    at::TensorList params);

/// The tensors of a fresh one, for a weight that lies in these, and why there was none.
TANDEM_API std::vector<at::Tensor> make_workspace(at::TensorList weight,
                                                  const std::string& quantizer, GroupMask parts,
                                                  kernel_ops::CodesWere why);

/// The text of the quantizer that a recipe, as JSON, has for a role of an op of this kind; empty:
/// none. Throws c10::ValueError on an unknown recipe.
TANDEM_API std::string quantizer_text(const std::string& recipe, Role role, std::string_view kind);

}  // namespace tandem
