#include "autograd/straight_through.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "autograd/direct.h"

namespace tandem {

namespace {

class HandOn final : public torch::autograd::Node {
 public:
  HandOn(torch::autograd::Edge edge, at::TensorOptions options) : options_(options) {
    add_next_edge(std::move(edge));
  }
  std::string name() const override { return "TandemStraightThrough"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {gradients[0].to(options_)};
  }

 private:
  at::TensorOptions options_;
};

}  // namespace

std::shared_ptr<const StraightThrough> StraightThrough::of(const at::Tensor& x) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(x),
                              "quantize: expected x without a tangent, got one of forward-mode ",
                              "differentiation. Differentiate backward, or quantize x.detach().");
  if (!c10::GradMode::is_enabled() || !x.requires_grad()) return nullptr;
  return std::make_shared<const StraightThrough>(
      torch::autograd::impl::gradient_edge(x),
      at::TensorOptions().dtype(x.scalar_type()).device(x.device()));
}

StraightThrough::StraightThrough(torch::autograd::Edge edge, at::TensorOptions options)
    : edge_(std::move(edge)), options_(options) {}

void StraightThrough::give_to(at::Tensor& y) const {
  if (!c10::GradMode::is_enabled()) return;
  torch::autograd::create_gradient_edge(y, compat::make_node<HandOn>(edge_, options_));
}

}  // namespace tandem
