#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#ifndef FT_W
#define FT_W 3
#endif
#ifndef FT_KB
#define FT_KB (24 * 1024)
#endif
#ifndef FT_PF
#define FT_PF 0
#endif
#ifndef FT_CAP
#define FT_CAP 14
#endif

namespace ftbptt {

template <typename T>
struct Gemm {
  using Vec = at::vec::Vectorized<T>;
  static constexpr int64_t kLanes = Vec::size();
  static constexpr int kRegisters = kLanes * sizeof(T) >= 64 ? 32 : 16;
  static constexpr int kWidth = FT_W;

  static constexpr int64_t vectors(int64_t n) { return (n + kLanes - 1) / kLanes; }
  static constexpr int64_t panels(int64_t n) { return (vectors(n) + kWidth - 1) / kWidth; }
  static constexpr int64_t packed_size(int64_t k, int64_t n) { return k * vectors(n) * kLanes; }
  // first vector of a panel
  static constexpr int64_t start(int64_t panel, int64_t n) {
    int64_t count = panels(n), total = vectors(n);
    return panel * (total / count) + std::min(panel, total % count);
  }

  template <typename S>
  static void pack(const S* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, T* packed,
                   int64_t first_panel, int64_t last_panel) {
    for (int64_t p = first_panel; p < last_panel; ++p) {
      int64_t begin = start(p, n) * kLanes, width = start(p + 1, n) * kLanes - begin;
      int64_t real = std::min(width, n - begin);
      T* out = packed + begin * k;
      const S* in = b + begin * stride_n;
      for (int64_t i0 = 0; i0 < k; i0 += 16) {
        int64_t i1 = std::min(k, i0 + 16);
        for (int64_t j = 0; j < real; ++j)
          for (int64_t i = i0; i < i1; ++i) out[i * width + j] = static_cast<T>(in[i * stride_k + j * stride_n]);
        for (int64_t j = real; j < width; ++j)
          for (int64_t i = i0; i < i1; ++i) out[i * width + j] = T(0);
      }
    }
  }

  static void run(int64_t rows, int64_t k, int64_t n, const T* a, int64_t lda, const T* packed, T* c,
                  int64_t ldc, bool accumulate) {
    int64_t count = panels(n);
    for (int64_t p = 0; p < count; ++p) {
      int64_t begin = start(p, n), width = start(p + 1, n) - begin;
      int64_t tail = std::min(width * kLanes, n - begin * kLanes) - (width - 1) * kLanes;
      dispatch(std::make_integer_sequence<int, kWidth>(), width, rows, k, a, lda, packed + begin * kLanes * k,
               c + begin * kLanes, ldc, tail, accumulate);
    }
  }

 private:
  static constexpr int max_rows(int w) { return std::min((kRegisters - 1 - w) / w, FT_CAP); }

  template <int... W, typename... Args>
  static void dispatch(std::integer_sequence<int, W...>, int64_t width, Args... args) {
    ((width == W + 1 ? panel<W + 1>(args...) : void()), ...);
  }

  using Block = void (*)(int64_t, const T*, int64_t, const T*, T*, int64_t, int64_t, bool);
  template <int W, int... R>
  static constexpr std::array<Block, sizeof...(R)> table(std::integer_sequence<int, R...>) {
    return {&block<R + 1, W>...};
  }

  template <int W>
  static void panel(int64_t rows, int64_t k, const T* a, int64_t lda, const T* b, T* c, int64_t ldc,
                    int64_t tail, bool accumulate) {
    static constexpr auto blocks = table<W>(std::make_integer_sequence<int, max_rows(W)>());
    constexpr int64_t kc_max = FT_KB / (W * kLanes * sizeof(T));
    int64_t row_blocks = (rows + max_rows(W) - 1) / max_rows(W);
    int64_t k_blocks = row_blocks > 1 ? std::max<int64_t>(1, (k + kc_max - 1) / kc_max) : 1;
    int64_t k0 = 0;
    for (int64_t kb = 0; kb < k_blocks; ++kb) {
      int64_t k1 = k * (kb + 1) / k_blocks;
      int64_t r0 = 0;
      for (int64_t rb = 0; rb < row_blocks; ++rb) {
        int64_t r1 = rows * (rb + 1) / row_blocks;
        blocks[r1 - r0 - 1](k1 - k0, a + r0 * lda + k0, lda, b + k0 * W * kLanes, c + r0 * ldc, ldc, tail,
                            accumulate || kb > 0);
        r0 = r1;
      }
      k0 = k1;
    }
  }

  template <int R, int W>
  static void block(int64_t k, const T* a, int64_t lda, const T* b, T* c, int64_t ldc, int64_t tail,
                    bool accumulate) {
    constexpr int U = R * W >= 8 ? 1 : R * W >= 4 ? 2 : R * W >= 2 ? 4 : 8;
    Vec acc[U][R][W];
    if (accumulate) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w)
          acc[0][r][w] = Vec::loadu(c + r * ldc + w * kLanes, w + 1 < W ? kLanes : tail);
      }
    }
    int64_t i = 0;
    for (; i + U <= k; i += U) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) step<R, W>(a + i + u, lda, b + (i + u) * W * kLanes, acc[u]);
    }
    if constexpr (U > 1) {
      for (; i < k; ++i) step<R, W>(a + i, lda, b + i * W * kLanes, acc[0]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 8
        for (int u = 1; u < U; ++u) acc[0][r][w] = acc[0][r][w] + acc[u][r][w];
        acc[0][r][w].store(c + r * ldc + w * kLanes, w + 1 < W ? kLanes : tail);
      }
    }
  }

  template <int R, int W>
  static inline __attribute__((always_inline)) void step(const T* a, int64_t lda, const T* b, Vec (&acc)[R][W]) {
    Vec bv[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) bv[w] = Vec::loadu(b + w * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vec av(a[r * lda]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) acc[r][w] = at::vec::fmadd(av, bv[w], acc[r][w]);
    }
  }
};

}  // namespace ftbptt
