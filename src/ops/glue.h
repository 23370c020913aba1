// What the steps that no op asks for do where they run; planner/glue.h makes the steps.
#pragma once

#include <array>

#include "core/call.h"
#include "kernel_ops/quantize/delayed.h"
#include "tandem/export.h"

namespace tandem {

/// Of whom a watched quantization tells: number of the pipeline, place of the op, role, and of an
/// op with groups which group, else -1.
struct Watch {
  int64_t pipeline = 0;
  size_t op = 0;
  Role role = Role::input;
  int64_t group = -1;
};

/// Codes and scales of a tensor, as a front that has a type for such puts them into one, and as
/// they are read from one that comes back as an input. Absent parts are undefined.
struct TensorInCodes {
  const Quantizer* quantizer = nullptr;
  std::array<at::Tensor, group_amax> parts = {};
  at::ScalarType dtype;
  c10::SymDimVector sizes;
};
using QuantizedWriter = at::Tensor (*)(const TensorInCodes& codes);
TANDEM_API void set_quantized_writer(QuantizedWriter writer);

/// Implementations of these steps, whose reads and writes planner/glue.cpp names.
namespace glue {

void cast(Call& call);
void add(Call& call);
void join(Call& call);
void join_codes(Call& call);
void split(Call& call);
void rename(Call& call);
void draw_seed(Call& call);
void dequantize(Call& call);
void matrix_amaxes(Call& call);
void behind(Call& call);

/// Its options are a Quantizer.
void quantize(Call& call);

/// Of what is told about quantizing: of one tensor, or of groups.
struct WatchOptions {
  const Quantizer* quantizer;
  Watch watch;
};
void watched_quantize(Call& call);
void watched_groups(Call& call);

/// Of what takes scales from a recipe's state, or leaves amaxes in it.
struct SlotOptions {
  kernel_ops::SlotRange slots;
  const ScaleUpdate* update;
};
void take_scale(Call& call);
template <bool kCounts>
void record_amax(Call& call);

/// Of what makes codes of a weight, which reads the pieces of the weight, its workspace, and the
/// gradients that it stands behind.
struct OfWeight {
  const Quantizer* quantizer;
  size_t pieces;
};
template <bool kBackward>
void refresh_weight(Call& call);
void weight_codes(Call& call);

template <bool kNeedsGrad>
void hand_over(Call& call);

}  // namespace glue
}  // namespace tandem
