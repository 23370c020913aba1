// The codes of weights: when they are made and when they are found.
#include "kernel_ops/weights/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include "kernel_ops/quantize/quantize.h"
#include "support/tensors.h"
#include "support/throws.h"

namespace tandem::testing::kernel_ops_weights {
namespace {

using namespace kernel_ops;

/// A weight with its workspace; `forward` and `backward` say whether codes were made.
class RefreshWeight : public ::testing::Test {
 protected:
  bool refresh(bool backward, const char* quantizer = "fp8_e4m3") {
    const int64_t before = refresh_counts().made;
    refresh_weight(weight_, {codes_, dequant_scale_, {}, {}, {}, {}, amax_, stamp_},
                   tandem::quantizer(quantizer), backward);
    return refresh_counts().made != before;
  }
  bool forward() { return refresh(false); }
  bool backward() { return refresh(true); }
  ::testing::AssertionResult is_current() {
    const auto fresh = dispatch<Quantize>({.x = weight_.detach(),
                                           .quantizer = tandem::quantizer("fp8_e4m3"),
                                           .output_mask = {true, true, true}});
    if (auto codes = same(codes_, fresh[0]); !codes) return codes;
    if (auto scale = same(dequant_scale_, fresh[1]); !scale) return scale;
    return same(amax_, fresh[group_amax]);
  }

  at::Tensor weight_ = random({8, 6});
  at::Tensor codes_ = at::empty({8, 6}, at::kByte), dequant_scale_ = at::empty({}, at::kFloat),
             amax_ = at::empty({}, at::kFloat), stamp_ = at::zeros({kStampSize}, at::kLong);
};

/// An autocast region of this thread; one inside another is the same.
struct Region {
  Region() {
    if (outer == 0) set_region(new_region());
  }
  ~Region() { set_region(outer); }
  const int64_t outer = current_region();
};

TEST_F(RefreshWeight, TheSameBytesAreFoundInsideAndOutsideOfRegions) {
  EXPECT_EQ(current_region(), 0);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  const int64_t reused = refresh_counts().reused;
  EXPECT_FALSE(forward());
  EXPECT_EQ(refresh_counts().reused, reused + 1);
  {
    const Region region;
    EXPECT_FALSE(forward());
    const Region inner;
    EXPECT_FALSE(forward());
  }
  const Region next;
  EXPECT_FALSE(forward());
}

TEST_F(RefreshWeight, WhatIsSaidToBeUnchangedIsNotLookedAtButItsSignsAre) {
  const auto said = [&](Said what) {
    say(what);
    const bool is_made = forward();
    say(Said::nothing);
    return is_made;
  };
  EXPECT_TRUE(said(Said::unchanged)) << "nothing is there";
  weight_.mutable_data_ptr<float>()[7] = 1000;
  EXPECT_FALSE(said(Said::unchanged));
  EXPECT_FALSE(is_current());
  EXPECT_FALSE(backward()) << "as its forward was told";
  EXPECT_TRUE(forward()) << "the bytes are compared again";
  EXPECT_TRUE(is_current());
  weight_.mutable_data_ptr<float>()[7] = -1000;
  weights_changed();
  EXPECT_TRUE(said(Said::unchanged)) << "somebody has said otherwise";
  weight_.mul_(2);
  EXPECT_TRUE(said(Said::unchanged)) << "its version has moved";
  EXPECT_TRUE(is_current());
  weight_ = random({8, 6}, at::kFloat, 9);
  EXPECT_TRUE(said(Said::unchanged)) << "another tensor";
  EXPECT_TRUE(said(Said::first_microbatch)) << "made in any case";
  EXPECT_FALSE(backward());
  EXPECT_FALSE(said(Said::unchanged));
}

TEST_F(RefreshWeight, AStampTellsHowTheCodesCameThere) {
  const auto forward_was = [&] { return (forward(), last_uses(stamp_)[0]); };
  EXPECT_EQ(forward_was(), CodesWere::first_used);
  EXPECT_EQ(forward_was(), CodesWere::found);
  backward();
  EXPECT_EQ(last_uses(stamp_)[1], CodesWere::found);
  weight_.add_(1);
  backward();
  EXPECT_EQ(last_uses(stamp_), (std::array{CodesWere::found, CodesWere::of_another_version}));
  weight_.mutable_data_ptr<float>()[3] = 50;
  EXPECT_EQ(forward_was(), CodesWere::of_other_bytes);
  EXPECT_EQ(last_uses(stamp_)[1], CodesWere::unused) << "of the forward before";
  weight_.mutable_data_ptr<float>()[3] = 60;
  weights_changed();
  EXPECT_EQ(forward_was(), CodesWere::before_an_optimizer_step);
  weight_ = random({8, 6}, at::kFloat, 5);
  EXPECT_EQ(forward_was(), CodesWere::of_another_tensor);
  refresh(false, "fp8_e4m3:current:pow2=1");
  EXPECT_EQ(last_uses(stamp_)[0], CodesWere::of_another_recipe);
  weight_ = random({8, 12}).slice(1, 0, 12, 2);
  forward();
  EXPECT_EQ(forward_was(), CodesWere::not_comparable);
  say(Said::first_microbatch);
  EXPECT_EQ(forward_was(), CodesWere::of_the_last_step);
  say(Said::nothing);
  for (int why = 0; why <= static_cast<int>(CodesWere::recorded); ++why)
    EXPECT_FALSE(text_of(static_cast<CodesWere>(why)).empty()) << why;
}

TEST_F(RefreshWeight, BackwardAcceptsAnyRegion) {
  {
    const Region region;
    EXPECT_TRUE(forward());
  }
  EXPECT_FALSE(backward());
  const Region next;
  EXPECT_FALSE(backward());
}

TEST_F(RefreshWeight, AnInPlaceWriteIsSeen) {
  const Region region;
  forward();
  weight_.mul_(3);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_.add_(1);
  EXPECT_TRUE(backward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, AnotherTensorAtTheSameAddressIsSeen) {
  const Region region;
  alignas(64) float memory[48];
  for (float factor : {1.0f, 2.0f, 3.0f, 4.0f, 5.0f}) {
    std::fill(std::begin(memory), std::end(memory), 0.0f);
    weight_ = at::Tensor();  // its objects are free for the next one
    memory[3] = factor;
    weight_ = at::from_blob(memory, {8, 6}, at::kFloat);
    EXPECT_TRUE(forward()) << factor;
    EXPECT_TRUE(is_current());
    EXPECT_FALSE(forward());
  }
}

TEST_F(RefreshWeight, AnotherVersionCounterOfTheSameMemoryIsSeen) {
  const Region region;
  forward();
  const at::Tensor other = weight_.variable_data();
  other.mul_(2);  // moves a counter of its own
  weight_ = weight_.variable_data();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, ATensorThatSharesTheCounterIsNotAnotherOne) {
  const Region region;
  forward();
  weight_ = weight_.detach();
  EXPECT_FALSE(forward());
  weight_.mul_(2);
  EXPECT_TRUE(forward());
}

TEST_F(RefreshWeight, AnotherLayoutOrDtypeOfTheSameMemoryIsSeen) {
  weight_ = random({8, 8});
  codes_ = at::empty({8, 8}, at::kByte);
  const Region region;
  forward();
  weight_ = weight_.t();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_ = random({8, 8}, at::kBFloat16);
  forward();
  weight_ = weight_.view(at::kHalf);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, NoDeadWeightIsKeptAlive) {
  const Region region;
  for (int i = 0; i < 1000; ++i) {
    weight_ = random({8, 6}, at::kFloat, static_cast<uint64_t>(i));
    EXPECT_TRUE(forward());
    EXPECT_EQ(weight_.storage().use_count(), 1u);
    EXPECT_EQ(weight_.use_count(), 1u);
  }
}

TEST_F(RefreshWeight, AStampElsewhereThanOnTheCpuIsRefused) {
  stamp_ = at::zeros({kStampSize}, at::kInt);
  EXPECT_ERROR(forward(), c10::ValueError,
               "refresh_weight_: expected stamp of shape [13], Long, on cpu",
               "got CPUIntType of shape [13]");
}

TEST_F(RefreshWeight, OtherArgumentsAreSeen) {
  const Region region;
  forward();
  const int64_t made = refresh_counts().made;
  refresh(false, "fp8_e4m3:current:eps=1");
  refresh(false, "fp8_e4m3:current:pow2=1");
  EXPECT_EQ(refresh_counts().made, made + 2) << "epsilon 1 is not powers of two";
  EXPECT_TRUE(refresh(false, "fp8_e4m3:current:eps=100"));
  EXPECT_TRUE(refresh(true));
}

TEST_F(RefreshWeight, AWriteThatMovesNoVersionIsSeen) {
  const Region region;
  forward();
  weight_.mutable_data_ptr<float>()[7] = 1000;
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_.mutable_data_ptr<float>()[7] = -1000;
  EXPECT_TRUE(backward());
  EXPECT_TRUE(is_current());
  EXPECT_FALSE(forward());
}

TEST_F(RefreshWeight, AWeightWithGapsIsNeverTakenForTheSame) {
  weight_ = random({8, 12}).slice(1, 0, 12, 2);
  const Region region;
  EXPECT_TRUE(forward());
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, InInferenceModeTheBytesTell) {
  const c10::InferenceMode inference;
  weight_ = random({8, 6});
  EXPECT_TRUE(forward());
  EXPECT_FALSE(forward());
  weight_.mul_(2);  // moves no version
  say(Said::unchanged);
  EXPECT_TRUE(forward()) << "there is no sign to go by";
  say(Said::nothing);
  EXPECT_FALSE(backward());
}

TEST_F(RefreshWeight, DtypesWithoutAKernelUseTheReference) {
  weight_ = random({8, 6}, at::kDouble);
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
  weight_ = random({6, 8}, at::kBFloat16).t();
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, AWorkspaceOfAnotherShapeIsRefused) {
  weight_ = random({8, 7});
  EXPECT_ERROR(forward(), c10::ValueError,
               "refresh_weight_: expected row_codes of shape [8, 7], Byte",
               "got CPUByteType of shape [8, 6]", "Allocate the workspace again");
}

TEST_F(RefreshWeight, ANegatedWeightIsAnotherOne) {
  const Region region;
  forward();
  EXPECT_FALSE(forward());
  weight_.set_data(at::_neg_view(weight_.data()));
  EXPECT_TRUE(weight_.is_neg());
  EXPECT_TRUE(forward());
  EXPECT_TRUE(is_current());
}

TEST_F(RefreshWeight, ANegatedOrConjugateWorkspaceIsRefusedAndNotReleasedTwice) {
  const auto refuses = [&](at::Tensor& part, const char* name, const at::Tensor& view,
                           const char* got) {
    const at::Tensor before = std::exchange(part, view);
    EXPECT_ERROR(forward(), c10::ValueError, "refresh_weight_: expected ", name, got);
    EXPECT_EQ(weight_.use_count(), 1u);
    part = before;
  };
  const char* negated =
      " as it lies in memory, got a negated view (is_neg). Allocate the workspace by itself.";
  refuses(codes_, "row_codes", at::_neg_view(codes_), negated);
  refuses(dequant_scale_, "row_scale", at::_neg_view(dequant_scale_), negated);
  refuses(amax_, "amax", at::_neg_view(amax_), negated);
  refuses(stamp_, "stamp", at::_neg_view(stamp_), negated);
  refuses(amax_, "amax", at::complex(at::zeros({}), at::zeros({})).conj(),
          " of shape [], Float, on cpu, as the weight's workspace, got CPUComplexFloatType");
}

TEST_F(RefreshWeight, WithoutMemoryAllPartsAreOrNone) {
  const auto meta = [](const at::Tensor& tensor) { return tensor.to(at::kMeta); };
  for (at::Tensor* one : {&weight_, &codes_, &dequant_scale_, &amax_, &stamp_}) {
    const at::Tensor before = std::exchange(*one, meta(*one));
    EXPECT_ERROR(forward(), c10::ValueError, "refresh_weight_: expected ",
                 ", as the weight's workspace, got ");
    *one = before;
  }
  for (at::Tensor* one : {&weight_, &codes_, &dequant_scale_, &amax_}) *one = meta(*one);
  EXPECT_FALSE(forward()) << "a stamp stays on the CPU";
  stamp_ = meta(stamp_);
  EXPECT_FALSE(forward());
}

// ---- the free function ----

const char* kBlocks = "mxfp8_e4m3";
bool has(const WeightCodes& codes, size_t part) { return codes.workspace[part].defined(); }
/// The parts of a group that was quantized for these directions.
::testing::AssertionResult holds(const WeightCodes& codes, const at::Tensor& weight,
                                 const char* quantizer, GroupMask mask) {
  const auto fresh = dispatch<Quantize>(
      {.x = weight.detach(), .quantizer = tandem::quantizer(quantizer), .output_mask = mask});
  for (size_t part = 0; part < group_size; ++part)
    if (has_part(tandem::quantizer(quantizer), mask, part))
      if (auto as_fresh = same(codes.workspace[part], fresh[part]); !as_fresh) return as_fresh;
  return ::testing::AssertionSuccess();
}

TEST(QuantizeWeight, MakesFindsAndWritesInPlace) {
  const at::Tensor weight = random({32, 64});
  const Quantizer& blocks = quantizer(kBlocks);
  const WeightCodes first = quantize_weight(weight, blocks);
  EXPECT_EQ(first.were, CodesWere::first_used);
  EXPECT_TRUE(holds(first, weight, kBlocks, {true, true, true}));
  const WeightCodes again = quantize_weight(weight, blocks, {true, true, true}, first.workspace);
  EXPECT_EQ(again.were, CodesWere::found);
  EXPECT_TRUE(again.workspace[row_codes].is_same(first.workspace[row_codes]));
  weight.mul_(3);
  const WeightCodes updated = quantize_weight(weight, blocks, {true, true, true}, first.workspace);
  EXPECT_EQ(updated.were, CodesWere::of_another_version);
  EXPECT_TRUE(updated.workspace[row_codes].is_same(first.workspace[row_codes]));
  EXPECT_TRUE(holds(updated, weight, kBlocks, {true, true, true}));
}

TEST(QuantizeWeight, MakesTheDirectionsThatAreAskedFor) {
  const at::Tensor weight = random({32, 64});
  const Quantizer& blocks = quantizer(kBlocks);
  const WeightCodes rows = quantize_weight(weight, blocks, {true, false, true});
  EXPECT_TRUE(has(rows, row_codes));
  EXPECT_FALSE(has(rows, column_codes));
  const WeightCodes both = quantize_weight(weight, blocks, {true, true, true}, rows.workspace);
  EXPECT_EQ(both.were, CodesWere::lacking_a_direction);
  EXPECT_TRUE(holds(both, weight, kBlocks, {true, true, true}));
  const WeightCodes columns = quantize_weight(weight, blocks, {false, true, true}, both.workspace);
  EXPECT_EQ(columns.were, CodesWere::found) << "more than is asked for";
  EXPECT_TRUE(has(columns, row_codes));
}

TEST(QuantizeWeight, OfAnotherRecipeShapeOrDtypeIsMadeAgain) {
  const at::Tensor weight = random({32, 64});
  const WeightCodes first = quantize_weight(weight, quantizer("fp8_e4m3"));
  const auto with = [&](const at::Tensor& tensor, const char* text) {
    const WeightCodes codes =
        quantize_weight(tensor, quantizer(text), {true, true, true}, first.workspace);
    EXPECT_TRUE(holds(codes, tensor, text, {true, true, true}));
    return codes.were;
  };
  EXPECT_EQ(with(weight, "fp8_e4m3:current:pow2=1"), CodesWere::of_another_recipe) << "as large";
  EXPECT_EQ(with(weight, kBlocks), CodesWere::of_another_recipe);
  EXPECT_EQ(with(random({32, 32}), "fp8_e4m3:current:pow2=1"), CodesWere::of_another_tensor);
  EXPECT_EQ(with(weight.to(at::kBFloat16), "fp8_e4m3:current:pow2=1"),
            CodesWere::of_another_tensor);
}

TEST(QuantizeWeight, TakesTheCallersWord) {
  const at::Tensor weight = random({4, 8});
  const Quantizer& current = quantizer("fp8_e4m3");
  const GroupMask all{true, true, true};
  const WeightCodes first = quantize_weight(weight, current, all, {}, Said::first_microbatch);
  weight.mutable_data_ptr<float>()[0] = 100;
  EXPECT_EQ(quantize_weight(weight, current, all, first.workspace, Said::unchanged).were,
            CodesWere::found);
  EXPECT_EQ(quantize_weight(weight, current, all, first.workspace, Said::first_microbatch).were,
            CodesWere::of_the_last_step);
  EXPECT_TRUE(holds(first, weight, "fp8_e4m3", all));
}

TEST(QuantizeWeight, Refuses) {
  EXPECT_ERROR(quantize_weight(random({4, 8}).requires_grad_(), quantizer("fp8_e4m3")),
               c10::NotImplementedError, "quantize_weight: expected a tensor that needs no");
  EXPECT_ERROR(quantize_weight(random({4, 8}), quantizer("fp8_e4m3:delayed")),
               c10::NotImplementedError,
               "quantize_weight: expected a quantizer whose codes depend on the weight alone, got",
               "Quantize with a scale or a seed of your own in each call.");
}

TEST(WeightCodesOp, CopiesCodesThatServeAndMakesOthers) {
  const at::Tensor weight = random({32, 64}), gradient = at::zeros({1});
  const Quantizer& blocks = quantizer(kBlocks);
  const WeightCodes held = quantize_weight(weight, blocks);
  const auto fresh = [&] {
    return dispatch<Quantize>(
        {.x = weight, .quantizer = blocks, .output_mask = {false, true, false}});
  };
  const auto expect_codes = [&](int64_t made) {
    const int64_t before = refresh_counts().made;
    const auto codes = weight_codes(weight, held.workspace, gradient, blocks, {false, true});
    EXPECT_EQ(refresh_counts().made, before + made);
    EXPECT_TRUE(same(codes[column_codes], fresh()[column_codes]));
    EXPECT_TRUE(same(codes[column_scale], fresh()[column_scale]));
    EXPECT_FALSE(codes[column_codes].is_alias_of(held.workspace[column_codes]));
    EXPECT_EQ(codes[row_codes].numel(), 0);
  };
  expect_codes(0);
  weight.mul_(5);
  expect_codes(1);
  expect_codes(1);  // nothing is written
}

TEST(PiecesOfAWeight, AreQuantizedAsOneAndKnownByEach) {
  const Quantizer& blocks = quantizer(kBlocks);
  const at::Tensor whole = random({64, 64});
  Tensors pieces{whole.narrow(0, 0, 16).clone(), whole.narrow(0, 16, 48).clone()};
  const Workspace workspace = make_workspace(pieces, blocks, {true, true, true});
  const auto makes = [&](bool backward = false) {
    const int64_t before = refresh_counts().made;
    refresh_weight(pieces, workspace, blocks, backward);
    return refresh_counts().made != before;
  };
  const auto expect_codes = [&] {
    const auto fresh = dispatch<Quantize>(
        {.x = at::cat(pieces), .quantizer = blocks, .output_mask = {true, true, true}});
    for (size_t part = 0; part < group_size; ++part) {
      if (!workspace[part].defined()) continue;
      EXPECT_TRUE(same(workspace[part], fresh[part])) << part;
    }
  };
  EXPECT_TRUE(makes());
  expect_codes();
  EXPECT_FALSE(makes());
  EXPECT_FALSE(makes(true));
  for (at::Tensor& piece : pieces) {
    piece.mutable_data_ptr<float>()[3] += 1;  // moves no version
    EXPECT_TRUE(makes());
    EXPECT_FALSE(makes());
    piece.mul_(2);
    EXPECT_TRUE(makes(true));
    EXPECT_FALSE(makes());
    piece = piece.clone();
    EXPECT_FALSE(makes()) << "other tensors of the same bytes";
    expect_codes();
  }
  pieces[0].add_(1);
  EXPECT_TRUE(makes()) << "and the stamp names the tensors of now";
  say(Said::unchanged);
  EXPECT_FALSE(makes());
  pieces[0].mutable_data_ptr<float>()[3] += 1;
  EXPECT_FALSE(makes()) << "nobody looks";
  pieces[1].add_(1);
  EXPECT_TRUE(makes()) << "versions are seen";
  say(Said::nothing);
  expect_codes();
  pieces = {pieces[0].narrow(0, 0, 8).clone(), at::cat({pieces[0].narrow(0, 8, 8), pieces[1]})};
  EXPECT_TRUE(makes()) << "the same bytes, in other pieces";
  EXPECT_TRUE(same(weight_codes(pieces, workspace, at::zeros({1}), blocks, {false, true})[3],
                   workspace[column_codes]));
  expect_codes();
}

TEST(PiecesOfAWeight, MustFit) {
  const Quantizer& current = quantizer("fp8_e4m3");
  const Tensors pieces{random({4, 8}), random({4, 8}, at::kFloat, 2)};
  Workspace workspace = make_workspace(pieces, current, {true, true, true});
  const auto refresh = [&](const Tensors& weight) {
    refresh_weight(weight, workspace, current, false);
  };
  EXPECT_ERROR(refresh({pieces[0], random({4, 7})}), c10::ValueError,
               "join: expected parts of one parameter that differ in", "got [4, 8] and [4, 7]");
  EXPECT_ERROR(refresh({pieces[0], pieces[1].to(at::kMeta)}), c10::ValueError,
               "join: expected parts of one parameter on one device");
  EXPECT_ERROR(refresh({pieces[0]}), c10::ValueError,
               "refresh_weight_: expected row_codes of shape [4, 8]");
  workspace[group_amax] = pieces[1][0][0];
  EXPECT_ERROR(refresh(pieces), c10::ValueError, "refresh_weight_: expected amax",
               "or the weight shares");
}

TEST(SayOfWeight, RefusesWhatIsNoStampAndUnknownWords) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tandem::say_of_weight_", "")
                             .typed<void(at::Tensor&, int64_t)>();
  at::Tensor other = at::zeros({3}, at::kLong), stamp = at::zeros({kStampSize}, at::kLong);
  EXPECT_ERROR(op.call(other, 1), c10::ValueError,
               "say_of_weight_: expected the stamp of a workspace, int64",
               "got CPULongType of shape [3]");
  EXPECT_ERROR(op.call(stamp, 3), c10::ValueError, "say_of_weight_: expected 0, 1 or 2", "got 3");
}

}  // namespace
}  // namespace tandem::testing::kernel_ops_weights
