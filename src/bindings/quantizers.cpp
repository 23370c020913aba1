#include <c10/core/SymIntArrayRef.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "kernel_ops/elementwise/join.h"
#include "pipeline/op_call.h"
#include "quantization/formats/format.h"

namespace py = pybind11;

namespace tandem::bindings {

namespace {

/// The fields of QuantizerTraits (python/tandem/quantized/traits.py).
py::dict quantizer_traits(const std::string& text) {
  const Quantizer& of = quantizer(text);
  const Given given = given_to(of);
  return py::dict(
      py::arg("text") = of.text, py::arg("class_name") = of.scaling->class_name,
      py::arg("with_own_scale") = given == Given::scale ? quantizer(of.format->name).text : of.text,
      py::arg("takes_seed") = given == Given::seed, py::arg("is_rotated") = of.hadamard,
      py::arg("is_packed") = is_packed(of), py::arg("has_amax") = of.format->layout.has_amax,
      py::arg("serves_both_directions") = serves_both_directions(of),
      py::arg("joins") = kernel_ops::codes_join(of));
}

std::vector<std::vector<int64_t>> sizes_of_parts(const std::string& text, int64_t rows,
                                                 int64_t columns) {
  const Quantizer& of = quantizer(text);
  const c10::SymDimVector numbers{rows, columns};
  std::vector<std::vector<int64_t>> sizes;
  for (size_t part = 0; part < group_amax; ++part) {
    const bool is_there = is_written(of, {true, true, true}, part);
    const auto own = is_there ? sizes_of_part(of, numbers, part) : c10::SymDimVector{0};
    sizes.push_back(C10_AS_INTARRAYREF_SLOW(own).vec());
  }
  return sizes;
}

std::vector<std::pair<int64_t, int64_t>> rows_of_parts(const std::string& text) {
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (size_t part = 0; part < group_amax; ++part) {
    const OfRows own = rows_of_part(quantizer(text), part);
    rows.emplace_back(own.dim, own.rows);
  }
  return rows;
}

}  // namespace

void bind_quantizers(py::module_& module) {
  module.def("quantizer_traits", &quantizer_traits, py::arg("text"));
  module.def("sizes_of_parts", &sizes_of_parts, py::arg("text"), py::arg("rows"),
             py::arg("columns"),
             "The sizes of the parts of a matrix in codes; [0] for an amax that the format lacks.");
  module.def(
      "rows_of_parts", &rows_of_parts, py::arg("text"),
      "For each part the dimension that grows with the rows of its matrix, and how many rows "
      "it grows by one for; 0 rows: it does not grow.");
  module.def(
      "recipe_quantizer",
      [](const std::string& recipe, const std::string& role, const std::string& kind) {
        const Role of = role == "input"    ? Role::input
                        : role == "weight" ? Role::weight
                                           : Role::grad_output;
        return quantizer_text(recipe, of, kind);
      },
      py::arg("recipe"), py::arg("role"), py::arg("kind"),
      "The text of the quantizer that a recipe, as JSON, has for a role of an op; empty: none.");
}

}  // namespace tandem::bindings
