// y = x * (1 + scale) + shift: adaptive norms, gates and scales of layers.
#include "kernel_ops/elementwise/modulate.h"

#include "core/call.h"
#include "core/op_def.h"
#include "ops/structure.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

double offset_of(const ModulateOptions& options) { return options.zero_centered ? 1 : 0; }

/// Writes y, in forward and where backward re-emits it.
void write_modulated(Call& call, size_t x, size_t scale, size_t shift, size_t y) {
  const auto& options = call.options<ModulateOptions>();
  const auto added = options.shift ? call.maybe(shift) : std::nullopt;
  TORCH_CHECK_VALUE(
      !added || is_callers(call, shift) || added->sym_sizes() == call.in(x).sym_sizes(),
      "modulate: expected shift of the shape of x, ", call.in(x).sym_sizes(),
      ", where a channel brings it, got ", added->sym_sizes(),
      ". Pass it to the call: autograd sums the gradient of an argument.");
  auto results = call.run<kernel_ops::Modulate>(
      {.x = call.in(x), .scale = call.in(scale), .shift = added, .offset = offset_of(options)});
  call.out(y, std::move(results[0]));
}

void modulate_forward(Call& call) {
  enum Read { x, scale, shift };
  write_modulated(call, x, scale, shift, /*y=*/0);
}

void modulate_grad_x(Call& call) {
  enum Read { grad_y, scale };
  const auto results =
      call.run<kernel_ops::Modulate>({.x = call.in(grad_y),
                                      .scale = call.in(scale),
                                      .offset = offset_of(call.options<ModulateOptions>())});
  call.out(0, results[0].to(call.out_type(0).dtype));
}

void modulate_grad_scale(Call& call) {
  enum Read { grad_y, x, scale, shift };
  enum Write { grad_scale, y };
  if (call.wants(y)) write_modulated(call, x, scale, shift, y);
  if (!call.wants(grad_scale)) return;
  auto results = call.run<kernel_ops::ModulateScaleBackward>(
      {.grad_y = call.in(grad_y), .x = call.in(x), .scale = call.in(scale)});
  call.out(grad_scale, std::move(results[0]));
}

size_t absent_shifts(const void* options) {
  return static_cast<const ModulateOptions*>(options)->shift ? 0 : 1;
}

const OpDef kModulate{
    .name = "modulate",
    .formula = "y = x * (1 + scale) + shift",
    .signature = {ModulateOptions{},
                  {{"zero_centered", &ModulateOptions::zero_centered,
                    "the factor is 1 + scale; else it is scale"},
                   {"shift", &ModulateOptions::shift, "shift is an extra input; else it is 0"}}},
    .inputs = {"x", "scale", "shift"},
    .absent_inputs = absent_shifts,
    .dtype = DtypeRule::promote,
    // Autograd sums the gradient of a shift that is smaller than x.
    .same_gradients = {{"grad_shift", "grad_y"}},
    .forward = {{.name = "forward",
                 .reads = {"x", "scale", "shift"},
                 .writes = {"y"},
                 .run = modulate_forward}},
    // Two steps, because the gradient of x does not need x.
    .backward = {{.name = "grad_x",
                  .reads = {"grad_y", "scale"},
                  .writes = {"grad_x"},
                  .run = modulate_grad_x},
                 {.name = "grad_scale",
                  .reads = {"grad_y", "x", "scale", "shift"},
                  .writes = {"grad_scale", "y"},
                  .run = modulate_grad_scale}},
    .reemits = {"y"},
    .reemit_reads = {"shift"},
    .context = {"x", "scale", "shift"},
};
TANDEM_REGISTER_OP(kModulate);

}  // namespace

}  // namespace tandem::ops
