// One call of a pipeline under autograd: runs forward and creates one node for all of backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/call.h"
#include "core/plan.h"
#include "quantization/region.h"

namespace tandem {

/// The caller's buffers, in the order of the plan. Each is taken only when it is about to be
/// written, because another tensor may have replaced it since forward.
struct Buffers {
  size_t count = 0;
  std::function<at::Tensor(size_t)> take = nullptr;
  /// Buffers that are already known.
  static Buffers of(at::TensorList tensors);
};

/// An input or a parameter in codes.
struct QuantizedArgument {
  /// Index among the inputs, then parameters.
  size_t place;
  Codes codes;
};
/// A front's function that returns the codes of an argument whose memory kernels cannot read
/// otherwise; nullopt for other arguments.
using QuantizedReader = std::optional<Codes> (*)(const at::Tensor& argument);
TANDEM_API void set_quantized_reader(QuantizedReader reader);
/// The arguments of a call that come in codes.
TANDEM_API std::vector<QuantizedArgument> quantized_among(at::TensorList inputs,
                                                          at::TensorList params = {});

/// The tensors of one call, in the order of the plan. Nothing here refers to a module.
struct Arguments {
  /// The main input, then extra inputs.
  at::TensorList inputs;
  at::TensorList params, workspaces;
  Buffers buffers = {};
  /// The recipe's state: the region's number, then scale, amax_history and pending of each module
  /// and direction.
  at::TensorList state = {};
  /// The inputs and params that come in codes, in their order.
  std::vector<QuantizedArgument> quantized = {};
  /// The region that notes which states are used; null for a dispatched call.
  std::shared_ptr<RecipeRegion> region = nullptr;
  /// Arguments of user code other than tensors, in the front's representation.
  const void* given = nullptr;

  /// The number of inputs and parameters.
  size_t size() const { return inputs.size() + params.size(); }
  /// The argument with this index among the inputs, then parameters.
  const at::Tensor& at(size_t place) const {
    return place < inputs.size() ? inputs[place] : params[place - inputs.size()];
  }
  /// Whether an input or a parameter is this tensor.
  bool has(const at::Tensor& tensor) const {
    const auto is_it = [&](const at::Tensor& argument) { return argument.is_same(tensor); };
    return std::any_of(inputs.begin(), inputs.end(), is_it) ||
           std::any_of(params.begin(), params.end(), is_it);
  }
};

/// The value whose memory a value may share, through any chain of reshapes and in-place sums.
Value root_of(const Plan& plan, Value value);
/// The argument that is the value `root`; nullptr if none is. Another argument that shares its
/// memory is not meant: arguments may be parts of one tensor.
const at::Tensor* argument_of(const Plan& plan, const Arguments& arguments, Value root);

/// The main output, then extra outputs.
using Outputs = c10::SmallVector<at::Tensor, 4>;

/// Runs `plan` on a path. If the plan needs backward, outputs that require a gradient get one node
/// as their history. Otherwise no node is created and no flag of a tensor changes: an output that
/// is an argument is that tensor object. With grad, an output that shares memory with an argument
/// or an earlier output is a view of it, as for a torch.autograd.Function: writing it in place, or
/// using it after its base was written, raises. On the dispatch path outputs are always new
/// tensors.
///
/// Throws: c10::ValueError (arguments), torch's errors of saved tensors and of views.
Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path);

/// Whether this thread is inside a backward pass.
bool is_in_backward();
/// Whether this thread is inside a backward pass and records gradients, as when a checkpoint
/// recomputes a forward.
bool is_recompute();

/// The bytes that the node of these outputs keeps for backward, without inputs and parameters; 0
/// without a node. If `by_value` is not empty, updates it with the bytes of each value in
/// Plan::kept. A value that shares its tensor with an earlier one repeats its bytes.
int64_t note_kept_bytes(const Outputs& outputs, std::span<std::atomic<int64_t>> by_value);
/// The tensors that the node of these outputs keeps, by value of Plan::kept; empty without a node.
std::vector<std::vector<at::Tensor>> kept_tensors(const Outputs& outputs);

/// Gradients of `outputs` with respect to `inputs`; undefined if an output does not depend on an
/// input.
std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs);

}  // namespace tandem
