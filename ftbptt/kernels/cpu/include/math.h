// exp, tanh and erf of vectors of floats, inlined: a library call would spill every live vector
// register. Polynomials from Cephes (Moshier), with errors of 1 to 2 ulp.
#pragma once

#include <ATen/cpu/vec/vec.h>

namespace ftbptt {

using at::vec::fmadd;
using Floats = at::vec::Vectorized<float>;

// y * 2^n for integral n, with overflow to infinity and gradual underflow.
inline Floats scale(Floats y, Floats n) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_scalef_ps(y, n);
#else
  // In two steps, as 2^n itself may be out of range.
  using Ints = at::vec::Vectorized<int32_t>;
  const auto power = [](Floats k) {
    const Ints exponent = at::vec::convert_to_int_of_same_size(k) + Ints(127);
    return at::vec::cast<float>(exponent << Ints(23));
  };
  const Floats half = (n * Floats(0.5f)).floor();
  return y * power(half) * power(n - half);
#endif
}

inline Floats fast_exp(Floats x) {
  // Beyond these bounds the result is infinity or zero; clamp keeps a NaN.
  x = at::vec::clamp(x, Floats(-105.f), Floats(90.f));
  const Floats n = (x * Floats(1.44269504088896341f)).round();
  Floats r = fmadd(n, Floats(-0.693359375f), x);
  r = fmadd(n, Floats(2.12194440e-4f), r);
  Floats p = fmadd(r, Floats(1.9875691500e-4f), Floats(1.3981999507e-3f));
  p = fmadd(p, r, Floats(8.3334519073e-3f));
  p = fmadd(p, r, Floats(4.1665795894e-2f));
  p = fmadd(p, r, Floats(1.6666665459e-1f));
  p = fmadd(p, r, Floats(5.0000001201e-1f));
  p = fmadd(p, r * r, r) + Floats(1.f);
  return scale(p, n);
}

inline Floats fast_tanh(Floats x) {
  const Floats size = x.abs(), square = x * x;
  Floats p = fmadd(square, Floats(-5.70498872745e-3f), Floats(2.06390887954e-2f));
  p = fmadd(p, square, Floats(-5.37397155531e-2f));
  p = fmadd(p, square, Floats(1.33314422036e-1f));
  p = fmadd(p, square, Floats(-3.33332819422e-1f));
  const Floats near = fmadd(p * square, x, x);
  // 1 - 2 / (exp(2|x|) + 1), with the sign of x.
  const Floats e = fast_exp(size + size);
  const Floats far = Floats(1.f) - Floats(2.f) / (e + Floats(1.f));
  return Floats::blendv(far, near, size < Floats(0.625f)).copysign(x);
}

// at::vec's erf has an absolute error of 1e-7, which is too much for small results.
inline Floats fast_erf(Floats x) {
  const Floats square = x * x;
  Floats p = fmadd(square, Floats(7.853861353153693e-5f), Floats(-8.010193625184903e-4f));
  p = fmadd(p, square, Floats(5.188327685732524e-3f));
  p = fmadd(p, square, Floats(-2.685381193529856e-2f));
  p = fmadd(p, square, Floats(1.128358514861418e-1f));
  p = fmadd(p, square, Floats(-3.761262582423300e-1f));
  p = fmadd(p, square, Floats(1.128379165726710f));
  return Floats::blendv(x.erf(), x * p, x.abs() < Floats(1.f));
}

}  // namespace ftbptt
