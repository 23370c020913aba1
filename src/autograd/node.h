// The autograd node of a pipeline call.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <memory>
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
  /// One of this node, which would hold itself by it.
  bool is_output = false;
  /// That name it; it is let go when the last one has been.
  uint32_t slots = 0;
  int64_t bytes = 0;
};

/// A part of a kept value: a tensor, the fields of an opaque value (its first part), or sizes.
struct Slot {
  /// Place in the saved tensors; -1: no tensor.
  int32_t saved = -1;
  /// Of a shape, or of a reshape of the saved tensor.
  std::shared_ptr<const c10::SymDimVector> sizes = nullptr;
  std::shared_ptr<void> fields = nullptr;
};

class PipelineBackward final : public torch::autograd::Node {
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

  int64_t note_kept_bytes(std::span<std::atomic<int64_t>> by_value) const;
  std::vector<torch::autograd::variable_list> kept_tensors() const;

 private:
  using Tensors = torch::autograd::variable_list;
  struct Saving;

  /// Runs the backward program of a mask; `unpack(k)` gives the kth saved tensor. Unless `keep`,
  /// what is kept of a value goes when the last step that reads it has run.
  template <typename Unpack>
  Tensors run(const Tensors& gradients, const std::vector<bool>& asked, bool keep, Unpack&& unpack);
  Tensors refuse_double_backward(const Tensors& gradients, Tensors results);
  Path path_for(const Tensors& gradients) const;
  Slot save_value(Value value, const at::Tensor& tensor, Saving& saving);
  Slot save_tensor(const at::Tensor& tensor, bool is_argument, Saving& saving);
  /// Those of the nth kept value.
  std::span<const Slot> slots_of(size_t kept) const {
    return std::span(slots_).subspan(first_slot_[kept], first_slot_[kept + 1] - first_slot_[kept]);
  }
  BackwardMask mask_of(const Tensors& gradients, const std::vector<bool>& asked) const;
  std::vector<bool> asked() const;

  std::shared_ptr<const Plan> plan_;
  Path path_;
  std::vector<SavedTensor> saved_;
  std::vector<Slot> slots_;
  /// Of kept codes that are packed: the sizes of their numbers.
  std::vector<std::pair<Value, c10::SymDimVector>> numbers_;
  /// By kept value, and where the last one's end.
  c10::SmallVector<uint32_t, 24> first_slot_;
  std::vector<at::Tensor> workspaces_;
  Buffers buffers_;
  std::vector<at::Tensor> state_;
  /// In the region of the call.
  std::unique_ptr<RecipeRegion::Backward> to_come_;
  bool is_released_ = false;
};

}  // namespace tandem
