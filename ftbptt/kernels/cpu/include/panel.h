// One panel of the packed matrix of gemm.h, times rows of the other. This is most of what there is to compile of a
// kernel, and the same in all of them, so it can be compiled once and linked (see FTBPTT_PANELS).
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace ftbptt {

// What a block prefetches at each row of the panel. kNothing: b is in L1. kLines: rows of the same panel a little
// ahead, into L1. kNextPanel: also two cache lines of the next panel, into L2. The blocks of rows divide the next
// panel between them, which hides the latency of L3 behind the arithmetic of all of them; a single block has too
// little arithmetic for that.
enum Ahead { kNothing, kLines, kNextPanel };

template <typename T>
struct Lanes {
  static constexpr int64_t kCount = at::vec::Vectorized<T>::size();
  static constexpr int kRegisters = kCount * sizeof(T) >= 64 ? 32 : 16;
};

// The width, in vectors, of a panel that is prefetched. A panel that is not may be wider.
constexpr int kPrefetchedWidth = 3;

// c[rows, W vectors] = a[rows, k] @ b[k, W vectors], or added to c. Hidden: a process loads many kernels, possibly built
// for different instruction sets, and must not share this code between them.
template <typename T, int W, Ahead A = kNothing>
struct __attribute__((visibility("hidden"))) Panel {
  static constexpr int64_t kLanes = Lanes<T>::kCount;
  static constexpr int kRegisters = Lanes<T>::kRegisters;

  // The sums, one row of the panel and one element of a must fit in the vector registers. More than 12 rows would run
  // out of address registers.
  static constexpr int kMaxRows = std::min((kRegisters - 1 - W) / W, 12);

  // `tail` columns of the last vector are stored; `next` is the panel after b.
  static void run(int64_t rows, int64_t k, const T* a, int64_t lda, const T* b, const T* next, T* c, int64_t ldc,
                  int64_t tail, bool add);

 private:
  static_assert(W == kPrefetchedWidth || A == kNothing);
  using Vec = at::vec::Vectorized<T>;
  using Block = void (*)(int64_t, const T*, int64_t, const T*, const T*, int64_t, T*, int64_t, int64_t, bool);

  // Prefetching pays from 3 rows on: below, the loads of b take all the load slots.
  template <int... R>
  static constexpr std::array<Block, sizeof...(R)> table(std::integer_sequence<int, R...>) {
    return {&block<R + 1, R + 1 >= 3 ? A : kNothing>...};
  }

  // An FMA has a latency of 4 cycles and two start per cycle. Blocks of few rows therefore split the sum over k into
  // partial sums, to have at least 8, better 12 independent sums, as far as the registers allow.
  static constexpr int partial_sums(int sums) {
    int parts = 1;
    while (parts < 8 && sums * parts < 12 && sums * parts * 2 + W + 1 <= kRegisters) parts *= 2;
    return parts;
  }

  // R rows x W vectors of c; the last vector has `tail` columns. The loops over R, W and U unroll completely, which
  // turns the arrays into registers. The last bits of an element depend on U, hence on the block that it falls in.
  template <int R, Ahead P>
  static void block(int64_t k, const T* a, int64_t lda, const T* b, const T* next, int64_t next_stride, T* c,
                    int64_t ldc, int64_t tail, bool add) {
    constexpr int U = partial_sums(R * W);
    Vec sum[U][R][W];
    int64_t i = 0;
    for (; i + U <= k; i += U) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        if constexpr (P == kNextPanel) {
          __builtin_prefetch(next, 0, 2);
          __builtin_prefetch(next + kLanes, 0, 2);
          next += next_stride;
        }
        add_row<R, P != kNothing>(a + i + u, lda, b + (i + u) * W * kLanes, sum[u]);
      }
    }
    if constexpr (U > 1) {
      for (; i < k; ++i) add_row<R, false>(a + i, lda, b + i * W * kLanes, sum[0]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 8
        for (int u = 1; u < U; ++u) sum[0][r][w] = sum[0][r][w] + sum[u][r][w];
        T* const out = c + r * ldc + w * kLanes;
        const int64_t columns = w + 1 < W ? kLanes : tail;
        if (add) sum[0][r][w] = sum[0][r][w] + Vec::loadu(out, columns);
        sum[0][r][w].store(out, columns);
      }
  }

  // sum[r, :] += a[r, i] * b[i, :] for one i
  template <int R, bool Prefetch>
  static inline __attribute__((always_inline)) void add_row(const T* a, int64_t lda, const T* b, Vec (&sum)[R][W]) {
    constexpr int64_t kDistance = 2048 / sizeof(T);
    Vec row[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      row[w] = Vec::loadu(b + w * kLanes);
      if constexpr (Prefetch) __builtin_prefetch(b + w * kLanes + kDistance);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec element(a[r * lda]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[r][w] = at::vec::fmadd(element, row[w], sum[r][w]);
    }
  }
};

// Not defined within the class, where it would be inline, and so compiled with each kernel.
template <typename T, int W, Ahead A>
void Panel<T, W, A>::run(int64_t rows, int64_t k, const T* a, int64_t lda, const T* b, const T* next, T* c, int64_t ldc,
                         int64_t tail, bool add) {
  static constexpr std::array<Block, kMaxRows> blocks = table(std::make_integer_sequence<int, kMaxRows>());
  // blocks of equal size (up to one row), so that no remainder of few rows runs at a fraction of the speed
  int left = (static_cast<int>(rows) + kMaxRows - 1) / kMaxRows;
  const int64_t next_stride = left > 0 ? (W * kLanes + left - 1) / left : 0;
  for (; left > 0; --left) {
    const int size = (static_cast<int>(rows) + left - 1) / left;
    blocks[size - 1](k, a, lda, b, next, next_stride, c, ldc, tail, add);
    next += next_stride * k;
    a += size * lda;
    c += size * ldc;
    rows -= size;
  }
}

}  // namespace ftbptt

// All panels: FTBPTT_PANELS() defines them, FTBPTT_PANELS(extern) takes them from where they are defined.
#define FTBPTT_PANELS_OF(EXTERN, T)                            \
  EXTERN template struct ftbptt::Panel<T, 1>;                  \
  EXTERN template struct ftbptt::Panel<T, 2>;                  \
  EXTERN template struct ftbptt::Panel<T, 3>;                  \
  EXTERN template struct ftbptt::Panel<T, 3, ftbptt::kLines>;  \
  EXTERN template struct ftbptt::Panel<T, 3, ftbptt::kNextPanel>; \
  EXTERN template struct ftbptt::Panel<T, 4>;
#define FTBPTT_PANELS(EXTERN)      \
  FTBPTT_PANELS_OF(EXTERN, float)  \
  FTBPTT_PANELS_OF(EXTERN, double)
