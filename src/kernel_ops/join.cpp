#include "kernel_ops/join.h"

#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace tandem::kernel_ops {

namespace {

bool are_adjacent(at::TensorList pieces) {
  const at::Tensor& first = pieces[0];
  int64_t end = first.storage_offset();
  for (const at::Tensor& piece : pieces) {
    if (!piece.is_contiguous() || !piece.is_alias_of(first) || piece.storage_offset() != end ||
        piece.scalar_type() != first.scalar_type())
      return false;
    end += piece.numel();
  }
  return true;
}

}  // namespace

void check_pieces(at::TensorList pieces) {
  const at::Tensor& first = pieces[0];
  for (const at::Tensor& piece : pieces.slice(1)) {
    TORCH_CHECK_VALUE(piece.dim() == first.dim() && piece.dim() != 0 &&
                          piece.sym_sizes().slice(1) == first.sym_sizes().slice(1),
                      "join: expected parts of one parameter that differ in their first size at "
                      "most, got ",
                      first.sym_sizes(), " and ", piece.sym_sizes(), ". Give parts that fit.");
    TORCH_CHECK_VALUE(piece.device() == first.device(), "join: expected parts of one parameter on ",
                      "one device, got ", first.device(), " and ", piece.device(),
                      ". Move the module: it has .to(device).");
  }
}

at::Tensor joined(at::TensorList pieces, bool may_view) {
  const at::Tensor& first = pieces[0];
  if (pieces.size() == 1) return first;
  check_pieces(pieces);
  if (!may_view || !are_adjacent(pieces)) return at::cat(pieces);
  at::DimVector sizes(first.sizes().begin(), first.sizes().end());
  for (const at::Tensor& piece : pieces.slice(1)) sizes[0] += piece.size(0);
  return at::native::as_strided_tensorimpl(first, sizes, first.strides());
}

c10::SymDimVector joined_sizes(at::TensorList pieces) {
  check_pieces(pieces);
  c10::SymDimVector sizes(pieces[0].sym_sizes().begin(), pieces[0].sym_sizes().end());
  for (const at::Tensor& piece : pieces.slice(1)) sizes[0] += piece.sym_size(0);
  return sizes;
}

at::Tensor like_joined(at::TensorList pieces) {
  if (pieces.size() == 1) return pieces[0];
  return at::empty({}, pieces[0].options().requires_grad(false))
      .expand_symint(joined_sizes(pieces));
}

}  // namespace tandem::kernel_ops
