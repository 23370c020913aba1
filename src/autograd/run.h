// One call of a pipeline under autograd: forward now, one node for the whole of backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
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

/// The caller's buffers, in the order of the plan. Each is taken when it is about to be written,
/// and only then: another tensor may have come into its place since forward.
struct Buffers {
  size_t count = 0;
  std::function<at::Tensor(size_t)> take = nullptr;
  /// Those that are there already.
  static Buffers of(at::TensorList tensors);
};

/// An input or a parameter that comes in codes, as row_codes, row_scale, ... of a group; those of a
/// direction may be missing.
struct QuantizedArgument {
  /// Its place among the inputs, then parameters.
  size_t place = 0;
  const Quantizer* quantizer = nullptr;
  std::array<at::Tensor, group_amax> parts = {};
  bool has(Direction direction) const { return parts[part_of(direction, 0)].defined(); }
};
/// What a front knows such arguments by: the codes of a tensor, of which kernels can read nothing
/// else; nullopt for any other.
using QuantizedReader = std::optional<QuantizedArgument> (*)(const at::Tensor& argument);
TANDEM_API void set_quantized_reader(QuantizedReader reader);
/// Those among the arguments of a call.
TANDEM_API std::vector<QuantizedArgument> quantized_among(at::TensorList inputs,
                                                          at::TensorList params = {});

/// The tensors of one call, in the order of the plan. Nothing here refers to a module.
struct Arguments {
  /// The main input, then extra inputs.
  at::TensorList inputs;
  at::TensorList params, workspaces;
  Buffers buffers = {};
  /// Of the recipe: the region's number, then scale, amax_history and pending of each module and
  /// direction.
  at::TensorList state = {};
  /// Of the inputs and params, in their order.
  std::vector<QuantizedArgument> quantized = {};
  /// Told of the state that is used; none through the dispatcher.
  std::shared_ptr<RecipeRegion> region = nullptr;
  /// What user code is given besides tensors, as its front knows it.
  const void* given = nullptr;

  /// By its place among the inputs, then parameters.
  const at::Tensor& at(size_t place) const {
    return place < inputs.size() ? inputs[place] : params[place - inputs.size()];
  }
};

/// Puts what a call is given into a frame of its plan. Throws c10::ValueError where it does not fit
/// the plan.
void fill(Frame& frame, const Plan& plan, const Arguments& arguments);

/// Puts the buffers that `steps` mutate into `frame`. Throws c10::ValueError where one is
/// undefined.
void take_buffers(const Buffers& buffers, const Plan& plan, const Steps& steps, Frame& frame);

/// The states that forward, or backward, of the plan has used, from the tensors of
/// Arguments::state.
std::vector<PendingUpdate> used_states(const Plan& plan, at::TensorList state, bool is_backward);

/// The value whose memory a value may share, following reshapes of reshapes and sums in place.
Value root_of(const Plan& plan, Value value);
/// The argument that is the value `root`, nullptr where that is none. Not any that shares its
/// memory: arguments may be parts of one tensor.
const at::Tensor* argument_of(const Plan& plan, const Arguments& arguments, Value root);

/// What a cached weight lies in, of the parameters of a call.
std::vector<at::Tensor> pieces_of(const CachedWeight& cached, const Plan& plan,
                                  at::TensorList params);

/// The main output, then extra outputs.
using Outputs = c10::SmallVector<at::Tensor, 4>;

/// Runs `plan` on a path. Where the plan needs backward, outputs that require grad get one node as
/// their history; else no node is made and no flag of any tensor is touched: an output that is an
/// argument is that tensor object. With grad an output that shares memory with an argument or with
/// an earlier output is a view of it, as that of a torch.autograd.Function is: writing it in place,
/// or using it after its base was written, raises. On the dispatch path outputs are always fresh.
///
/// Throws: c10::ValueError (arguments), torch's errors of saved tensors and of views.
Outputs run_pipeline(const std::shared_ptr<const Plan>& plan, const Arguments& arguments,
                     Path path);

/// Whether this thread is inside a backward pass.
bool is_in_backward();
/// Whether it also records gradients: a checkpoint recomputes a forward.
bool is_recompute();

/// Bytes that the node of these outputs keeps for backward, inputs and parameters aside; 0 without
/// a node. Writes them by value of Plan::kept where they differ from what `by_value` holds, if it
/// is not empty; a value that shares its tensor with an earlier one repeats its bytes.
int64_t note_kept_bytes(const Outputs& outputs, std::span<std::atomic<int64_t>> by_value);
/// The tensors that the node of these outputs keeps, by value of Plan::kept; empty without a node.
std::vector<std::vector<at::Tensor>> kept_tensors(const Outputs& outputs);

/// Gradients of `outputs` with respect to `inputs`; undefined where an output does not depend on an
/// input.
std::vector<at::Tensor> gradients_of(at::TensorList outputs, at::TensorList inputs,
                                     at::TensorList grad_outputs);

}  // namespace tandem
