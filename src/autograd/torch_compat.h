// The only file that depends on the version of torch: nodes are held by shared_ptr up to 2.11, and
// by intrusive_ptr since.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

namespace tandem::compat {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
template <typename T, typename... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
using NodePtr = std::shared_ptr<torch::autograd::Node>;
#else
template <typename T, typename... Args>
c10::intrusive_ptr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
#endif

}  // namespace tandem::compat
