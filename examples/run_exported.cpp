// Runs what export_mlp.py exported, without Python. Nothing here names Tandem: linked to
// tandem::tandem, the program loads its kernels.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

int main(int, char** arguments) {
  torch::inductor::AOTIModelPackageLoader mlp(arguments[1]);
  for (const int64_t rows : {4, 3}) {  // any number, as the export says
    const at::Tensor x = at::linspace(-1, 1, 4 * 16).reshape({4, 16}).slice(0, 0, rows);
    const at::Tensor y = mlp.run({x.contiguous()})[0];
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < y.size(1); ++column)
        std::printf(column == 0 ? "%.9g" : " %.9g", y[row][column].item<float>());
      std::printf("\n");
    }
  }
}
