// Several tensors as one, one behind the other along their first dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "quantization/formats/quantizer.h"
#include "tandem/export.h"

namespace tandem::kernel_ops {

/// Throws: c10::ValueError where the pieces, of which there is one at least, differ in more than
///         their first size, or in their device.
void check_pieces(at::TensorList pieces);

/// Copies of the pieces that lie one behind the other in one memory, each with a storage of its
/// own, which holds the memory: who tells shared tensors by their storage takes them for the
/// several tensors that they are.
TANDEM_API std::vector<at::Tensor> laid_together(at::TensorList pieces);

/// The memory of pieces that lie so, or in one storage, as one tensor, of which autograd is not
/// told; nothing where they do not. They are plain tensors that have memory, of one dimension at
/// least.
TANDEM_API std::optional<at::Tensor> memory_of_pieces(at::TensorList pieces);

/// All in one tensor. `may_view`: without a copy where they lie so in one memory, which autograd is
/// not told of; one piece is itself in any case.
at::Tensor joined(at::TensorList pieces, bool may_view);

/// Whether codes of matrices, one behind the other, are those of one, whose first rows end where a
/// block does: no scale serves more.
bool codes_join(const Quantizer& quantizer);
/// The scales of such matrices, as those of one in a direction. `codes`: of each.
/// Throws: c10::ValueError where one but the last ends inside of a block.
at::Tensor joined_scales(at::TensorList scales, at::TensorList codes, const Quantizer& quantizer,
                         Direction direction, bool may_view);

/// Of all in one.
c10::SymDimVector joined_sizes(at::TensorList pieces);

/// A tensor with the sizes, dtype and device of all in one, but no memory for its elements. One
/// piece is itself.
at::Tensor like_joined(at::TensorList pieces);

}  // namespace tandem::kernel_ops
