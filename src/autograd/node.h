// The autograd node of a pipeline call.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>
#include <vector>

#include "autograd/torch_compat.h"
#include "core/call.h"
#include "core/plan.h"

namespace tandem {

/// Where a view of an argument lies in it: the argument itself is saved, so that its version counter is the one that is checked.
struct ViewGeometry {
  c10::SymDimVector sizes, strides;
  c10::SymInt offset;
};

/// A kept tensor: one per distinct tensor.
struct SavedTensor {
  torch::autograd::SavedVariable variable;
  std::optional<ViewGeometry> view;
  bool is_argument = false;  ///< an input or parameter, or a view of one: no bytes of our own
  int64_t bytes = 0;
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

  /// Takes over what the plan keeps of a finished forward; called once, after the outputs have got their history.
  void save(Frame& frame, at::TensorList inputs, at::TensorList params, at::TensorList workspaces);

  int64_t saved_bytes() const;
  std::vector<int64_t> kept_bytes() const;

 private:
  using Tensors = torch::autograd::variable_list;

  /// Runs the backward program of a mask; `unpack(k)` gives the kth kept tensor, `drop(k)` is told when nobody needs it any more.
  template <typename Unpack, typename Drop>
  Tensors run(const Tensors& gradients, const std::vector<bool>& asked, Unpack&& unpack,
              Drop&& drop);
  Tensors refuse_double_backward(const Tensors& gradients, Tensors results);
  at::Tensor unpack(size_t kept, const compat::NodePtr& self) const;
  static at::Tensor as_saved(const SavedTensor& saved, at::Tensor tensor);
  BackwardMask mask_of(const Tensors& gradients, const std::vector<bool>& asked) const;
  std::vector<bool> asked() const;

  std::shared_ptr<const Plan> plan_;
  Path path_;
  std::vector<SavedTensor> saved_;
  std::vector<uint16_t> saved_at_;  ///< by place in plan.kept: its place in saved_
  std::vector<at::Tensor> workspaces_;
  std::vector<Opaque> opaques_;
  std::vector<c10::SymDimVector> shapes_;
  bool is_released_ = false;
};

}  // namespace tandem
