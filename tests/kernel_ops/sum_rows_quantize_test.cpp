// The gradient of a bias and a quantizer as one kernel op: the bits of both in turn.
#include "kernel_ops/elementwise/sum_rows_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/scalar_tensor.h>

#include "kernel_ops/elementwise/elementwise.h"
#include "kernel_ops/quantize/quantize.h"
#include "support/kernel_ops.h"
#include "support/quantizers.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_sum_rows_quantize {
namespace {

using namespace kernel_ops;
using std::array;
using Optional = std::optional<at::Tensor>;

void expect_the_bits_of_both(const Quantizer& quantizer, const at::Tensor& x) {
  const Optional given = given_for(quantizer);
  for (const auto& mask :
       {array{true, true, true}, array{true, false, false}, array{false, true, false}}) {
    const auto dtype = mask[0] ? at::kFloat : at::kBFloat16;
    const auto sums = dispatch<SumRows>(x, dtype);
    const auto codes = dispatch<Quantize>(x, given, quantizer, mask);
    const auto fused = dispatch<SumRowsQuantize>(x, given, dtype, quantizer, mask);
    EXPECT_TRUE(same(fused[0], sums[0]));
    for (size_t part = 0; part < group_size; ++part)
      EXPECT_TRUE(same(fused[part + 1], codes[part])) << "part " << part;
    if (!mask[2] || x.numel() > 8192) continue;  // composite forms are slow
    const auto reference = SumRowsQuantize::reference(x, given, dtype, quantizer, mask);
    for (size_t i = 0; i < reference.size(); ++i)
      EXPECT_EQ(reference[i].sizes(), fused[i].sizes()) << "result " << i;
  }
}

TEST(SumRowsQuantizeOp, GivesTheBitsOfBothInTurn) {
  for_every_quantizer(quantizers_and_delayed(), 1, expect_the_bits_of_both);
}

TEST(SumRowsQuantizeOp, OfManyBlocksOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  at::Tensor x = random({1100, 260}, at::kBFloat16);
  x[1000][7] = NAN;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    for (const Quantizer* quantizer : quantizers_and_delayed()) {
      SCOPED_TRACE(quantizer->text);
      expect_the_bits_of_both(*quantizer, x);
    }
  }
  at::set_num_threads(threads);
}

TEST(SumRowsQuantizeOpErrors, ScalarsAndWhatTheQuantizerDoesNotTake) {
  const auto run = [](const at::Tensor& x, const Optional& given) {
    return [=] {
      dispatch<SumRowsQuantize>(x, given, at::kFloat, *quantizers()[0], array{true, false, false});
    };
  };
  EXPECT_THAT(run(at::scalar_tensor(1.0f), {}),
              ThrowsText<c10::ValueError>("sum_rows: expected x with at least 1 dimension", "got"));
  EXPECT_THAT(run(random({4, 6}), at::scalar_tensor(1.0f)),
              ThrowsText<c10::ValueError>("sum_rows_quantize: expected no scale and no seed for ",
                                          "got one"));
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_sum_rows_quantize
