// The runtime of every generated kernel: vectors, arithmetic under the same names for vectors and
// scalars, tiles of rows, and memory.
#pragma once

// Order matters: with AVX2, vec.h includes headers that depend on functional_base.h.
#include <ATen/cpu/vec/vec.h>

#include <ATen/cpu/vec/functional_base.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "buffer.h"
#include "complex_gemm.h"
#include "gemm.h"
#include "half.h"
#include "math.h"
#include "sums.h"
#include "tiles.h"

namespace ftbptt {

template <typename T>
using Vec = at::vec::Vectorized<T>;

template <typename X>
struct is_vec : std::false_type {};
template <typename T>
struct is_vec<Vec<T>> : std::true_type {};

// -- memory ---------------------------------------------------------------------------------------

template <typename T>
void copy(const T* from, int64_t count, T* to) {
  std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
}

// bfloat16 and float16 are storage formats only: kernels compute in float.
template <typename T>
constexpr bool is_half = std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>;

template <typename T>
auto load_(const T* p) {
  if constexpr (is_half<T>)
    return static_cast<float>(*p);
  else
    return *p;
}

template <typename V, typename S>
inline V load_(const S* p, int64_t count = V::size()) {
  using T = typename V::value_type;
  if constexpr (std::is_same_v<S, T>) {
    return count == V::size() ? V::loadu(p) : V::loadu(p, count);
  } else if constexpr (is_half<S> && std::is_same_v<T, float>) {
    return at::vec::convert<float>(Vec<S>::loadu(p, count));
  } else {
    alignas(64) T values[V::size()] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<T>(p[i]);
    const V loaded = V::loadu(values);
    if constexpr (std::is_same_v<S, bool>) return loaded != V(0);
    return loaded;
  }
}

template <typename S, typename V>
inline void store_(S* p, V v, int64_t count) {
  using T = typename V::value_type;
  if constexpr (std::is_same_v<S, T>) {
    if (count == V::size()) v.store(p);
    else v.store(p, count);
  } else if constexpr (is_half<S> && std::is_same_v<T, float>) {
    at::vec::convert<S>(v).store(p, count);
  } else {
    alignas(64) T values[V::size()];
    if constexpr (std::is_same_v<S, bool>) v = V::blendv(V(0), V(1), v);
    v.store(values);
    for (int64_t i = 0; i < count; ++i) p[i] = static_cast<S>(values[i]);
  }
}

template <typename S, typename X>
inline void store_(S* p, X x) {
  if constexpr (is_vec<X>::value) {
    store_(p, x, X::size());
  } else {
    *p = static_cast<S>(x);
  }
}

template <typename T, typename X>
inline void add_(T* p, X x) {
  if constexpr (is_vec<X>::value) {
    store_(p, load_<X>(p) + x);
  } else {
    *p += x;
  }
}

template <typename T, typename V>
inline void add_(T* p, V v, int64_t count) { store_(p, load_<V>(p, count) + v, count); }

// -- arithmetic: on vectors, and on scalars ------------------------------------------------------

// A vector of booleans is a mask: all bits of an element are set, or none.
template <typename V>
inline V as_mask(bool x) { return x ? V(0) == V(0) : V(0) != V(0); }
template <typename V>
inline V as_mask(V x) { return x; }
template <typename V>
inline V to_mask(V x) { return x != V(0); }
template <typename V>
inline V to_mask(bool x) { return as_mask<V>(x); }
template <typename V>
inline V from_mask(V x) { return V::blendv(V(0), V(1), x); }
template <typename V>
inline V from_mask(bool x) { return V(x ? 1 : 0); }

template <typename To, typename From>
inline To cast_(From x) {
  if constexpr (std::is_same_v<To, bool>) return x != From(0);
  else return static_cast<To>(x);
}

// A float rounded to a 16-bit type and converted back.
template <typename Half, typename X>
inline X rounded_(X x) {
  if constexpr (is_vec<X>::value) {
    alignas(64) Half values[X::size()];
    store_(values, x);
    return load_<X>(values);
  } else {
    return static_cast<float>(static_cast<Half>(x));
  }
}
template <typename X> inline X round_bfloat16_(X x) { return rounded_<c10::BFloat16>(x); }
template <typename X> inline X round_float16_(X x) { return rounded_<c10::Half>(x); }

// Integers wrap around, as in torch. In C++ signed overflow is undefined, so compute unsigned.
template <typename X, typename F>
inline X wrapped(X a, X b, F f) {
  if constexpr (std::is_integral_v<X>) return static_cast<X>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  else return f(a, b);
}
template <typename X> inline X add_(X a, X b) {
  return wrapped(a, b, [](auto x, auto y) { return x + y; });
}
template <typename X> inline X sub_(X a, X b) {
  return wrapped(a, b, [](auto x, auto y) { return x - y; });
}
template <typename X> inline X mul_(X a, X b) {
  return wrapped(a, b, [](auto x, auto y) { return x * y; });
}
template <typename X> inline X div_(X a, X b) { return a / b; }
template <typename X> inline X reciprocal_(X a) { return X(1) / a; }
template <typename X> inline X neg_(X a) {
  if constexpr (is_vec<X>::value) return a.neg();
  else if constexpr (std::is_integral_v<X>) return sub_(X(0), a);
  else return -a;
}
template <typename X> inline X conj_(X a) {
  if constexpr (is_vec<X>::value) return a.conj();
  else return std::conj(a);
}

template <typename X> inline auto eq_(X a, X b) { return a == b; }
template <typename X> inline auto ne_(X a, X b) { return a != b; }
template <typename X> inline auto lt_(X a, X b) { return a < b; }
template <typename X> inline auto le_(X a, X b) { return a <= b; }
template <typename X> inline auto gt_(X a, X b) { return a > b; }
template <typename X> inline auto ge_(X a, X b) { return a >= b; }

template <typename A, typename B, typename F>
inline auto bitwise(A a, B b, F f) {
  if constexpr (is_vec<A>::value) return f(a, as_mask<A>(b));
  else if constexpr (is_vec<B>::value) return f(as_mask<B>(a), b);
  else return static_cast<decltype(f(a, b))>(f(a, b));
}
template <typename A, typename B> inline auto bit_and_(A a, B b) {
  return bitwise(a, b, [](auto x, auto y) -> decltype(x) { return x & y; });
}
template <typename A, typename B> inline auto bit_or_(A a, B b) {
  return bitwise(a, b, [](auto x, auto y) -> decltype(x) { return x | y; });
}
template <typename A, typename B> inline auto bit_xor_(A a, B b) {
  return bitwise(a, b, [](auto x, auto y) -> decltype(x) { return x ^ y; });
}
template <typename X> inline X bit_not_(X a) {
  if constexpr (is_vec<X>::value) return a ^ as_mask<X>(true);
  else return !a;
}

template <typename C, typename X> inline X where_(C condition, X a, X b) {
  if constexpr (is_vec<C>::value) return X::blendv(b, a, condition);
  else return condition ? a : b;
}
template <typename X> inline X maximum_(X a, X b) {
  if constexpr (is_vec<X>::value) return at::vec::maximum(a, b);
  else return a != a || a > b ? a : b;
}
template <typename X> inline X minimum_(X a, X b) {
  if constexpr (is_vec<X>::value) return at::vec::minimum(a, b);
  else return a != a || a < b ? a : b;
}
template <typename X> inline X relu_(X a) { return where_(lt_(a, X(0)), X(0), a); }
template <typename X> inline X sign_(X a) {
  return sub_(where_(gt_(a, X(0)), X(1), X(0)), where_(lt_(a, X(0)), X(1), X(0)));
}

#define FTBPTT_UNARY(name, of_vector, of_number)            \
  template <typename X>                                     \
  inline X name##_(X a) {                                   \
    if constexpr (is_vec<X>::value) return a.of_vector();   \
    else return static_cast<X>(of_number(a));               \
  }
FTBPTT_UNARY(exp2, exp2, std::exp2)
FTBPTT_UNARY(expm1, expm1, std::expm1)
FTBPTT_UNARY(log, log, std::log)
FTBPTT_UNARY(log2, log2, std::log2)
FTBPTT_UNARY(log1p, log1p, std::log1p)
FTBPTT_UNARY(sqrt, sqrt, std::sqrt)
FTBPTT_UNARY(sin, sin, std::sin)
FTBPTT_UNARY(cos, cos, std::cos)
FTBPTT_UNARY(tan, tan, std::tan)
FTBPTT_UNARY(sinh, sinh, std::sinh)
FTBPTT_UNARY(cosh, cosh, std::cosh)
FTBPTT_UNARY(asin, asin, std::asin)
FTBPTT_UNARY(acos, acos, std::acos)
FTBPTT_UNARY(atan, atan, std::atan)
FTBPTT_UNARY(erfc, erfc, std::erfc)
FTBPTT_UNARY(floor, floor, std::floor)
FTBPTT_UNARY(ceil, ceil, std::ceil)
FTBPTT_UNARY(trunc, trunc, std::trunc)
FTBPTT_UNARY(round, round, std::nearbyint)
#undef FTBPTT_UNARY

template <typename X> inline X abs_(X a) {
  if constexpr (is_vec<X>::value) return a.abs();
  else if constexpr (std::is_integral_v<X>) return a < 0 ? neg_(a) : a;
  else return std::abs(a);
}
template <typename T> inline T abs_(c10::complex<T> a) { return std::abs(a); }
template <typename T> inline T real_(c10::complex<T> a) { return a.real(); }
template <typename T> inline T imag_(c10::complex<T> a) { return a.imag(); }
template <typename T> inline c10::complex<T> complex_(T real, T imag) { return {real, imag}; }
template <typename X> inline X exp_(X a) {
  if constexpr (std::is_same_v<X, Vec<float>>) return fast_exp(a);
  else if constexpr (is_vec<X>::value) return a.exp();
  else return std::exp(a);
}
template <typename X> inline X tanh_(X a) {
  if constexpr (std::is_same_v<X, Vec<float>>) return fast_tanh(a);
  else if constexpr (is_vec<X>::value) return a.tanh();
  else return std::tanh(a);
}
template <typename X> inline X erf_(X a) {
  if constexpr (std::is_same_v<X, Vec<float>>) return fast_erf(a);
  else if constexpr (is_vec<X>::value) return a.erf();
  else return std::erf(a);
}
template <typename X> inline X sigmoid_(X a) { return X(1) / (X(1) + exp_(neg_(a))); }
template <typename X> inline X rsqrt_(X a) { return X(1) / sqrt_(a); }
// A negative power of an integer is an integer only for 1 and -1.
template <typename X> inline X integer_pow(X a, X b) {
  if (b < 0) return a == 1 || a == X(-1) ? (b % 2 ? a : X(1)) : X(0);
  X result = 1;
  for (; b > 0; b /= 2, a = mul_(a, a))
    if (b % 2) result = mul_(result, a);
  return result;
}
template <typename X> inline X pow_(X a, X b) {
  if constexpr (is_vec<X>::value) return a.pow(b);
  else if constexpr (std::is_integral_v<X>) return integer_pow(a, b);
  else return std::pow(a, b);
}
template <typename X> inline X atan2_(X a, X b) {
  if constexpr (is_vec<X>::value) return a.atan2(b);
  else return std::atan2(a, b);
}
// Integer division by zero, and of the smallest integer by -1, would raise SIGFPE.
template <typename X> inline X fmod_(X a, X b) {
  if constexpr (is_vec<X>::value) return a.fmod(b);
  else if constexpr (std::is_integral_v<X>) return b == 0 || (b < 0 && b == X(-1)) ? X(0) : X(a % b);
  else return std::fmod(a, b);
}

// -- reductions: of scalars, of vectors, of the first ``count`` elements of a vector --------------

template <typename T> T maximum_neutral() { return -std::numeric_limits<T>::infinity(); }
template <typename T> T minimum_neutral() { return std::numeric_limits<T>::infinity(); }

#define FTBPTT_REDUCTION(name, op)                                                        \
  template <typename X>                                                                   \
  inline X name##_of(X total, X x) { return op(total, x); }                               \
  template <typename X>                                                                   \
  inline X name##_of(X total, X x, int64_t count) { return X::set(total, op(total, x), count); } \
  template <typename T>                                                                   \
  inline T name##_all(Vec<T> total) {                                                     \
    return at::vec::vec_reduce_all<T>([](Vec<T>& a, Vec<T>& b) { return op(a, b); }, total); \
  }
FTBPTT_REDUCTION(sum, add_)
FTBPTT_REDUCTION(product, mul_)
FTBPTT_REDUCTION(maximum, maximum_)
FTBPTT_REDUCTION(minimum, minimum_)
#undef FTBPTT_REDUCTION

}  // namespace ftbptt
