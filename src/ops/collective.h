// Collectives over a process group, along the first dimension. In each direction one step starts
// the collective and another one waits for it, so that other steps can run between them.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y = the rows of all ranks. The gradient of x is this rank's rows of the sum of all ranks'
/// gradients. Backward gathers y once more instead of keeping it.
///
/// Shapes:  x [rows, ...] -> y [size * rows, ...].
extern const OpDef kAllGather;

/// y = this rank's rows of the sum of x over ranks. The gradient of x is the rows of all ranks'
/// gradients.
///
/// Shapes:  x [rows, ...] -> y [rows / size, ...].
/// Throws:  c10::ValueError unless the size of the group divides rows.
extern const OpDef kReduceScatter;

/// y = the sum of x over ranks, which all ranks then hold. The gradient of x is the gradient of y,
/// which all ranks hold too.
///
/// Shapes:  x any -> y like x.
extern const OpDef kAllReduce;

/// y = x, which all ranks hold. The gradient of x is the sum of the gradients over ranks.
///
/// Shapes:  x any -> y like x.
extern const OpDef kReduceGradient;

}  // namespace tandem::ops
