// Quantize, Dequantize and Decode against the vectors of tests/data/README.md: kernel and composite
// reference, byte by byte.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <cstring>

#include "kernel_ops/quantize/quantize.h"
#include "quantization/formats/block_scaling.h"
#include "support/safetensors.h"
#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_golden_quantize {
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
  std::string format = prefix + options.value("fmt", "");
  if (options.value("dim", 1) == 2) format.replace(format.find("1x128"), 5, "128x128");
  Quantizer parsed = quantizer(format);
  parsed.amax_epsilon = options.value("eps", 0.0);
  parsed.power_of_two = options.value("pow2", false);
  parsed.square_blocks = options.value("two_d", false);
  parsed.hadamard = options.value("rht", false);
  parsed.stochastic_rounding = options.value("sr", false);
  return quantizer(parsed);
}

/// The vectors of blocks of 128 and of NVFP4 have their columns transposed.
bool is_transposed(const Quantizer& quantizer) {
  return quantizer.format->layout.has_amax || quantizer.scaling == &kBlockScaling;
}

class GoldenQuantize : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, GoldenQuantize,
                         ::testing::Values(Family{"golden_fp8", "_current_", "fp8_", 12},
                                           Family{"golden_blocks", "_block_e4m3_", "fp8_1x128_",
                                                  10},
                                           Family{"golden_formats", "_mxfp8_", "mxfp8_", 13},
                                           Family{"golden_blocks", "_nvfp4_", "nvfp4", 19}),
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
    Optional given;
    if (quantizer.stochastic_rounding)
      given = at::tensor({options.at("seed").get<int64_t>(), options.at("offset").get<int64_t>()},
                         at::kLong);
    const at::ScalarType scale_dtype = quantizer.format->layout.dtype;
    const Quantize::Args args{
        .x = x, .given = given, .quantizer = quantizer, .output_mask = {true, true, true}};
    for (const Group& group : {dispatch<Quantize>(args), Quantize::reference(args)}) {
      const bool both = serves_both_directions(quantizer);
      for (const Direction direction : {Direction::row, Direction::column}) {
        const bool column = direction == Direction::column;
        if (both && column) continue;
        const std::string prefix = name + (column ? "/col_" : "/row_");
        const auto part = [&](const char* field, at::ScalarType dtype) {
          const at::Tensor vectors = dtype == at::kByte
                                         ? raw<uint8_t>(file, prefix + field, dtype)
                                         : raw<uint32_t>(file, prefix + field, dtype);
          const bool is_line = !std::string(field).compare("scale") && dtype == at::kFloat;
          return column && is_transposed(quantizer) && !is_line ? vectors.t().contiguous()
                                                                : vectors;
        };
        const at::Tensor &codes = group[part_of(direction, 0)],
                         &scale = group[part_of(direction, 1)];
        EXPECT_TRUE(same(codes, part("data", at::kByte))) << prefix;
        EXPECT_TRUE(quantizer.format->layout.applies_at_end
                        ? same(scale.view({1}),
                               raw<uint32_t>(file, name + "/scale_inv", at::kFloat).view({1}))
                        : same(scale, part("scale", scale_dtype)))
            << prefix;
        Optional amax;
        if (quantizer.format->layout.has_amax) {
          amax = group[part_of(direction, 2)];
          EXPECT_TRUE(same(*amax, raw<uint32_t>(file, prefix + "amax", at::kFloat))) << prefix;
        }
        const at::Tensor numbers = part("dequant", at::kFloat);
        const Dequantize::Args decoding{.codes = codes,
                                        .dequant_scale = scale,
                                        .quantizer = quantizer,
                                        .column = column,
                                        .dtype = at::kFloat,
                                        .amax = amax,
                                        .sizes = numbers.sym_sizes()};
        EXPECT_TRUE(same(dispatch<Dequantize>(decoding)[0], numbers));
        EXPECT_TRUE(same(Dequantize::reference(decoding)[0], numbers));
        if (!quantizer.format->layout.applies_at_end && !is_packed(quantizer)) {
          EXPECT_TRUE(same(dispatch<Decode>({.codes = codes,
                                             .dequant_scale = scale,
                                             .quantizer = quantizer,
                                             .column = column,
                                             .amax = amax})[0],
                           numbers));
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
      const at::Tensor numbers = x[step];
      const auto asking = [&](GroupMask mask) -> Quantize::Args {
        return {.x = numbers, .given = scale, .quantizer = delayed, .output_mask = mask};
      };
      const auto rows = asking({true, false, true}), amax = asking({false, false, true});
      for (const Group& group : {dispatch<Quantize>(rows), Quantize::reference(rows)}) {
        EXPECT_TRUE(same(group[row_codes], codes[step]));
        EXPECT_TRUE(same(group[row_scale], inverse[step]));
        EXPECT_TRUE(same(group[group_amax], dispatch<Quantize>(amax)[group_amax]));
      }
      scale = after.slice(0, step, step + 1);
    }
  }
  EXPECT_EQ(cases, 1);
  EXPECT_ERROR(dispatch<Quantize>({.x = at::ones({2}),
                                   .quantizer = quantizer("fp8_e4m3:delayed"),
                                   .output_mask = {true, false, true}}),
               c10::ValueError, "quantize: expected a scale for fp8_e4m3:delayed, got none");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_golden_quantize
