#include "kernel_ops/elementwise/join.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "kernel_ops/framework/memory.h"
#include "kernel_ops/framework/operands.h"
#include "kernel_ops/framework/results.h"
#include "quantization/formats/format.h"

namespace tandem::kernel_ops {

namespace {

void let_go(void* memory) { delete static_cast<at::Tensor*>(memory); }

/// The tensor that owns a piece's memory: the one that `laid_together` allocated, else the piece.
const at::Tensor& memory_of(const at::Tensor& piece) {
  const c10::DataPtr& data = piece.storage().data_ptr();
  return data.get_deleter() == &let_go ? *static_cast<const at::Tensor*>(data.get_context())
                                       : piece;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
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

std::optional<at::Tensor> memory_of_pieces(at::TensorList pieces) {
  const at::Tensor& first = pieces[0];
  const at::Tensor& memory = memory_of(first);
  const auto* const begin = static_cast<const char*>(memory.storage().data());
  const auto* const here = static_cast<const char*>(first.const_data_ptr());
  const char* end = here;
  at::DimVector sizes(first.sizes().begin(), first.sizes().end());
  sizes[0] = 0;
  for (const at::Tensor& piece : pieces) {
    if (!piece.is_contiguous() || piece.const_data_ptr() != end ||
        piece.scalar_type() != memory.scalar_type() ||
        storage_of(memory_of(piece)) != storage_of(memory))
      return std::nullopt;
    end += piece.nbytes();
    sizes[0] += piece.size(0);
  }
  return at::native::as_strided_tensorimpl(
      memory, sizes, strides_of(first), (here - begin) / static_cast<int64_t>(memory.itemsize()));
}

std::vector<at::Tensor> laid_together(at::TensorList pieces) {
  const at::NoGradGuard no_grad;
  const at::Tensor memory = at::cat(pieces).contiguous();
  c10::Allocator* const allocator = memory.storage().allocator();
  std::vector<at::Tensor> made;
  int64_t begin = 0;
  for (const at::Tensor& piece : pieces) {
    const at::Tensor own = memory.narrow(0, begin, piece.size(0));
    begin += piece.size(0);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), own.nbytes(),
        c10::DataPtr(own.mutable_data_ptr(), new at::Tensor(memory), &let_go, memory.device()),
        allocator, /*resizable=*/allocator != nullptr);
    made.push_back(at::empty({0}, memory.options()));
    made.back().set_(std::move(storage), 0, own.sizes(), own.strides());
  }
  return made;
}

at::Tensor joined(at::TensorList pieces, bool may_view) {
  if (pieces.size() == 1) return pieces[0];
  check_pieces(pieces);
  if (!may_view) return at::cat(pieces);
  if (auto memory = memory_of_pieces(pieces)) return *std::move(memory);
  const auto dtype = pieces[0].scalar_type();
  if (!std::ranges::all_of(pieces, [&](const at::Tensor& t) { return t.scalar_type() == dtype; }))
    return at::cat(pieces);  // in the dtype to which torch promotes
  // Into a cached block: the C library returns memory of this size to the system at each step.
  const at::NoGradGuard no_grad;
  at::Tensor all = empty_beside(pieces[0], C10_AS_INTARRAYREF_SLOW(joined_sizes(pieces)), dtype);
  return at::cat_out(all, pieces);
}

bool are_multiplied_apart(at::TensorList pieces) {
  constexpr int64_t kFewElements = 1 << 14;  // their copy costs less than one more product
  const at::ScalarType dtype = pieces[0].scalar_type();
  if (!kArithmetic.has(dtype) && dtype != at::kDouble) return false;
  return std::ranges::all_of(pieces, [&](const at::Tensor& piece) {
    return piece.dim() == 2 && piece.is_cpu() && piece.scalar_type() == dtype &&
           piece.numel() >= kFewElements;
  });
}

bool codes_join(const Quantizer& quantizer) {
  return !quantizer.format->layout.has_amax && !is_packed(quantizer) &&
         rows_of_part(quantizer, row_scale).rows != 0 &&
         rows_of_part(quantizer, column_scale).rows != 0;
}

at::Tensor joined_scales(at::TensorList scales, at::TensorList codes, const Quantizer& quantizer,
                         Direction direction, bool may_view) {
  const auto [dim, height] = rows_of_part(quantizer, part_of(direction, 1));
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < scales.size(); ++i) {
    const c10::SymInt rows = MatrixSize(codes[i].sym_sizes()).rows;
    TORCH_CHECK_VALUE(height == 1 || i + 1 == scales.size() || rows % height == 0,
                      "join: expected parts in codes of whole blocks, each but the last a multiple "
                      "of ",
                      height, " rows, got ", rows, ". Keep them in plain numbers, or in a format ",
                      "with smaller blocks.");
    own.push_back(scales[i].narrow_symint(dim, 0, (rows + height - 1) / height));
  }
  const at::Tensor all = dim == 0 ? joined(own, may_view) : at::cat(own, dim);
  const auto sizes = quantizer.format->layout.sizes(MatrixSize(joined_sizes(codes)), direction);
  const c10::SymInt missing = sizes[static_cast<size_t>(dim)] - all.sym_size(dim);
  if (missing == 0) return all;
  c10::SymDimVector padding(all.sym_sizes().begin(), all.sym_sizes().end());
  padding[static_cast<size_t>(dim)] = missing;  // a matrix may have padding after its scales too
  return at::cat({all, all.new_zeros_symint(padding)}, dim);
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
