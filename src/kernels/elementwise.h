// Sums, scaling and dropout, each in one pass over memory.
#pragma once

#include "kernels/partial_sums.h"
#include "kernels/views.h"

namespace tandem::kernels::cpu {

/// out = x + bias + extra, summed from the left in float32, rounded once. Optional: bias, extra.
void add_bias(ConstRows x, ConstVector bias, ConstRows extra, Rows out);

/// out = (x * a) * b, rounded once, for the two scales of a product: a * b could overflow or
/// vanish.
void multiply_twice(ConstRows x, float a, float b, Rows out);

/// sums[c] = sum over rows of x[r, c], in float32, rounded once; 0 for no rows.
void sum_rows(ConstRows x, Vector sums);

/// sum_some_rows adds some rows of a matrix to the sums of their blocks, and add_partial_sums
/// computes sums[c] from the blocks of all `rows` rows. Together they give the bits of sum_rows.
void sum_some_rows(ConstRows x, const PartialSums& part);
void add_partial_sums(const PartialSums& part, size_t rows, Vector sums);

/// out = keep ? x * factor : 0, where factor = 1 / (1 - p) rounded to float32, keep = u >= p and u
/// = (word >> 8) * 2^-24. For the element with the linear index e = r * cols + c, word is word e %
/// 4 of Philox4x32-10 with key = seed and counter e / 4. A seed gives one mask on every target and
/// thread count. p = 1 gives zeros. The backward of dropout is dropout of grad_y with forward's
/// seed.
void dropout(ConstRows x, uint64_t seed, double p, Rows out);

/// out = dropout(x + bias) + extra in float32, rounded once. Optional: bias, extra.
void dropout_add(ConstRows x, ConstVector bias, uint64_t seed, double p, ConstRows extra, Rows out);

/// grad_x = dropout(grad_y); sums[c] = sum over rows of grad_x[r, c], which is rounded to the
/// element of grad_y before, in float32, rounded once: the bits of dropout and sum_rows. Optional:
/// grad_x.
void dropout_backward_bias(ConstRows grad_y, uint64_t seed, double p, Rows grad_x, Vector sums);

/// dropout_backward_bias for some rows of a matrix, which begin at row `part.first`. The rows have
/// the element of grad_y. Optional: the sums.
void dropout_some_rows_backward(ConstRows grad_y, uint64_t seed, double p, Rows grad_x,
                                const PartialSums& part);

}  // namespace tandem::kernels::cpu
