// The registry of op definitions and what it refuses.
#include <nlohmann/json.hpp>

#include "core/op_def.h"
#include "core/value.h"
#include "support/throws.h"

namespace tandem::testing::core_op_registry {
namespace {

OpDef definition(std::string_view name) {
  return {.name = name, .formula = "y = x", .same = {{"y", "x"}}};
}

TEST(OpRegistry, KnowsTheBuiltInOps) {
  EXPECT_THAT(op_names(),
              ::testing::IsSupersetOf({"add_extra_input", "basic_linear", "bias", "constant_scale",
                                       "dropout", "geglu", "gelu", "identity", "l2_normalization",
                                       "layer_norm", "make_extra_output", "quantize", "relu",
                                       "reshape", "rms_norm", "silu", "swiglu"}));
  EXPECT_EQ(op_def("swiglu").family, "glu");
}

TEST(OpRegistryErrors, UnknownOpListsTheNames) {
  EXPECT_ERROR(op_def("softmax"), c10::ValueError, "op: expected one of ", "add_extra_input, ",
               "got \"softmax\"", "Register the op before the pipeline that uses it");
}

TEST(OpRegistryErrors, TakenName) {
  static const OpDef taken = definition("gelu");
  EXPECT_ERROR(register_op(taken), c10::ValueError, "op: expected a new name, got \"gelu\"",
               "Rename the op");
}

struct Cut {
  enum class Side : uint8_t { left, right };
  double share = 0.5;
  size_t count = 1;
  bool is_open = false;
  Side side = Side::right;
  std::string label = "cut";
  std::vector<int64_t> shape = {2, -1};
};

TEST(Signatures, AreReadIntoTheirStruct) {
  const Signature signature{Cut{},
                            {{"share", &Cut::share, between(0, 1), "of x"},
                             {"count", &Cut::count, between(1, 9), "of cuts"},
                             {"is_open", &Cut::is_open, "nothing is behind the last"},
                             {"side", &Cut::side, one_of({"left", "right"}), "where it begins"},
                             {"label", &Cut::label, "what explain shows"},
                             {"shape", &Cut::shape, "of y"}}};
  const auto read = [&](const char* text) {
    const Options options =
        signature.parse("cut", options_from_json("cut", nlohmann::json::parse(text)));
    return *static_cast<const Cut*>(options.get());
  };
  const Cut otherwise = read("{}");
  EXPECT_EQ(otherwise.share, 0.5);
  EXPECT_EQ(otherwise.side, Cut::Side::right);
  EXPECT_EQ(json_of(signature.options()[3].otherwise), "right");
  const Cut given = read(
      R"({"share": 1, "count": 9, "is_open": true, "side": "left", "label": "a", "shape": [3]})");
  EXPECT_EQ(given.share, 1);
  EXPECT_EQ(given.count, 9u);
  EXPECT_TRUE(given.is_open);
  EXPECT_EQ(given.side, Cut::Side::left);
  EXPECT_EQ(given.label, "a");
  EXPECT_EQ(given.shape, std::vector<int64_t>{3});
  const auto refused = [&](const char* text, const char* error) {
    EXPECT_ERROR(read(text), c10::ValueError, error) << text;
  };
  refused(R"({"share": 1.5})",
          "cut: expected option share to be a number from 0 to 1, got 1.5. share: of x.");
  refused(R"({"share": true})", "cut: expected option share to be a number from 0 to 1, got true");
  refused(R"({"count": 10})",
          "cut: expected option count to be a whole number from 1 to 9, got 10");
  refused(R"({"count": 18446744073709551615})", "to be a whole number from 1 to 9, got 1.844674");
  refused(R"({"is_open": 1})", "cut: expected option is_open to be true or false, got 1");
  refused(R"({"side": "top"})",
          "expected option side to be one of \"left\", \"right\", got \"top\"");
  refused(R"({"label": 3})",
          "expected option label to be a text of at most 1024 bytes in UTF-8, got 3");
  refused(R"({"label": null})",
          "cut: expected option label to be true, false, a number, a text or a list of whole "
          "numbers, got null. Correct it.");
  refused(R"({"shape": [-1, -1]})",
          "expected option shape to be at most 64 sizes >= 0, one of which may be -1, of a product "
          "below "
          "2^63, got [-1,-1]");
  refused(R"({"width": 3})", "cut: expected one of [\"share\",\"count\"");
  const Signature needed{Cut{}, {{"count", &Cut::count, required(), "of cuts"}}};
  EXPECT_ERROR(needed.parse("cut", {}), c10::ValueError,
               "cut: expected a field \"count\", got none in {}");
}

TEST(SignatureErrors, WhatContradictsItself) {
  const auto refused = [](OpDef def, const char* error, const char* piece) {
    static std::vector<std::unique_ptr<OpDef>> definitions;
    definitions.push_back(std::make_unique<OpDef>(std::move(def)));
    EXPECT_ERROR(register_op(*definitions.back()), c10::ValueError, error, piece);
  };
  OpDef def = definition("test_signature");
  def.signature = {Cut{}, {{"share", &Cut::share, between(1, 2), "of x"}}};
  refused(def,
          "op test_signature: expected the default of option share to be a number from 1 to 2, got "
          "0.5. Change it, or its check.",
          ": expected the default of option ");
  def = definition("test_signature");
  def.sizes = {{"hidden", "size of x"}};
  def.params = {{"weight", {"hiden"}}};
  refused(def,
          "op test_signature: expected the shape of weight to consist of its sizes, got \"hiden\". "
          "Declare it in sizes.",
          " to consist of its sizes, got \"");
  def.params = {{"weight", {"hidden"}, ParamDef::Init::ones, "centered"}};
  refused(def,
          "op test_signature: expected zeros_if of weight to name an option that is true or false, "
          "got \"centered\". Declare it in signature.",
          " to name an option that is true or false, got \"");
}

TEST(OpRegistryErrors, NamesThatAreNotDeclared) {
  const auto refused = [](OpDef def, const char* where, const char* name) {
    static std::vector<std::unique_ptr<OpDef>> definitions;
    definitions.push_back(std::make_unique<OpDef>(std::move(def)));
    EXPECT_ERROR(register_op(*definitions.back()), c10::ValueError, "op test_names: expected",
                 where, " to name one of its operands or results",
                 std::string("got \"") + name + "\"", "Declare it in inputs");
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
    EXPECT_ERROR(register_op(*definitions.back()), c10::ValueError, texts...);
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
  EXPECT_ERROR(register_op(def), c10::ValueError,
               "op test_star: expected operands and results named by letters, digits and _, ",
               "with [] behind a list, got \"*\". Rename it.");
}

/// A step's name in patterns is made of two: these would make that of a built-in one.
TEST(OpRegistryErrors, NamesThatPatternsWouldTakeForOthers) {
  static OpDef dotted = definition("rms_norm.backward"), step = definition("test_dotted_step"),
               backward = definition("test_backward_called_forward");
  EXPECT_ERROR(register_op(dotted), c10::ValueError,
               "op: expected the name of an op without '.' and '|', got \"rms_norm.backward\"",
               "Rename it.");
  step.forward = {{.name = "a|b", .reads = {"x"}, .writes = {"y"}, .run = [](Call&) {}}};
  EXPECT_ERROR(register_op(step), c10::ValueError,
               "op: expected the name of a step without '.' and '|', got \"a|b\" in op "
               "\"test_dotted_step\"");
  backward.backward = {
      {.name = "forward", .reads = {"grad_y"}, .writes = {"grad_x"}, .run = [](Call&) {}}};
  EXPECT_ERROR(register_op(backward), c10::ValueError,
               "op test_backward_called_forward: expected a step of backward by a name of its own, "
               "got \"forward\". Call it \"backward\".");
}

/// Fusions of a family read its members' options as one struct.
TEST(OpRegistryErrors, AFamilyHasOneStructOfOptionsAndOneListOfSteps) {
  static OpDef def = definition("test_other_activation");
  def.family = "activation";
  EXPECT_ERROR(register_op(def), c10::ValueError,
               "op test_other_activation: expected the struct of options and the steps of its "
               "family activation, as ",
               " has them, got others. Leave the family out.");
}

TEST(OpRegistryErrors, ListsStandLastAndHaveALength) {
  static OpDef before = definition("test_list_before"), endless = definition("test_endless"),
               result = definition("test_list_result");
  const auto one = [](const void*, std::string_view) { return size_t{1}; };
  before.params = {"weight[]"};
  before.list_length = one;
  before.forward = {{.name = "forward", .reads = {"weight[]", "x"}, .writes = {"y"}}};
  EXPECT_ERROR(register_op(before), c10::ValueError,
               "op test_list_before: expected lists behind all other operands of step \"forward\", "
               "got one before. Name them last.");
  endless.params = {"weight[]"};
  EXPECT_ERROR(register_op(endless), c10::ValueError,
               "op test_endless: expected list_length, which tells how long its lists are, got "
               "none. Define it.");
  result.results = {{"y[]"}};
  EXPECT_ERROR(register_op(result), c10::ValueError,
               "op test_list_result: expected results that are one value each, got list \"y[]\". "
               "Declare one tensor.");
}

TEST(OpRegistryErrors, ResultsThatNobodyWrites) {
  static OpDef def = definition("test_unwritten");
  def.results = {{"y"}, {"z"}};
  def.forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}}};
  EXPECT_ERROR(register_op(def), c10::ValueError,
               "op test_unwritten: expected a step of forward that writes result \"z\", got none. "
               "Name it in a step's writes.");
}

TEST(OpRegistryErrors, ContractsWithoutARoleAndRolesWithoutAContract) {
  static OpDef multiplies = definition("test_no_role");
  multiplies.forward = {
      {.name = "forward", .reads = {"x"}, .writes = {"y"}, .contracts = {{"x", Direction::row}}}};
  EXPECT_ERROR(register_op(multiplies), c10::ValueError,
               "op test_no_role: expected contracts of step \"forward\" to name reads that have a "
               "role, got \"x\". Declare it in its reads and in roles.");
  static OpDef other = definition("test_not_read");
  other.roles = {{"y", Role::input}};
  other.forward = {
      {.name = "forward", .reads = {"x"}, .writes = {"y"}, .contracts = {{"y", Direction::row}}}};
  EXPECT_ERROR(register_op(other), c10::ValueError, "to name reads that have a role, got \"y\"");
  static OpDef idle = definition("test_no_contract");
  idle.roles = {{"x", Role::input}};
  idle.forward = {{.name = "forward", .reads = {"x"}, .writes = {"y"}}};
  EXPECT_ERROR(register_op(idle), c10::ValueError,
               "op test_no_contract: expected a step whose contracts name \"x\", which has a role, "
               "got none. Say along which dimension it is summed.");
}

TEST(Values, PartsOfFormats) {
  const auto type = [](Format format, const char* quantizer) {
    Type result{.format = format};
    if (quantizer != nullptr) result.quantizer = &tandem::quantizer(quantizer);
    return result;
  };
  EXPECT_EQ(tensors_per_value(type(Format::plain, nullptr)), 1u);
  EXPECT_EQ(tensors_per_value(type(Format::codes, "fp8_e4m3")), 2u);
  EXPECT_EQ(tensors_per_value(type(Format::codes, "nvfp4")), 3u);
  EXPECT_EQ(tensors_per_value(type(Format::shape, nullptr)), 0u);
  EXPECT_FALSE(exists(Value::none));
}

}  // namespace
}  // namespace tandem::testing::core_op_registry
