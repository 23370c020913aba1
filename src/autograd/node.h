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

/// A kept tensor. There is one per distinct tensor, however many values it serves.
struct SavedTensor {
  torch::autograd::SavedVariable variable;
  /// Whether it is an input or a parameter, whose bytes do not count.
  bool is_argument = false;
  /// Whether it is an output of this node: a saved output must not own the node.
  bool is_output = false;
  /// The number of slots that refer to it. It is released with the last one.
  uint32_t slots = 0;
  int64_t bytes = 0;
};

/// A part of a kept value: a tensor, the fields of an opaque value (as its first part), or sizes.
struct Slot {
  /// Index among the saved tensors; -1: no tensor.
  int32_t saved = -1;
  /// The sizes of a shape value, or of a reshape of the saved tensor.
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

  /// Takes over what the plan keeps of a finished forward. Called once, after the outputs have got
  /// their history.
  void save(Frame& frame, const Arguments& arguments, const Outputs& outputs);

  int64_t note_kept_bytes(std::span<std::atomic<int64_t>> by_value) const;
  std::vector<torch::autograd::variable_list> kept_tensors() const;

 private:
  using Tensors = torch::autograd::variable_list;
  struct Saving;

  /// Runs the backward program of a mask. `unpack(k)` returns the kth saved tensor. Unless `keep`,
  /// a kept value is released when the last step that reads it has run.
  template <typename Unpack>
  Tensors run(const Tensors& gradients, const std::vector<bool>& requested, bool keep,
              Unpack&& unpack);
  Tensors refuse_double_backward(const Tensors& gradients, Tensors results);
  Slot save_value(Value value, const at::Tensor& tensor, Saving& saving);
  Slot save_tensor(const at::Tensor& tensor, bool is_argument, Saving& saving);
  /// The slots of the kept value with this index.
  std::span<const Slot> slots_of(size_t kept) const {
    return std::span(slots_).subspan(first_slot_[kept], first_slot_[kept + 1] - first_slot_[kept]);
  }
  BackwardMask mask_of(const Tensors& gradients, const std::vector<bool>& requested) const;
  std::vector<bool> requested() const;

  std::shared_ptr<const Plan> plan_;
  Path path_;
  std::vector<SavedTensor> saved_;
  std::vector<Slot> slots_;
  /// The sizes of the tensors behind kept codes that are packed.
  std::vector<std::pair<Value, c10::SymDimVector>> numbers_;
  /// By kept value: the index of its first slot; one entry more for the end.
  c10::SmallVector<uint32_t, 24> first_slot_;
  std::vector<at::Tensor> workspaces_;
  Buffers buffers_;
  std::vector<at::Tensor> state_;
  /// The pending backward in the region of the call.
  std::unique_ptr<RecipeRegion::Backward> to_come_;
  bool is_released_ = false;
};

}  // namespace tandem
