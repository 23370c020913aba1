// Quantize, Dequantize and Decode against the vectors of tests/data/README.md: kernel and composite
// reference, byte by byte.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <cstring>

#include "kernel_ops/quantize.h"
#include "support/safetensors.h"
#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

using namespace kernel_ops;
using Optional = std::optional<at::Tensor>;

/// A file of vectors and the cases in it that have `part` in their name.
struct Family {
  /// `format`: the prefix of its formats' names.
  const char *file, *part, *format;
  int cases;
};
std::ostream& operator<<(std::ostream& out, const Family& family) { return out << family.part; }

template <typename T>
at::Tensor raw(const Safetensors& file, const std::string& name, at::ScalarType dtype) {
  const std::vector<T> values = file.read<T>(name);
  std::vector<int64_t> sizes;
  for (const size_t size : file.shape(name)) sizes.push_back(static_cast<int64_t>(size));
  at::Tensor tensor = at::empty(sizes, dtype);
  if (!values.empty()) std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

const Quantizer& quantizer_of(const std::string& prefix, const nlohmann::json& options) {
  Quantizer parsed = quantizer(prefix + options.at("fmt").get<std::string>());
  parsed.amax_epsilon = options.value("eps", 0.0);
  parsed.power_of_two = options.value("pow2", false);
  parsed.square_blocks = options.value("two_d", false);
  return quantizer(parsed);
}

class GoldenQuantize : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, GoldenQuantize,
                         ::testing::Values(Family{"golden_fp8", "_current_", "fp8_", 12},
                                           Family{"golden_formats", "_mxfp8_", "mxfp8_", 13}),
                         [](const auto& info) { return std::string(info.param.format) + "all"; });

TEST_P(GoldenQuantize, CodesScalesAndNumbers) {
  const Safetensors file(std::string(TANDEM_SOURCE_DIR "/tests/data/") + GetParam().file +
                         ".safetensors");
  int cases = 0;
  for (const auto& [name, text] : file.metadata().items()) {
    if (name.find(GetParam().part) == std::string::npos) continue;
    SCOPED_TRACE(name);
    ++cases;
    const auto options = nlohmann::json::parse(text.get<std::string>());
    const Quantizer& quantizer = quantizer_of(GetParam().format, options);
    const at::Tensor x = options.at("dtype") == "fp32"
                             ? raw<uint32_t>(file, name + "/x", at::kFloat)
                             : raw<uint16_t>(file, name + "/x", at::kBFloat16);
    constexpr std::array kAll{true, true, true};
    for (const Group& group : {dispatch<Quantize>(x, Optional(), quantizer, kAll),
                               Quantize::reference(x, Optional(), quantizer, kAll)}) {
      const bool both = serves_both_directions(quantizer);
      for (const bool column : {false, true}) {
        if (both && column) continue;
        const std::string prefix = name + (column ? "/col_" : "/row_");
        const at::Tensor& codes = group[column ? column_codes : row_codes];
        const at::Tensor& scale = group[column ? column_scale : row_scale];
        EXPECT_TRUE(same(codes, raw<uint8_t>(file, prefix + "data", at::kByte))) << prefix;
        EXPECT_TRUE(both ? same(scale.view({1}),
                                raw<uint32_t>(file, name + "/scale_inv", at::kFloat).view({1}))
                         : same(scale, raw<uint8_t>(file, prefix + "scale", at::kByte)))
            << prefix;
        const at::Tensor numbers = raw<uint32_t>(file, prefix + "dequant", at::kFloat);
        EXPECT_TRUE(
            same(dispatch<Dequantize>(codes, scale, quantizer, column, at::kFloat)[0], numbers));
        EXPECT_TRUE(
            same(Dequantize::reference(codes, scale, quantizer, column, at::kFloat)[0], numbers));
        if (!both) {
          EXPECT_TRUE(same(dispatch<Decode>(codes, scale, quantizer, column)[0], numbers));
        }
      }
    }
  }
  EXPECT_EQ(cases, GetParam().cases);
}

TEST(GoldenDelayedRun, CodesOfEveryStepWithTheScaleSoFar) {
  const Safetensors file(TANDEM_SOURCE_DIR "/tests/data/golden_formats.safetensors");
  int cases = 0;
  for (const auto& [name, text] : file.metadata().items()) {
    if (name.find("delayed_run_") == std::string::npos) continue;
    SCOPED_TRACE(name);
    ++cases;
    const auto options = nlohmann::json::parse(text.get<std::string>());
    const Quantizer& delayed =
        quantizer("fp8_" + options.at("fmt").get<std::string>() + ":delayed");
    const at::Tensor x = raw<uint16_t>(file, name + "/x", at::kBFloat16),
                     codes = raw<uint8_t>(file, name + "/data", at::kByte).view(x.sizes()),
                     inverse = raw<uint32_t>(file, name + "/scale_inv", at::kFloat).flatten(),
                     after = raw<uint32_t>(file, name + "/scale_after", at::kFloat).flatten();
    Optional scale(at::ones({1}));
    for (int64_t step = 0; step < x.size(0); ++step) {
      constexpr std::array kRows{true, false, true}, kAmaxOnly{false, false, true};
      const auto got = dispatch<Quantize>(x[step], scale, delayed, kRows),
                 expected = Quantize::reference(x[step], scale, delayed, kRows);
      for (const Group& group : {got, expected}) {
        EXPECT_TRUE(same(group[row_codes], codes[step]));
        EXPECT_TRUE(same(group[row_scale], inverse[step]));
        EXPECT_TRUE(same(group[group_amax],
                         dispatch<Quantize>(x[step], scale, delayed, kAmaxOnly)[group_amax]));
      }
      scale = after.slice(0, step, step + 1);
    }
  }
  EXPECT_EQ(cases, 1);
  EXPECT_THAT(
      [] {
        dispatch<Quantize>(at::ones({2}), Optional(), quantizer("fp8_e4m3:delayed"),
                           std::array{true, false, true});
      },
      ThrowsText<c10::ValueError>("quantize: expected a scale for fp8_e4m3:delayed, got none"));
}

}  // namespace
}  // namespace tandem::testing
