// Several tensors as one, joined along their first dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "quantization/formats/quantizer.h"
#include "tandem/export.h"

namespace tandem::kernel_ops {

/// Throws: c10::ValueError if the pieces, at least one, differ in more than their first size, or in
///         their device.
void check_pieces(at::TensorList pieces);

/// Copies of the pieces that are adjacent in one memory. Each has a storage of its own, which keeps
/// the memory alive, so that code which compares storages takes them for separate tensors.
TANDEM_API std::vector<at::Tensor> laid_together(at::TensorList pieces);

/// One tensor over the memory of adjacent pieces; nullopt if they are not adjacent in one storage
/// or in the memory of laid_together. Autograd does not see the view. The pieces must be dense
/// tensors with memory and at least one dimension.
TANDEM_API std::optional<at::Tensor> memory_of_pieces(at::TensorList pieces);

/// All pieces in one tensor. `may_view`: adjacent pieces are viewed instead of copied, which
/// autograd does not see. A single piece is returned itself.
at::Tensor joined(at::TensorList pieces, bool may_view);

/// Whether products multiply each piece of a matrix where it lies, instead of a copy of all pieces:
/// matrices on the CPU, none of which is small. A copy reads and writes what a product of few rows
/// only reads. The answer depends on dtypes and sizes alone, because the last bits of a product
/// depend on how it is cut.
TANDEM_API bool are_multiplied_apart(at::TensorList pieces);

/// Whether the codes of joined matrices can be joined too, if each matrix but the last ends with a
/// block: the codes are not packed, and no scale or amax belongs to all rows.
TANDEM_API bool codes_join(const Quantizer& quantizer);
/// The scales of joined matrices in one direction. `codes`: the codes of each matrix.
///
/// Throws: c10::ValueError if a matrix other than the last ends within a block.
at::Tensor joined_scales(at::TensorList scales, at::TensorList codes, const Quantizer& quantizer,
                         Direction direction, bool may_view);

/// The sizes of all pieces in one tensor.
c10::SymDimVector joined_sizes(at::TensorList pieces);

/// A tensor with the sizes, dtype and device of all pieces in one, but no memory for its elements.
/// A single piece is returned itself.
at::Tensor like_joined(at::TensorList pieces);

}  // namespace tandem::kernel_ops
