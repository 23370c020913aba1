#include <ATen/ops/empty.h>

#include <utility>

#include "core/call.h"
#include "kernel_ops/elementwise/join.h"
#include "kernel_ops/framework/memory.h"

namespace tandem {

at::Tensor Frame::allocate(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  if (path_ == Path::direct) return kernel_ops::empty_beside(like, sizes, dtype);
  return at::empty(sizes, like.options().dtype(dtype));
}

void Frame::hold(Value value, at::TensorList parts) {
  tensor(value) = kernel_ops::like_joined(parts);
  held_.push_back({value, parts.vec()});
}

void Frame::join(Value value) {
  for (Held& held : held_)
    if (held.value == value && !std::exchange(held.is_joined, true))
      tensor(value) = kernel_ops::joined(held.parts, /*may_view=*/path_ == Path::direct);
}

void Frame::drop(Value value) {
  std::erase_if(held_, [&](const Held& held) { return held.value == value; });
  if (type(value).format == Format::opaque) opaque(value) = {};
  for (size_t part = 0; part < tensors_per_value(type(value)); ++part)
    tensor(value, part) = at::Tensor();
}

}  // namespace tandem
