// A gradient that is handed on as it is, past what has none.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "autograd/torch_compat.h"

namespace tandem {

/// The history of x, for tensors that stand for x and are computed in a way that has no derivative.
/// It holds what leads to x, not its memory, unless x is a leaf.
class StraightThrough {
 public:
  /// That of x; null where no gradient of x is recorded. Throws c10::NotImplementedError where x
  /// has a tangent of forward-mode differentiation.
  static std::shared_ptr<const StraightThrough> of(const at::Tensor& x);

  StraightThrough(torch::autograd::Edge edge, at::TensorOptions options);

  /// Gives `y`, which has no history, this one: the gradient of y, in the dtype of x and where x
  /// lies, is that of x. Does nothing where no gradients are recorded.
  void give_to(at::Tensor& y) const;

 private:
  torch::autograd::Edge edge_;
  at::TensorOptions options_;
};

}  // namespace tandem
