// Copied into compiled programs: ftbptt::product, a @ b split between threads by rows or columns of the result.
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
#else
static int (*const MKL_Set_Num_Threads_Local)(int) = nullptr;
#endif

namespace ftbptt {
constexpr int64_t kWorthSharing = 4 << 20;  // multiplications; smaller products are left to the library
constexpr int64_t kLeastPart = 32;          // rows or columns per thread

struct Matrix {
  AtenTensorHandle handle = nullptr;
  std::array<int64_t, 2> size, stride;

  AOTITorchError describe(AtenTensorHandle tensor) {
    handle = tensor;
    int64_t *sizes, *strides;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    size = {sizes[0], sizes[1]};
    stride = {strides[0], strides[1]};
    return AOTI_TORCH_SUCCESS;
  }

  // A view of rows (axis 0) or columns (axis 1) first .. last - 1.
  AOTITorchError slice(int axis, int64_t first, int64_t last, AtenTensorHandle* result) const {
    std::array<int64_t, 2> slice_size = size;
    slice_size[axis] = last - first;
    return aoti_torch__reinterpret_tensor(handle, 2, slice_size.data(), stride.data(), first * stride[axis], result);
  }
};

// Computes the part of c = a @ b that belongs to thread `thread` of `threads`, with MKL limited to that one thread.
inline AOTITorchError product_part(
    const Matrix& a, const Matrix& b, const Matrix& c, int axis, int64_t thread, int64_t threads) {
  const auto edge = [&](int64_t i) { return i == threads ? c.size[axis] : c.size[axis] * i / threads / 16 * 16; };
  const int64_t first = edge(thread), last = edge(thread + 1);
  AtenTensorHandle in = nullptr, out = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK((axis == 0 ? a : b).slice(axis, first, last, &in));
  const torch::aot_inductor::RAIIAtenTensorHandle in_owner(in);
  AOTI_TORCH_ERROR_CODE_CHECK(c.slice(axis, first, last, &out));
  const torch::aot_inductor::RAIIAtenTensorHandle out_owner(out);
  const int before = MKL_Set_Num_Threads_Local(1);
  const AOTITorchError error =
      axis == 0 ? aoti_torch_cpu_mm_out(out, in, b.handle) : aoti_torch_cpu_mm_out(out, a.handle, in);
  MKL_Set_Num_Threads_Local(before);
  return error;
}
}  // namespace ftbptt

inline AOTITorchError aoti_torch_cpu_product(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle* result) {
  using namespace ftbptt;
  Matrix left, right, product;
  AOTI_TORCH_ERROR_CODE_CHECK(left.describe(a));
  AOTI_TORCH_ERROR_CODE_CHECK(right.describe(b));
  const int64_t rows = left.size[0], columns = right.size[1];
  const std::array<int64_t, 2> size = {rows, columns}, stride = {std::max<int64_t>(columns, 1), 1};
  int32_t dtype;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a, &dtype));
  AOTI_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, size.data(), stride.data(), dtype, aoti_torch_device_type_cpu(), 0, result));
  AOTI_TORCH_ERROR_CODE_CHECK(product.describe(*result));
  const int axis = rows >= columns ? 0 : 1;
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), product.size[axis] / kLeastPart);
  const bool shared = threads > 1 && threads == omp_get_max_threads() && rows * columns * left.size[1] >= kWorthSharing;
  if (!shared || MKL_Set_Num_Threads_Local == nullptr) return aoti_torch_cpu_mm_out(*result, a, b);
  std::atomic<AOTITorchError> error{AOTI_TORCH_SUCCESS};
#pragma omp parallel num_threads(threads)
  {
    const AOTITorchError part_error = product_part(left, right, product, axis, omp_get_thread_num(), threads);
    if (part_error != AOTI_TORCH_SUCCESS) error = part_error;
  }
  return error;
}
