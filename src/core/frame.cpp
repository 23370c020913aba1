#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include "core/call.h"

namespace tandem {

at::Tensor Frame::allocate(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  if (path_ != Path::direct || !like.device().is_cpu())
    return at::empty(sizes, like.options().dtype(dtype));
  const size_t needed =
      static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  for (auto spare = spare_.begin(); spare != spare_.end(); ++spare) {
    const size_t has = spare->storage().nbytes();
    if (spare->scalar_type() != dtype || has < needed || has / 2 > needed) continue;
    at::Tensor reused = std::move(*spare);
    spare_.erase(spare);
    reused.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return reused;
  }
  return at::detail::empty_cpu(sizes, dtype, /*pin_memory=*/false, std::nullopt);
}

void Frame::retire(Value value, bool reusable) {
  for (size_t part = 0; part < tensors_per_value(type(value).format); ++part) {
    at::Tensor& dead = tensor(value, part);
    // Small buffers cost less from the allocator than the search for them.
    constexpr size_t kWorthKeeping = 64 * 1024;
    if (reusable && path_ == Path::direct && dead.defined() && dead.use_count() == 1 &&
        dead.storage().use_count() == 1 && dead.storage().nbytes() >= kWorthKeeping &&
        dead.device().is_cpu())
      spare_.push_back(std::move(dead));
    dead = at::Tensor();
  }
}

}  // namespace tandem
