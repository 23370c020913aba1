// What a kernel op that quantizes returns, against the codes of what it makes without.
#pragma once

#include "kernel_ops/quantize/quantize.h"
#include "support/quantizers.h"

namespace tandem::testing {

/// These codes, with what the quantizer is given; none where none are wanted.
inline kernel_ops::RequestedCodes requested(const Quantizer* quantizer, GroupMask wanted) {
  if (wanted == GroupMask{}) return {};
  return {quantizer, given_for(*quantizer), wanted};
}

/// The first results are `made`, of which those that are not wanted are empty.
template <size_t N>
void expect_made(const kernel_ops::Results<N>& got, const kernel_ops::Results<N>& made,
                 c10::ArrayRef<bool> wanted) {
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(same(got[i], wanted[i] ? made[i] : made[i].new_empty({0}))) << "result " << i;
}

/// Group number `index` of K's results is what Quantize makes of `source`, to the bit; nothing
/// where nothing is asked for.
template <typename K>
void expect_codes(const kernel_ops::ResultsOf<K>& got, size_t index, const at::Tensor& source,
                  const kernel_ops::RequestedCodes& codes) {
  const Group group = kernel_ops::group_of<K>(got, index);
  const Group expected = codes ? kernel_ops::dispatch<kernel_ops::Quantize>(
                                     {source, codes.given, *codes.quantizer, codes.wanted})
                               : Group();
  for (size_t part = 0; part < group_size; ++part) {
    ASSERT_EQ(group[part].defined(), expected[part].defined()) << index << ' ' << part;
    if (codes) {
      EXPECT_TRUE(same(group[part], expected[part])) << "group " << index << ", part " << part;
    }
  }
}

template <size_t N>
void expect_sizes(const kernel_ops::Results<N>& got, const kernel_ops::Results<N>& expected) {
  for (size_t i = 0; i < N; ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << i;
    if (got[i].defined()) {
      EXPECT_EQ(got[i].sizes(), expected[i].sizes()) << i;
    }
  }
}

}  // namespace tandem::testing
