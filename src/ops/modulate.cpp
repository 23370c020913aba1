// y = x * (1 + scale) + shift: adaptive norms, gates and scales of layers.
#include "kernel_ops/elementwise/modulate.h"

#include "core/call.h"
#include "core/op_def.h"
#include "tandem/op_options.h"

namespace tandem::ops {

namespace {

double offset_of(const ModulateOptions& options) { return options.zero_centered ? 1 : 0; }

void modulate_forward(Call& call) {
  enum Read { x, scale, shift };
  const auto& options = call.options<ModulateOptions>();
  call.write<kernel_ops::Modulate>({.x = call.in(x),
                                    .scale = call.in(scale),
                                    .shift = options.shift ? call.maybe(shift) : std::nullopt,
                                    .offset = offset_of(options)});
}

void modulate_backward(Call& call) {
  enum Read { grad_y, x, scale, shift };
  const auto& options = call.options<ModulateOptions>();
  call.write<kernel_ops::ModulateBackward>(
      {.grad_y = call.in(grad_y),
       .x = call.in(x),
       .scale = call.in(scale),
       .shift = options.shift ? call.maybe(shift) : std::nullopt,
       .offset = offset_of(options),
       .output_mask = call.output_mask<4>()});
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
    .forward = {{.name = "forward",
                 .reads = {"x", "scale", "shift"},
                 .writes = {"y"},
                 .run = modulate_forward}},
    .backward = {{.name = "backward",
                  .reads = {"grad_y", "x", "scale", "shift"},
                  .writes = {"grad_x", "grad_scale", "grad_shift", "y"},
                  .run = modulate_backward}},
    .reemits = {"y"},
    .context = {"x", "scale", "shift"},
};
TANDEM_REGISTER_OP(kModulate);

}  // namespace

}  // namespace tandem::ops
