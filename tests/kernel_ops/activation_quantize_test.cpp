// An activation, or its gradient, with the quantizers behind it in one kernel op: the bits of all
// in turn.
#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/unit/activation.h"
#include "support/codes.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_activation_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Forward = ActivationForward;
using Backward = ActivationBackward;
using Optional = std::optional<at::Tensor>;

class ActivationQuantizeOp : public ::testing::TestWithParam<bool> {
 protected:
  static bool is_gated() { return GetParam(); }
  static int64_t width_step() { return is_gated() ? 2 : 1; }
};
INSTANTIATE_TEST_SUITE_P(Units, ActivationQuantizeOp, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "glu" : "activation"; });

TEST_P(ActivationQuantizeOp, GivesTheBitsOfBothInTurn) {
  for_every_quantizer(
      quantizers_and_delayed(), width_step(), [](const Quantizer& quantizer, const at::Tensor& x) {
        const at::Tensor bias = random({x.size(-1)}, at::kFloat, 7);
        for (const auto& [y, z, codes] : {std::tuple{true, true, GroupMask{true, true, true}},
                                          {false, false, GroupMask{true, false, true}},
                                          {false, true, GroupMask{true, true, false}},
                                          {true, false, GroupMask{false, false, true}}}) {
          Forward::Args args{.x = x,
                             .bias = z ? Optional(bias) : Optional(),
                             .activation = "gelu",
                             .is_gated = is_gated(),
                             .output_mask = {true, true}};
          const auto made = dispatch<Forward>(args);
          args.output_mask = {z, y};
          args.codes = requested(&quantizer, codes);
          const auto fused = dispatch<Forward>(args);
          expect_made(fused, made, args.output_mask);
          expect_codes<Forward>(fused, 0, made[Forward::y], args.codes);
          if (y) expect_sizes(run_reference<Forward>(args), fused);  // composite forms are slow
        }
      });
}

TEST_P(ActivationQuantizeOp, OfGradients) {
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  size_t q = 0;
  for_every_quantizer(all, width_step(), [&](const Quantizer& one, const at::Tensor& z) {
    const Quantizer* const other = all[q++ % all.size()];
    SCOPED_TRACE("y: " + other->text);
    std::vector<int64_t> sizes = z.sizes().vec();
    sizes.back() /= width_step();
    const at::Tensor grad_y = random(sizes, z.scalar_type(), 3);
    Backward::Args args{.grad_y = grad_y,
                        .z = z,
                        .activation = "gelu",
                        .is_gated = is_gated(),
                        .output_mask = {true, true, true}};
    const auto made = dispatch<Backward>(args);
    struct Wanted {
      array<bool, 3> results;
      GroupMask of_grad, of_y;
    };
    for (const Wanted& wanted : {Wanted{{true, true, true}, {true, true, true}, {true, true, true}},
                                 Wanted{{false, false, false}, {true, false, true}, {}},
                                 Wanted{{false, false, true}, {true, false, true}, {false, true}},
                                 Wanted{{false, true, true}, {true, true, false}, {}},
                                 Wanted{{true, false, true}, {false, false, true}, {true, true}},
                                 Wanted{{true, false, true}, {}, {false, true, false}},
                                 Wanted{{false, false, false}, {}, {true, true, true}},
                                 Wanted{{false, true, false}, {}, {false, false, true}}}) {
      args.output_mask = wanted.results;
      args.codes = requested(&one, wanted.of_grad);
      args.y_codes = requested(other, wanted.of_y);
      const auto fused = dispatch<Backward>(args);
      expect_made(fused, made, wanted.results);
      expect_codes<Backward>(fused, 0, made[Backward::grad_z], args.codes);
      expect_codes<Backward>(fused, 1, made[Backward::y], args.y_codes);
      if (wanted.results[Backward::grad_z] && wanted.results[Backward::y])
        expect_sizes(run_reference<Backward>(args), fused);  // composite forms are slow
    }
  });
}

TEST(ActivationQuantizeOps, SumsOfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  const std::vector<const Quantizer*> all = quantizers_and_delayed();
  for (size_t q = 0; q < all.size(); q += kSanitized ? 5 : 1)
    for (const Quantizer* const of_y : {all[q], all[(q + 3) % all.size()]})
      for (const int64_t rows : {of_y == all[q] ? 600 : q % 4 == 0 ? 4500 : 1100}) {
        SCOPED_TRACE(::testing::Message() << all[q]->text << ", y: " << of_y->text << ' ' << rows);
        const at::Tensor grad_y = random({rows, 40}, at::kBFloat16, 2);
        at::Tensor z = random({rows, 80}, at::kFloat);
        z[rows - 2][3] = NAN;
        z[rows / 2][60] = INFINITY;
        Backward::Args args{.grad_y = grad_y,
                            .z = z,
                            .activation = "silu",
                            .is_gated = true,
                            .output_mask = {true, true, true}};
        const auto made = dispatch<Backward>(args);
        args.output_mask = {false, false, true};
        args.codes = requested(all[q], {true, true, true});
        args.y_codes = requested(of_y, {true, true, true});
        for (const int count : {1, 2, 3}) {
          at::set_num_threads(count);
          const auto fused = dispatch<Backward>(args);
          expect_made(fused, made, args.output_mask);
          expect_codes<Backward>(fused, 0, made[Backward::grad_z], args.codes);
          expect_codes<Backward>(fused, 1, made[Backward::y], args.y_codes);
        }
        at::set_num_threads(threads);
      }
}

TEST(ActivationQuantizeOps, OfManyBlocksWithNanAndInfinity) {
  for (const Quantizer* quantizer : quantizers_and_delayed())
    for (const auto dtype : kKernelDtypes) {
      SCOPED_TRACE(::testing::Message() << quantizer->text << ' ' << dtype);
      at::Tensor z = random({600, 256}, dtype);
      z[17][3] = NAN;
      z[599][200] = INFINITY;
      Forward::Args args{.x = z, .activation = "silu", .is_gated = true};
      const at::Tensor y = dispatch<Forward>(args)[Forward::y];
      args.output_mask = {false, false};
      for (const bool both : {false, true}) {
        args.codes = requested(quantizer, {true, both, true});
        expect_codes<Forward>(dispatch<Forward>(args), 0, y, args.codes);
      }
    }
}

TEST(ActivationQuantizeOpErrors, AScaleThatTheQuantizerDoesNotTake) {
  EXPECT_ERROR(
      dispatch<Forward>(
          {.x = random({4, 6}),
           .activation = "silu",
           .is_gated = true,
           .codes =
               RequestedCodes{quantizers()[0], at::scalar_tensor(1.0f), {true, false, false}}}),
      c10::ValueError, "activation_forward: expected no scale and no seed for ", "got one");
}

TEST(ActivationQuantizeOpErrors, CodesWithoutAQuantizer) {
  for (const bool is_given : {false, true})
    EXPECT_ERROR(
        dispatch<Backward>(
            {.grad_y = random({4, 3}),
             .z = random({4, 6}),
             .activation = "silu",
             .is_gated = true,
             .output_mask = {true, false, false},
             .y_codes = RequestedCodes{nullptr,
                                       is_given ? Optional(at::scalar_tensor(1.0f)) : Optional(),
                                       {!is_given, false, false}}}),
        c10::ValueError, "activation_backward: expected a quantizer for what ",
        "got none. Name one");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_activation_quantize
