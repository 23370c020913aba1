// The functions of the steps that the planner adds between steps of ops (planner/glue.h).
#pragma once

#include "core/call.h"
#include "kernel_ops/quantize/delayed.h"
#include "tandem/export.h"

namespace tandem {

/// The origin of a quantization in a report: the number of the pipeline, the index of the op in it,
/// the operand's role, and the group, -1 for an op without groups.
struct Watch {
  int64_t pipeline = 0;
  size_t op = 0;
  Role role = Role::input;
  int64_t group = -1;
};

/// A front's function that packs the codes of an output into its own type of tensor.
using QuantizedWriter = at::Tensor (*)(const Codes& codes);
TANDEM_API void set_quantized_writer(QuantizedWriter writer);

/// The functions of the added steps. planner/glue.cpp names the reads and writes of each step.
namespace glue {

void cast(Call& call);
void add(Call& call);
void join(Call& call);
void join_codes(Call& call);
void count_rows(Call& call);
void split(Call& call);
void rename(Call& call);
void draw_seed(Call& call);
void dequantize(Call& call);
void matrix_amaxes(Call& call);
void behind(Call& call);

/// The options of this step are a Quantizer.
void quantize(Call& call);

/// Options of the steps that report on the quantization of one tensor, or of each of its groups.
struct WatchOptions {
  const Quantizer* quantizer;
  Watch watch;
};
void watched_quantize(Call& call);
void watched_groups(Call& call);

/// Options of the steps that read scales from a recipe's state, or record amaxes in it.
struct SlotOptions {
  kernel_ops::SlotRange slots;
  const ScaleUpdate* update;
};
void take_scale(Call& call);
template <bool kCounts>
void record_amax(Call& call);

/// Options of the steps that compute codes of a weight. Such a step reads the pieces of the weight,
/// its workspace, and, in backward of traced code, a gradient that must precede the codes.
struct OfWeight {
  const Quantizer* quantizer;
  size_t pieces;
};
template <bool kBackward>
void refresh_weight(Call& call);
void weight_codes(Call& call);

/// `kCopies`: another output holds the codes themselves.
template <bool kNeedsGrad, bool kCopies>
void hand_over(Call& call);

}  // namespace glue
}  // namespace tandem
