// The straight-through gradient: it passes operations without a derivative unchanged.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "autograd/torch_compat.h"

namespace tandem {

/// The history of x for tensors that represent x but are computed without a derivative. It holds
/// what leads to x, and its memory only if x is a leaf.
class StraightThrough {
 public:
  /// The history of x; null if no gradient of x is recorded. Throws c10::NotImplementedError if x
  /// has a tangent of forward-mode differentiation.
  static std::shared_ptr<const StraightThrough> of(const at::Tensor& x);

  StraightThrough(torch::autograd::Edge edge, at::TensorOptions options);

  /// Makes this the history of `y`, which must have none: the gradient of y, moved to the dtype and
  /// device of x, becomes the gradient of x. Does nothing if no gradients are recorded.
  void give_to(at::Tensor& y) const;

 private:
  torch::autograd::Edge edge_;
  at::TensorOptions options_;
};

}  // namespace tandem
