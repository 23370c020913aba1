// Ops that move values rather than compute them: most are renames and cost nothing once planned.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/call.h"
#include "core/op_def.h"

namespace tandem::ops {

/// y is x.
extern const OpDef kIdentity;

/// y = x.reshape(shape): a view where the layout of x allows one. `shape` may hold one -1.
extern const OpDef kReshape;

/// y = x * factor, in the dtype of x.
extern const OpDef kConstantScale;

/// In training y = keep ? x / (1 - p) : 0, the mask from a seed drawn per call; in evaluation y is
/// x. Backward keeps the seed, not the mask.
extern const OpDef kDropout;

/// Under a recipe: y is x rounded to the recipe's format of inputs (`forward`), the gradient
/// rounded to that of gradients (`backward`). Products that follow use the codes as they are.
/// Without a recipe y is x.
extern const OpDef kQuantize;

/// y = x + extra; dtypes promote. `in_place` writes the sum into the caller's tensor, unless that
/// holds codes.
///
/// Shapes: extra and x broadcast, as in torch; y has the sizes of extra in place. Autograd sums
///         gradients of what the caller passes, so the caller's alone may be smaller than y where
///         its gradient is asked for.
/// Throws: c10::ValueError where the shapes differ, or where `in_place` would overwrite what
///         autograd needs.
extern const OpDef kAddExtraInput;

/// The sizes of a sum of an x of `sizes` and the extra input, a read of `call`: larger ones where
/// both broadcast to these and gradients allow it, else those of x.
c10::SymDimVector sizes_of_sum(const Call& call, size_t read, c10::SymIntArrayRef sizes);

/// Instead of its options, of a sum that `in_place` asks for where the plan is traced, and whose
/// result is a tensor of its own: the caller's has to have room for it all the same.
const Options& caller_holds_sum();

/// The extra input of a sum, a read of `call`, as large as the sum: a tensor of the caller's is
/// expanded. Any other is what it is, for the kernel to check. Throws c10::ValueError where the
/// caller's has to hold the sum and does not.
at::Tensor extra_of(const Call& call, size_t read, c10::SymIntArrayRef sizes);

/// Itself, or a larger copy.
at::Tensor broadcast_to(const at::Tensor& x, c10::SymIntArrayRef sizes);

/// x, broadcast to `sizes`, plus the extra input.
at::Tensor sum_of_sizes(Call& call, const at::Tensor& x, size_t extra, c10::SymIntArrayRef sizes);

/// Throws c10::ValueError where the caller's tensor cannot hold its sum with x.
void check_target(const Call& call, const at::Tensor& target, const at::Tensor& x);

/// y and the extra output are x; backward adds their gradients.
extern const OpDef kMakeExtraOutput;

}  // namespace tandem::ops
