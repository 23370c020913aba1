#include <ATen/ops/empty.h>

#include "core/call.h"
#include "kernel_ops/framework/memory.h"

namespace tandem {

at::Tensor Frame::allocate(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  if (path_ == Path::direct) return kernel_ops::empty_beside(like, sizes, dtype);
  return at::empty(sizes, like.options().dtype(dtype));
}

void Frame::drop(Value value) {
  if (type(value).format == Format::opaque) opaque(value) = {};
  for (size_t part = 0; part < tensors_per_value(type(value)); ++part)
    tensor(value, part) = at::Tensor();
}

}  // namespace tandem
