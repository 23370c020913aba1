// Collectives over a process group, along the first dimension. Each direction is a step that starts
// it and one that waits for it, so that other steps stand between.
#pragma once

#include "core/op_def.h"

namespace tandem::ops {

/// y = the rows of all ranks; the gradient is the rank's rows of the sum of gradients. Backward
/// gathers y again rather than keep it.
///
/// Shapes: x [rows, ...] -> y [size * rows, ...].
extern const OpDef kAllGather;

/// y = the rank's rows of the sum of x over ranks; the gradient is the gradients of all ranks.
///
/// Shapes: x [rows, ...] -> y [rows / size, ...].
/// Throws: c10::ValueError unless the size of the group divides rows.
extern const OpDef kReduceScatter;

/// y = the sum of x over ranks, which all ranks then hold; the gradient is that of y, which they
/// hold too.
extern const OpDef kAllReduce;

/// y is x, which all ranks hold; the gradient is the sum of gradients over ranks.
extern const OpDef kReduceGradient;

}  // namespace tandem::ops
