#include "core/call.h"
#include "core/fusion.h"
#include "fusions/refusals.h"
#include "kernel_ops/elementwise/elementwise.h"
#include "tandem/op_options.h"

namespace tandem::fusions {

namespace {

template <bool kBias>
void dropout_add(Call& call) {
  enum Read { x, seed, extra, bias };
  const c10::SymIntArrayRef sizes = call.in(x).sym_sizes();
  c10::SymDimVector wide;
  if (call.in(extra).sym_sizes() != sizes) wide = ops::sizes_of_sum(call, extra, sizes);
  const bool is_wider = !wide.empty() && c10::SymIntArrayRef(wide) != sizes;  // the mask is of x
  std::optional<at::Tensor> added;
  if (!is_wider) added = added_by(call, extra, sizes);
  auto results =
      call.run<kernel_ops::Dropout>({.x = call.in(x),
                                     .bias = kBias ? call.maybe(bias) : std::nullopt,
                                     .seed = call.in(seed),
                                     .p = call.options<ops::DropoutOptions>(kBias ? 1 : 0).p,
                                     .extra = added},
                                    {is_wider ? at::Tensor() : memory_for_sum(call, *added)});
  if (is_wider) results[0] = ops::sum_of_sizes(call, results[0], extra, wide);
  write_sum(call, 0, std::move(results[0]), call.in(extra));
}

void dropout_backward(Call& call) {
  enum Read { grad_y, seed, given };
  enum Write { grad_x, grad_bias, codes };
  const at::Tensor& gradient = call.in(grad_y);
  call.write<kernel_ops::DropoutBackward>(
      {.grad_y = gradient,
       .seed = call.in(seed),
       .p = call.options<ops::DropoutOptions>(0).p,
       .dtype = call.wants(grad_bias) ? call.out_type(grad_bias).dtype : gradient.scalar_type(),
       .output_mask = call.output_mask<2>(),
       .codes = codes_of_member(call, 2, given, codes)});
}

template <uint32_t kSum>
Refusal refuse(const Match& match) {
  if (is_own_extra(match, kSum)) return "what is kept is the extra input of the sum";
  if (auto refusal = refuse_in_place(match, kSum)) return refusal;
  return refuse_foreign_extra(match, kSum, {kSum - 1, "y"});
}

PatternStep add() {
  return PatternStep("add_extra_input|add_extra_input.in_place").through("y", kAnyRead);
}

}  // namespace

extern const Fusion kBiasDropoutAdd{
    .name = "bias_dropout_add",
    .pattern = {"bias", "dropout", add()},
    .run = {.reads = {{0, "x"}, {1, "seed"}, {2, "extra"}, {0, "bias"}},
            .writes = {{2, "y"}},
            .run = dropout_add<true>,
            .mutates = {2}},
    .refuse = refuse<2>,
    .picture = "x -> + bias -> dropout -> + extra -> y",
};

extern const Fusion kDropoutAdd{
    .name = "dropout_add",
    .pattern = {"dropout", add()},
    .run = {.reads = {{0, "x"}, {0, "seed"}, {1, "extra"}},
            .writes = {{1, "y"}},
            .run = dropout_add<false>,
            .mutates = {1}},
    .refuse = refuse<1>,
    .picture = "x -> dropout -> + extra -> y",
};

extern const Fusion kDropoutBackward{
    .name = "dropout_backward",
    .pass = Pass::backward,
    .pattern =
        {"dropout.backward", PatternStep("bias.grad_bias").optional("_bias"),
         PatternStep(StepKind::quantize).through("grad_x", "x").behind(0).optional("_quantize")},
    .run = {.reads = {{0, "grad_y"}, {0, "seed"}, {2, "given"}},
            .writes = {{0, "grad_x"},
                       {1, "grad_bias"},
                       {2, "row_codes"},
                       {2, "column_codes"},
                       {2, "amax"}},
            .run = dropout_backward},
    .refuse = refuse_without_codes,
    .picture =
        "grad_y, seed -> dropout.backward -> grad_x (if demanded) (-> sum over rows -> grad_bias) "
        "(-> codes, scales, amax)",
};

}  // namespace tandem::fusions
