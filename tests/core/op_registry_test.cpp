// The registry of op definitions and what it refuses.
#include <nlohmann/json.hpp>

#include "core/op_def.h"
#include "core/value.h"
#include "ops/options.h"
#include "support/throws.h"

namespace tandem::testing {
namespace {

OpDef definition(std::string_view name) {
  return {.name = name, .formula = "y = x", .same = {{"y", "x"}}, .parse = ops::parse_no_options};
}

TEST(OpRegistry, KnowsTheBuiltInOps) {
  EXPECT_THAT(op_names(),
              ::testing::IsSupersetOf({"add_extra_input", "basic_linear", "bias", "constant_scale",
                                       "dropout", "geglu", "gelu", "identity", "layer_norm",
                                       "make_extra_output", "quantize", "relu", "reshape",
                                       "rms_norm", "silu", "swiglu"}));
  EXPECT_EQ(op_def("swiglu").family, "glu");
}

TEST(OpRegistryErrors, UnknownOpListsTheNames) {
  EXPECT_THAT(
      [] { op_def("softmax"); },
      ThrowsText<c10::ValueError>("op: expected one of ", "add_extra_input, ", "got \"softmax\"",
                                  "Register the op before the pipeline that uses it"));
}

TEST(OpRegistryErrors, TakenName) {
  static const OpDef taken = definition("gelu");
  EXPECT_THAT([] { register_op(taken); },
              ThrowsText<c10::ValueError>("op: expected a new name, got \"gelu\"",
                                          "op: expected a new name, got \"", "Rename the op"));
}

TEST(OpRegistryErrors, WithoutParser) {
  static OpDef bare = definition("test_bare");
  bare.parse = nullptr;
  EXPECT_THAT([] { register_op(bare); },
              ThrowsText<c10::ValueError>("op test_bare: expected a function",
                                          ": expected a function that parses its options, got none",
                                          "Use one that accepts only {}"));
}

TEST(OpRegistryErrors, NamesThatAreNotDeclared) {
  const auto refused = [](OpDef def, const char* where, const char* name) {
    static std::vector<std::unique_ptr<OpDef>> definitions;
    definitions.push_back(std::make_unique<OpDef>(std::move(def)));
    EXPECT_THAT([&] { register_op(*definitions.back()); },
                ThrowsText<c10::ValueError>(
                    "op test_names: expected", where, " to name one of its operands or results",
                    std::string("got \"") + name + "\"", "Declare it in inputs"));
  };
  OpDef def = definition("test_names");
  def.same = {{"z", "x"}};
  refused(def, "same", "z");
  def = definition("test_names");
  def.same = {{"y", "y"}};
  refused(def, "same", "y");
  def = definition("test_names");
  def.reemits = {"z"};
  refused(def, "reemits", "z");
  def = definition("test_names");
  def.extra_outputs = {"z"};
  refused(def, "extra_outputs", "z");
  def = definition("test_names");
  def.backward = {{.name = "backward", .reads = {"grad_z"}, .writes = {"grad_x"}}};
  refused(def, "the reads of a backward step", "z");
  def.backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_y"}}};
  refused(def, "the writes of a backward step", "y");
  def.backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x", "y"}}};
  refused(def, "a write that is no gradient", "y");
}

TEST(OpRegistryErrors, NamesThatMeanTwoThings) {
  const auto refused = [](OpDef def, auto... texts) {
    static std::vector<std::unique_ptr<OpDef>> definitions;
    definitions.push_back(std::make_unique<OpDef>(std::move(def)));
    EXPECT_THAT([&] { register_op(*definitions.back()); }, ThrowsText<c10::ValueError>(texts...));
  };
  OpDef def = definition("test_twice");
  def.inputs = {"x", "y"};
  refused(def, "op test_twice: expected operands and results of different names, got \"y\" twice",
          ": expected operands and results of different names, got \"", "Rename one of them.");
  def = definition("test_twice");
  def.params = {"grad_y"};
  def.backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}}};
  refused(def, "op test_twice: expected \"grad_y\" in backward to mean one thing",
          " in backward to mean one thing, got an operand or result of that name ",
          "and the gradient of another. Rename the operand or result.");
  def = definition("test_twice");
  def.results = {{"y"}, {"grad_x"}};
  def.reemits = {"grad_x"};
  def.backward = {{.name = "backward", .reads = {"grad_y"}, .writes = {"grad_x"}}};
  refused(def, "expected \"grad_x\" in backward to mean one thing");
  def = definition("test_twice");
  def.backward = {{.name = "backward", .reads = {"grad_x"}, .writes = {"grad_x"}}};
  refused(def,
          "op test_twice: expected the reads of a backward step to name gradients of its results, "
          "got \"grad_x\". Only these are given to backward.",
          "the reads of a backward step to name gradients of its results, got \"");
  def = definition("test_twice");
  def.same_gradients = {{"grad_x", "grad_x"}};
  refused(def, "op test_twice: expected same_gradients to name one of its operands or results");
}

TEST(OpRegistry, NamesInBackwardReferToOperandsAndGradients) {
  const OpKind& norm = op_kind("rms_norm");
  EXPECT_EQ(norm.operands, (Names{"x", "weight", "y", "inv_rms"}));
  EXPECT_EQ(norm.read("x", /*backward=*/true), OperandRef{0});
  EXPECT_EQ(norm.read("inv_rms", true), OperandRef{3});
  EXPECT_EQ(norm.read("grad_y", true), (OperandRef{2, /*is_gradient=*/true}));
  EXPECT_FALSE(norm.read("grad_weight", true).has_value());
  EXPECT_FALSE(norm.read("grad_y", /*backward=*/false).has_value());
  EXPECT_EQ(norm.write("grad_weight", true), (OperandRef{1, /*is_gradient=*/true}));
  EXPECT_EQ(norm.write("y", true), OperandRef{2});
  EXPECT_FALSE(norm.write("inv_rms", true).has_value());
}

TEST(OpRegistryErrors, NamesThatAreNoNames) {
  static OpDef def = definition("test_star");
  def.inputs = {"x", "*"};
  EXPECT_THAT([] { register_op(def); },
              ThrowsText<c10::ValueError>(
                  "op test_star: expected operands and results named by letters, digits and _, ",
                  "with [] behind a list, got \"*\". Rename it."));
}

TEST(OpRegistryErrors, ListsStandLastAndHaveALength) {
  static OpDef before = definition("test_list_before"), endless = definition("test_endless"),
               result = definition("test_list_result");
  const auto one = [](const void*, std::string_view) { return size_t{1}; };
  before.params = {"weight[]"};
  before.list_length = one;
  before.forward = {{.name = "forward", .reads = {"weight[]", "x"}, .writes = {"y"}}};
  EXPECT_THAT([] { register_op(before); },
              ThrowsText<c10::ValueError>(
                  "op test_list_before: expected lists behind all other operands of step \"forward"
                  "\", got one before. Name them last."));
  endless.params = {"weight[]"};
  EXPECT_THAT([] { register_op(endless); },
              ThrowsText<c10::ValueError>(
                  "op test_endless: expected list_length, which tells how long its lists are, got "
                  "none. Define it."));
  result.results = {{"y[]"}};
  EXPECT_THAT([] { register_op(result); },
              ThrowsText<c10::ValueError>(
                  "op test_list_result: expected results that are one value each, got list "
                  "\"y[]\". Declare one tensor."));
}

TEST(OpRegistryErrors, ResultsThatNobodyWrites) {
  static OpDef def = definition("test_unwritten");
  def.results = {{"y"}, {"z"}};
  def.forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}}};
  EXPECT_THAT([] { register_op(def); },
              ThrowsText<c10::ValueError>(
                  "op test_unwritten: expected a step of forward that writes result \"z\", got "
                  "none. Name it in a step's writes."));
}

TEST(OpRegistryErrors, ContractsWithoutARoleAndRolesWithoutAContract) {
  static OpDef multiplies = definition("test_no_role");
  multiplies.forward = {
      {.name = "forward", .reads = {"x"}, .writes = {"y"}, .contracts = {{"x", Direction::row}}}};
  EXPECT_THAT(
      [] { register_op(multiplies); },
      ThrowsText<c10::ValueError>(
          "op test_no_role: expected contracts of step \"forward\" to name reads that have a "
          "role, got \"x\". Declare it in its reads and in roles."));
  static OpDef other = definition("test_not_read");
  other.roles = {{"y", Role::input}};
  other.forward = {
      {.name = "forward", .reads = {"x"}, .writes = {"y"}, .contracts = {{"y", Direction::row}}}};
  EXPECT_THAT([] { register_op(other); },
              ThrowsText<c10::ValueError>("to name reads that have a role, got \"y\""));
  static OpDef idle = definition("test_no_contract");
  idle.roles = {{"x", Role::input}};
  idle.forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}}};
  EXPECT_THAT([] { register_op(idle); },
              ThrowsText<c10::ValueError>(
                  "op test_no_contract: expected a step whose contracts name \"x\", which has a "
                  "role, got none. Say along which dimension it is summed."));
}

TEST(Values, PartsOfFormats) {
  EXPECT_EQ(tensors_per_value(Format::plain), 1u);
  EXPECT_EQ(tensors_per_value(Format::codes), 2u);
  EXPECT_EQ(tensors_per_value(Format::shape), 0u);
  EXPECT_FALSE(exists(Value::none));
}

}  // namespace
}  // namespace tandem::testing
