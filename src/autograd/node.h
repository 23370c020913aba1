// The autograd node of a pipeline call.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "autograd/run.h"
#include "autograd/torch_compat.h"
#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// A kept tensor: one per distinct tensor, however many values it serves.
struct SavedTensor {
  torch::autograd::SavedVariable variable;
  /// An input or parameter: no bytes of our own.
  bool is_argument = false;
  /// That name it; it is let go when the last one has been.
  uint32_t slots = 0;
  int64_t bytes = 0;
};

/// Where a tensor of a kept value is found.
struct Slot {
  /// Place in the saved tensors; -1: undefined.
  int32_t saved = -1;
  /// Place among the shapes of reshapes of arguments and outputs; -1: as it is.
  int32_t shape = -1;
};

/// What is kept of an opaque value.
struct KeptOpaque {
  std::shared_ptr<void> fields;
  /// The slots of its tensors.
  size_t first = 0, count = 0;
};

class PipelineBackward : public torch::autograd::Node {
 public:
  PipelineBackward(std::shared_ptr<const Plan> plan, Path path)
      : plan_(std::move(plan)), path_(path) {}

  std::string name() const override { return "TandemPipelineBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& inputs,
      torch::dynamo::autograd::SwapSavedVariables& saved) override;

  /// Takes over what the plan keeps of a finished forward; called once, after the outputs have got
  /// their history.
  void save(Frame& frame, const Arguments& arguments, const Outputs& outputs);

  int64_t note_kept_bytes(std::span<std::atomic<int64_t>> by_entry) const;
  std::vector<at::Tensor> kept_tensors() const;

 private:
  using Tensors = torch::autograd::variable_list;
  struct Saving;

  /// Runs the backward program of a mask; `unpack(k)` gives the kth saved tensor, `drop(k)` is told
  /// when nobody needs it any more.
  template <typename Unpack, typename Drop>
  Tensors run(const Tensors& gradients, const std::vector<bool>& asked, Unpack&& unpack,
              Drop&& drop);
  Tensors refuse_double_backward(const Tensors& gradients, Tensors results);
  Path path_for(const Tensors& gradients) const;
  Slot save_value(Value value, const at::Tensor& tensor, Saving& saving);
  Slot save_tensor(const at::Tensor& tensor, bool is_argument, Saving& saving);
  /// First slot of a kept value and their number.
  std::pair<size_t, size_t> slots_of(Value value) const;
  BackwardMask mask_of(const Tensors& gradients, const std::vector<bool>& asked) const;
  std::vector<bool> asked() const;

  std::shared_ptr<const Plan> plan_;
  Path path_;
  std::vector<SavedTensor> saved_;
  /// As in plan.kept, then the tensors of opaque values.
  std::vector<Slot> slots_;
  std::vector<c10::SymDimVector> reshapes_;
  std::vector<at::Tensor> workspaces_;
  Buffers buffers_;
  std::vector<at::Tensor> state_;
  /// In the region of the call.
  std::unique_ptr<RecipeRegion::Backward> to_come_;
  std::vector<KeptOpaque> opaques_;
  std::vector<c10::SymDimVector> shapes_;
  bool is_released_ = false;
};

}  // namespace tandem
