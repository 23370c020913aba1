// The gradient of dropout and a quantizer as one kernel op: the bits of both in turn.
#include "kernel_ops/elementwise/dropout_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_dropout_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

void expect_the_bits_of_both(const Quantizer& quantizer, const at::Tensor& grad_y) {
  const at::Tensor seed = at::scalar_tensor(77, at::kLong);
  const Optional given = given_for(quantizer);
  for (const auto& mask :
       {array{true, true, true, true, true}, array{false, false, true, true, false},
        array{false, true, true, false, true}, array{true, false, false, false, true}}) {
    const auto dtype = mask[0] ? at::kFloat : at::kBFloat16;
    const auto made = dispatch<DropoutBackwardBias>(grad_y, seed, 0.3, dtype, array{true, true});
    const auto codes =
        dispatch<Quantize>(made[0], given, quantizer, array{mask[2], mask[3], mask[4]});
    const auto fused =
        dispatch<DropoutBackwardQuantize>(grad_y, seed, given, 0.3, dtype, quantizer, mask);
    for (size_t i = 0; i < 2; ++i)
      EXPECT_TRUE(same(fused[i], mask[i] ? made[i] : made[i].new_empty({0}))) << i;
    for (size_t part = 0; part < group_size; ++part)
      EXPECT_TRUE(same(fused[part + 2], codes[part])) << "part " << part;
    if (!mask[0] || grad_y.numel() > 8192) continue;  // composite forms are slow
    const auto reference =
        DropoutBackwardQuantize::reference(grad_y, seed, given, 0.3, dtype, quantizer, mask);
    for (size_t i = 0; i < reference.size(); ++i)
      EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << i;
  }
}

TEST(DropoutQuantizeOp, GivesTheBitsOfBothInTurn) {
  for_every_quantizer(quantizers_and_delayed(), 1, expect_the_bits_of_both);
}

TEST(DropoutQuantizeOp, OfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::Tensor grad_y = random({1100, 261}, at::kBFloat16);  // words of a row begin anywhere
  grad_y[1000][7] = NAN;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    for (const Quantizer* quantizer : quantizers_and_delayed()) {
      SCOPED_TRACE(quantizer->text);
      expect_the_bits_of_both(*quantizer, grad_y);
    }
  }
  at::set_num_threads(threads);
}

TEST(DropoutQuantizeOpErrors, AScaleThatTheQuantizerDoesNotTake) {
  EXPECT_THAT(
      [] {
        dispatch<DropoutBackwardQuantize>(random({4, 6}), at::scalar_tensor(77, at::kLong),
                                          Optional(at::scalar_tensor(1.0f)), 0.3, at::kFloat,
                                          *quantizers()[0], array{true, false, true, false, false});
      },
      ThrowsText<c10::ValueError>("dropout_backward_quantize: expected no scale and no seed for ",
                                  "got one"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_dropout_quantize
